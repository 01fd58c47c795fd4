"""Structured output over a model's tokenizer."""

from collections.abc import Sequence

from jpaged.decoding.grammar import GrammarCompiler
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InvalidRequestError


def make_grammar_compiler(tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocabulary_size: int) -> GrammarCompiler:
    """The compiler for a model with logits for `vocabulary_size` tokens. Takes a few tenths of a second.

    Grammars describe the bytes that the output's tokens add to a text. That is the text itself, but for one case: a
    sentencepiece tokenizer that strips the first space of a text does so from the output if the prompt has no text.

    Raises InvalidRequestError when single tokens of this tokenizer have no bytes of their own.
    """
    if tokenizer.byte_codec is None:
        raise InvalidRequestError(
            "structured_outputs is set, but this model's tokenizer does not decode byte by byte; leave it out"
        )
    return GrammarCompiler(
        [tokenizer.token_bytes(token_id) for token_id in range(min(tokenizer.vocab_size, vocabulary_size))],
        tokenizer.special_ids,
        eos_token_ids,
        vocabulary_size,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )

"""Text that follows a grammar is the text that users get, whatever the tokenizer's kind."""

import random
import re
from functools import cache

import numpy as np
import pytest

from jpaged.decoding.grammar import GrammarCompiler
from jpaged.engine.detokenizer import IncrementalDetokenizer
from jpaged.engine.grammars import make_grammar_compiler
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import InvalidRequestError
from jpaged.params import StructuredOutputs
from tests.engine.tokenizer_builds import byte_level_backend, metaspace_backend, sentencepiece_backend

BACKENDS = {
    "byte-level": byte_level_backend,
    "sentencepiece": sentencepiece_backend,
    "sentencepiece without prefix": lambda: sentencepiece_backend(prefix=False),
}
PADDING = 7  # logits beyond the vocabulary


@cache
def prepare(kind: str) -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = Tokenizer(BACKENDS[kind](), {"bos_token": "<s>", "eos_token": "</s>"})
    assert tokenizer.eos_token_id is not None
    return tokenizer, make_grammar_compiler(tokenizer, [tokenizer.eos_token_id], tokenizer.vocab_size + PADDING)


def generate(kind: str, structured: StructuredOutputs, seed: int) -> list[int]:
    tokenizer, compiler = prepare(kind)
    matcher, draw, token_ids = compiler.compile(structured).start(), random.Random(seed), []
    while not matcher.is_finished:
        allowed = np.flatnonzero(np.unpackbits(matcher.next_mask().view(np.uint8), bitorder="little"))
        token_id = int(draw.choice(allowed))
        assert matcher.accept(token_id)
        if token_id != tokenizer.eos_token_id:
            token_ids.append(token_id)
    return token_ids


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("prompt", ["he wrote", ""])
def test_text_matches_exactly(kind, prompt):
    tokenizer, _ = prepare(kind)
    prompt_ids = [tokenizer.bos_token_id or 0, *(tokenizer.encode(prompt) if prompt else [])]
    regex = "(hello|\u00e9|\u4f60|\U0001f642){1,3}( world|  )?</s>?"
    choice = ("hello world", "he", "hell", "\U0001f642 \u4f60")
    for seed in range(30):
        for structured in (StructuredOutputs(regex=regex), StructuredOutputs(choice=choice)):
            token_ids = generate(kind, structured, seed)
            assert not set(token_ids) & tokenizer.special_ids
            stream = IncrementalDetokenizer(tokenizer, prompt_ids)
            text = stream.push(token_ids) + stream.finish()
            assert re.fullmatch(regex, text) if structured.choice is None else text in choice


@pytest.mark.parametrize("kind", BACKENDS)
def test_forced_text_is_tokenized_as_the_tokenizer_would(kind):
    tokenizer, _ = prepare(kind)
    token_ids = generate(kind, StructuredOutputs(regex="he wo"), 0)
    assert [tokenizer.token_bytes(token_id) for token_id in token_ids] == [b"he", b" w", b"o"]


def test_tokenizers_without_bytes_are_refused():
    with pytest.raises(InvalidRequestError, match="tokenizer does not decode byte by byte; leave it out"):
        make_grammar_compiler(Tokenizer(metaspace_backend()), [0], 10)

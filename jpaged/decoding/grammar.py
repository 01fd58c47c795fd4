"""Structured output: which tokens may come next, decided by llguidance for one sequence at a time.

A GrammarCompiler knows the model's vocabulary as bytes and turns StructuredOutputs into Grammars; a Grammar starts one
GrammarMatcher for each sequence.

Choices that the outputs show:
- JSON has at most one space behind each comma and colon and no other white space. Small models otherwise fall into
  endless white space, which any schema would allow.
- Properties come in the order of the schema, each at most once; further properties come behind them.
- Text that the grammar leaves no choice about is forced in the tokens that the tokenizer would choose for it.
- Special tokens are never text. A grammar in Lark's notation may name them: <|python_tag|>.
- Lark's terminals (upper-case names) take as much text as they can, so what follows one should not begin like it.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from jpaged.decoding.ebnf import ebnf_to_lark, is_ebnf
from jpaged.decoding.grammar_trial import GrammarTrial
from jpaged.errors import InvalidRequestError
from jpaged.params import StructuredOutputs

# A request may bring anything; what these and the trial let through compiles in seconds and takes tens of milliseconds
# a token at worst, and tens of MiB. Common schemas take a thousandth of that.
MAX_SOURCE_CHARACTERS = 128 * 1024
LIMITS: dict[str, Any] = {"max_items_in_row": 1000, "max_lexer_states": 50_000, "verbose_errors": False}
JSON_LIMITS: dict[str, Any] = LIMITS | {
    "max_items_in_row": 2000
}  # less ambiguous, and objects may have hundreds of properties
MAX_CACHED_GRAMMARS = 32
MAX_FORCED_CHARACTERS = 256  # of forced text only the next token is wanted: longer text need not be tokenized
MAX_REASON_CHARACTERS = 300

HARMLESS = ("json_object", "choice")
JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
JSON_OBJECT = '{"type": "object"}'
NOUNS = {
    "json_schema": "schema",
    "json_object": "tokenizer",
    "regex": "expression",
    "choice": "texts",
    "grammar": "grammar",
}
# Constraints of old drafts that llguidance takes for annotations.
UNKNOWN_CONSTRAINTS = ("extends", "disallow", "divisibleBy")
# What llguidance says, where it speaks of options that users here do not have.
REASONS = {
    "oneOf constraints are not supported": "oneOf is possible only where no value could match two of its branches;"
    " anyOf allows any of them",
    "NoExtensionBias": "no token of the model's vocabulary fits",
    "recursion limit exceeded": "it is nested too deep",
}
SAMPLING_OPTION = re.compile(r"^\s*[?!]?[\w-]+\[[^\]\n]*\btemperature\b", re.MULTILINE)  # of a rule in Lark's notation
SPECIAL_MARK = 0xFF  # a byte that no text has: how llguidance marks special tokens
SENTINEL = "\x02"  # stands before a text to be tokenized as if it went on, and merges with nothing


class GrammarCompiler:
    """Compiles what requests ask for, over one model's vocabulary. Safe to use from several threads."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_token_ids: frozenset[int],
        eos_token_ids: Sequence[int],
        vocabulary_size: int,
        encode: Callable[[str], list[int]] | None,
    ):
        """Takes a few tenths of a second.

        Args:
            token_bytes: what each token adds to a text, by token id.
            special_token_ids: tokens that are never text, whatever their bytes.
            eos_token_ids: tokens that end the output, allowed exactly where the grammar allows an end.
            vocabulary_size: width of the model's logits; ids from the end of `token_bytes` on are never allowed.
            encode: text to token ids without BOS or EOS, used for text that a grammar forces. It need not be exact:
                what does not spell the text is not used. `None` takes the longest tokens that fit.
        """
        self._vocabulary = _Vocabulary(token_bytes, special_token_ids, eos_token_ids, vocabulary_size, encode)
        self._trial = GrammarTrial(
            self._vocabulary.tokens, self._vocabulary.special_token_ids, self._vocabulary.tokenizer.eos_tokens
        )
        self._grammars: OrderedDict[tuple[str, str], Grammar | str] = OrderedDict()  # or why there is none
        self._lock = Lock()

    def compile(self, structured: StructuredOutputs) -> "Grammar":
        """The grammar of `structured`, perhaps from the cache.

        A grammar that defines a rule with `::=` is EBNF (as in `jpaged.decoding.ebnf`) and starts at `root`, any other
        is Lark's notation and starts at `start`. Regular expressions are those of Rust's regex crate, without
        look-around and backreferences, and with \\w and \\d of all Unicode.

        Raises InvalidRequestError, naming the field and the reason, for what cannot be compiled, is too large, or
        holds a constraint that would not be enforced.
        """
        kind, source = _source(structured)
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise InvalidRequestError(
                f"structured_outputs.{kind} has {len(source)} characters, at most {MAX_SOURCE_CHARACTERS} are possible;"
                " shorten it"
            )
        with self._lock:
            known = self._grammars.get((kind, source))
        if known is None:
            known = self._try(kind, source)
        with self._lock:
            self._grammars[(kind, source)] = known
            self._grammars.move_to_end((kind, source))
            while len(self._grammars) > MAX_CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
        if isinstance(known, str):
            raise InvalidRequestError(
                f"structured_outputs.{kind} cannot be compiled: {known}; change the {NOUNS[kind]}"
            )
        return known

    def _try(self, kind: str, source: str) -> "Grammar | str":
        """The grammar, or why there is none."""
        limits = JSON_LIMITS if kind in ("json_schema", "json_object") else LIMITS
        try:
            definition = _to_llguidance(kind, source)
            if kind not in HARMLESS and (harm := self._trial.find_harm(definition, limits)):
                return harm
            return Grammar(self._vocabulary, definition, LLParserLimits(**limits))
        except ValueError as error:
            return _reason(str(error))


class Grammar:
    """A compiled grammar, which any number of sequences may follow."""

    def __init__(self, vocabulary: "_Vocabulary", definition: str, limits: LLParserLimits):
        """`definition` is llguidance's. Raises ValueError, with the reason, when it cannot be followed."""
        self._vocabulary, self._definition, self._limits = vocabulary, definition, limits
        self._fresh = self._build()
        if warnings := self._fresh.get_grammar_warnings():
            raise ValueError("; ".join(warnings))
        # The first mask and token show what only shows with a vocabulary. Every sequence needs that mask again.
        mask = vocabulary.mask(self._fresh.compute_bitmask())
        trial = self._fresh.deep_copy()
        trial.try_consume_tokens(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[:1].tolist())
        for matcher in (self._fresh, trial):
            if matcher.is_error():
                raise ValueError(matcher.get_error())

    def start(self) -> "GrammarMatcher":
        """A matcher at the grammar's beginning."""
        return GrammarMatcher(self._vocabulary, self._fresh.deep_copy(), self._build)

    def _build(self) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary.tokenizer, self._definition, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


class GrammarMatcher:
    """How far one sequence has come in its grammar.

    Sequences of the same grammar share the states that their lexers have found. There is a limit to those, and who
    meets it spoils them for all: such a matcher builds states of its own, once, and goes on.
    """

    def __init__(self, vocabulary: "_Vocabulary", matcher: LLMatcher, build: Callable[[], LLMatcher]):
        self._vocabulary, self._matcher, self._build = vocabulary, matcher, build
        self._shares_states = True
        self._token_ids: list[int] = []

    def next_mask(self) -> NDArray[np.uint32]:
        """The tokens that may come next: a new array [ceil(vocabulary / 32)], bit i % 32 of word i // 32 for token i.

        End-of-sequence tokens are in it where the output may end, and alone where it must. Look at `failure` behind
        it: after a failure there is no more than those, either.
        """
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error() and self._rebuild():
            bits = self._matcher.compute_bitmask()
        return self._vocabulary.mask(bits)

    def accept(self, token_id: int) -> bool:
        """Go on by one token. False, and no change, if the grammar forbids the token here; False after a failure."""
        if self.is_finished:
            return token_id in self._vocabulary.end_ids
        if not self._vocabulary.holds(token_id):
            return False
        if self._matcher.try_consume_tokens([token_id]) == 0 and not (
            self._matcher.is_error() and self._rebuild() and self._matcher.try_consume_tokens([token_id]) == 1
        ):
            return False
        self._token_ids.append(token_id)
        return True

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete and nothing can follow: no end-of-sequence token need be waited for."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failure(self) -> str | None:
        """Why the grammar cannot be followed further: it has become too complex, or no token fits. `None` if it can."""
        return _reason(self._matcher.get_error()) if self._matcher.is_error() else None

    def copy(self) -> "GrammarMatcher":
        """An independent matcher at the same place."""
        copied = GrammarMatcher(self._vocabulary, self._matcher.deep_copy(), self._build)
        copied._shares_states, copied._token_ids = self._shares_states, list(self._token_ids)
        return copied

    def _rebuild(self) -> bool:
        """Come back to the same place with states of its own; whether that was possible."""
        if not self._shares_states:
            return False
        self._shares_states = False
        fresh = self._build()
        if fresh.try_consume_tokens(self._token_ids) < len(self._token_ids):
            return False
        self._matcher = fresh
        return True


class _Vocabulary:
    """A vocabulary as llguidance takes it (its TokenizerWrapper), and masks as the device takes them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_token_ids: frozenset[int],
        eos_token_ids: Sequence[int],
        vocabulary_size: int,
        encode: Callable[[str], list[int]] | None,
    ):
        self._size, self._encode = vocabulary_size, encode
        self.end_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocabulary_size)
        special = {token_id for token_id in special_token_ids | self.end_ids if token_id < vocabulary_size}
        self.tokens = [
            b"" if data[:1] == bytes([SPECIAL_MARK]) else data for data in map(bytes, token_bytes[:vocabulary_size])
        ]
        self.tokens += [b""] * (vocabulary_size - len(self.tokens))
        # llguidance needs an end; for a model that has none it is one more token, which no mask shows.
        ends = sorted(self.end_ids) or [vocabulary_size]
        if not self.end_ids:
            self.tokens.append(b"")
            special.add(vocabulary_size)
        for token_id in special:  # one without a spelling would not be known as special
            self.tokens[token_id] = self.tokens[token_id] or f"<{token_id}>".encode()
        self.special_token_ids, self.eos_token_id = sorted(special), ends[0]
        self._special = frozenset(special)
        self.tokenizer = LLTokenizer(cast(Any, self), eos_token=ends)

    def holds(self, token_id: int) -> bool:
        return 0 <= token_id < self._size

    def mask(self, bits: bytes) -> NDArray[np.uint32]:
        mask = np.frombuffer(bits, dtype="<u4")[: -(-self._size // 32)].astype(np.uint32)
        if not self.end_ids and self._size % 32:
            mask[-1] &= np.uint32((1 << self._size % 32) - 1)
        return mask

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids that spell `text`, or the beginning of a long one; called by llguidance for forced text."""
        if isinstance(text, bytes):
            text = text.decode(errors="ignore")
        text = text[:MAX_FORCED_CHARACTERS]
        for before in ("", SENTINEL) if self._encode is not None else ():
            token_ids = self._behind(before, text)
            if token_ids is not None:
                return token_ids
        return self.tokenizer.greedy_tokenize(text)

    def _behind(self, before: str, text: str) -> list[int] | None:
        """The tokens of `text` where it follows `before`; `None` if `encode` does not give such tokens. Tokenizers of
        the sentencepiece kind put a space before a text that begins, so theirs are right only behind something."""
        assert self._encode is not None
        try:
            token_ids = self._encode(before + text)
        except Exception:  # llguidance cannot pass it on, and there is another way
            return None
        if any(not self.holds(token_id) or token_id in self._special for token_id in token_ids):
            return None
        spelled = [self.tokens[token_id] for token_id in token_ids]
        start = 0
        if before:
            while start < len(spelled) and SENTINEL.encode() not in spelled[start]:
                start += 1
            if start == len(spelled) or not spelled[start].endswith(SENTINEL.encode()):
                return None
            start += 1
        return token_ids[start:] if b"".join(spelled[start:]) == text.encode() else None


def _source(structured: StructuredOutputs) -> tuple[str, str]:
    """(kind, text) of the one field that is set."""
    if structured.json_schema is not None:
        assert isinstance(structured.json_schema, str), "StructuredOutputs keeps schemas as text"
        return "json_schema", structured.json_schema
    if structured.regex is not None:
        return "regex", structured.regex
    if structured.choice is not None:
        return "choice", "|".join(map(_regex_of, structured.choice))
    if structured.grammar is not None:
        return "grammar", structured.grammar
    return "json_object", JSON_OBJECT


def _regex_of(text: str) -> str:
    """A regular expression for `text` alone. Letters and digits stand for themselves, all else is spelled by number."""
    return "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text)


def _to_llguidance(kind: str, source: str) -> str:
    """llguidance's definition of a grammar. Raises ValueError with the reason when there is none."""
    if kind in ("json_schema", "json_object"):
        return LLMatcher.grammar_from_json_schema(_checked_schema(source), overrides=cast(Any, JSON_STYLE))
    if kind in ("regex", "choice"):
        return LLMatcher.grammar_from_regex(source)
    if SAMPLING_OPTION.search(source):
        raise ValueError("a grammar cannot set a temperature")
    lark = ebnf_to_lark(source) if is_ebnf(source) else source
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _checked_schema(source: str) -> str:
    """The schema, made an object. Raises ValueError for constraints that llguidance would pass over."""
    try:
        schema = json.loads(source)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object, or true; this is {json.dumps(schema)[:50]}")
    if "x-guidance" in schema:
        raise ValueError("x-guidance is not part of JSON schema")
    for part in _schemas_in(cast(dict[str, Any], schema)):
        for keyword in UNKNOWN_CONSTRAINTS:
            if keyword in part:
                raise ValueError(f"{keyword} is not supported")
        # Names beyond those of the schema may come twice, and then count once.
        least, required = part.get("minProperties", 0), part.get("required", [])
        if isinstance(least, int) and isinstance(required, list) and least > len(cast(list[Any], required)) + 1:
            raise ValueError(
                f"minProperties is {least}, and beyond the required properties only one more can be demanded"
            )
    return source


def _schemas_in(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """`schema` and all schemas in it, by the keywords that hold some."""
    found, waiting = list[dict[str, Any]](), cast(list[Any], [schema])
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        part = cast(dict[str, Any], part)
        found.append(part)
        for keyword in ("items", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems"):
            inner = part.get(keyword)
            waiting += cast(list[Any], inner) if isinstance(inner, list) else [inner]
        for keyword in ("properties", "patternProperties", "$defs", "definitions"):
            inner = part.get(keyword)
            if isinstance(inner, dict):
                waiting += cast(dict[str, Any], inner).values()
    return found


def _reason(error: str) -> str:
    """llguidance's error as one short line, in words that fit here."""
    for known, reason in REASONS.items():
        if known in error:
            return reason
    if "error: " in error:  # of the regular expression parser, behind a picture of the expression
        error = error.rpartition("error: ")[2].partition("\n")[0]
    line = " ".join(error.split())
    return line if len(line) <= MAX_REASON_CHARACTERS else line[:MAX_REASON_CHARACTERS] + "..."

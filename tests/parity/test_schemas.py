"""300 JSON schemas over the demo model's vocabulary: whatever is drawn from the masks parses and validates.

scripts/check_schemas.py asks the model itself for all of them.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from jpaged.decoding.grammar import GrammarCompiler, GrammarMatcher
from jpaged.engine.grammars import make_grammar_compiler
from jpaged.engine.model_source import resolve_model
from jpaged.engine.tokenizer import load_tokenizer
from jpaged.params import StructuredOutputs

SCHEMAS = json.loads((Path(__file__).parent / "schemas" / "schemas.json").read_text(encoding="utf-8"))
END = 2  # <|im_end|>
FREE_TOKENS = 12  # so many are drawn from all that fit, then those that lead to an end are preferred
MOST_TOKENS = 2000
FAMILIES = sorted({entry["name"].rsplit(" ", 1)[0] for entry in SCHEMAS})


@pytest.fixture(scope="module")
def vocabulary() -> list[bytes]:
    tokenizer = load_tokenizer(resolve_model("demo"))
    return [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = load_tokenizer(resolve_model("demo"))
    return make_grammar_compiler(tokenizer, [END], tokenizer.vocab_size)


@pytest.fixture(scope="module")
def closing(vocabulary: list[bytes]) -> np.ndarray:
    """Which tokens lead to an end: they close or separate something, and open nothing."""
    found = np.zeros(len(vocabulary), bool)
    for token_id, data in enumerate(vocabulary):
        found[token_id] = bool(data) and not set(data) - set(b'"]},:@')
    found[END] = True
    return found


def draw_text(matcher: GrammarMatcher, vocabulary: list[bytes], closing: np.ndarray, draw: random.Random) -> str:
    data = b""
    for step in range(MOST_TOKENS):
        if matcher.is_finished:
            return data.decode()
        bits = np.unpackbits(matcher.next_mask().view(np.uint8), bitorder="little")[: len(vocabulary)].astype(bool)
        assert matcher.failure is None
        prefers = step >= FREE_TOKENS or draw.random() < 0.3
        ids = np.flatnonzero(bits & closing) if prefers and draw.random() < 0.9 else ()
        token_id = int(draw.choice(ids if len(ids) else np.flatnonzero(bits)))
        assert matcher.accept(token_id)
        data += vocabulary[token_id] if token_id != END else b""
    raise AssertionError(f"no end after {MOST_TOKENS} tokens: {data[:200]}")


def check(schema: dict[str, Any], text: str) -> None:
    kind = validator_for(schema, default=Draft202012Validator)
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


def test_there_are_300_different_ones():
    assert len(SCHEMAS) == 300
    assert len({entry["name"] for entry in SCHEMAS}) == 300
    assert len({json.dumps(entry["schema"]) for entry in SCHEMAS}) == 300


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_texts_validate(family, compiler, vocabulary, closing):
    for entry in SCHEMAS:
        if entry["name"].rsplit(" ", 1)[0] == family:
            grammar = compiler.compile(StructuredOutputs(json_schema=entry["schema"]))
            for seed in range(6):
                text = draw_text(grammar.start(), vocabulary, closing, random.Random(f"{entry['name']} {seed}"))
                check(entry["schema"], text)

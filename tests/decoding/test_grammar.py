"""Masks and matchers against regular expressions, JSON and hand-written languages, over a small vocabulary of bytes."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import pytest

from jpaged.decoding import grammar as grammar_module
from jpaged.decoding.grammar import GrammarCompiler, GrammarMatcher
from jpaged.decoding.grammar_trial import GrammarTrial
from jpaged.errors import InvalidRequestError
from jpaged.params import StructuredOutputs

MERGES = [b"ab", b"abc", b'{"', b'":', b'"}', b', "', b": ", b"true", b"\xf0\x9f", b"\xf0\x9f\x98", b"</s>", b"12"]
TOKENS = [*(bytes([byte]) for byte in range(256)), *MERGES, b"a", b"<s>", b"</s>", b"<|end|>", b"<tool>", b"", b""]
SECOND_A = 256 + len(MERGES)  # another token of the same bytes
BOS, EOS, END, TOOL = range(SECOND_A + 1, SECOND_A + 5)
SPECIAL = frozenset({BOS, EOS, END, TOOL})
SIZE = len(TOKENS) + 5  # logits beyond the tokenizer's vocabulary


def longest_first(text: str) -> list[int]:
    """A stand-in for a tokenizer."""
    data, ids = text.encode(), []
    while data:
        size = next(size for size in range(min(5, len(data)), 0, -1) if data[:size] in TOKENS)
        ids.append(TOKENS.index(data[:size]))
        data = data[size:]
    return ids


COMPILER = GrammarCompiler(TOKENS, SPECIAL, [EOS, END], SIZE, longest_first)


def start(compiler: GrammarCompiler = COMPILER, **structured) -> GrammarMatcher:
    return compiler.compile(StructuredOutputs(**structured)).start()


def allowed(matcher: GrammarMatcher) -> set[int]:
    mask = matcher.next_mask()
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert (mask.dtype, mask.shape) == (np.uint32, (-(-SIZE // 32),))
    return set(np.flatnonzero(bits).tolist())


def spell(matcher: GrammarMatcher, text: str) -> bool:
    """Go on byte by byte; whether all were accepted."""
    return all(matcher.accept(byte) for byte in text.encode())


def may_end(matcher: GrammarMatcher) -> bool:
    ends = allowed(matcher) & {EOS, END}
    assert len(ends) in (0, 2)
    return bool(ends)


def matches(text: str, **structured) -> bool:
    matcher = start(**structured)
    return spell(matcher, text) and may_end(matcher)


def walk(matcher: GrammarMatcher, seed: int, most: int = 200) -> str | None:
    """A text drawn from the masks; `None` if it has not ended after `most` tokens."""
    draw, data = random.Random(seed), b""
    for _ in range(most):
        if matcher.is_finished:
            return data.decode()
        ids = allowed(matcher)
        assert matcher.failure is None and not ids & {BOS, TOOL} and max(ids) < len(TOKENS)
        ends = ids & {EOS, END}
        token_id = draw.choice(sorted(ends if ends and draw.random() < 0.3 else ids))
        assert matcher.accept(token_id)
        data += b"" if token_id in SPECIAL else TOKENS[token_id]
    return None


@pytest.mark.parametrize(
    "regex",
    [
        r"(ab|c){1,4}",
        r"[0-9]{1,3}(\.[0-9]+)?",
        r"a?/b\n?",
        r"\d[B-Z_]{2,4} [^a-z\n]?",
        "(\U0001f600|\u00e9)+!",
        r"^abc|abd$",
        r"(?i)yes|no",
    ],
)
def test_outputs_match_the_whole_regular_expression(regex):
    texts = [text for seed in range(60) if (text := walk(start(regex=regex), seed)) is not None]
    assert len(texts) >= 50
    assert all(re.fullmatch(regex, text) for text in texts)


def test_an_expression_that_allows_the_empty_text_may_end_at_once():
    assert may_end(start(regex="(ab)*")) and not start(regex="(ab)*").is_finished
    assert may_end(start(regex="")) and allowed(start(regex="")) == {EOS, END}


def test_every_token_that_fits_is_allowed_and_no_other():
    ids = {*b"a", SECOND_A, TOKENS.index(b"ab"), TOKENS.index(b"abc")}
    assert allowed(start(regex="a(b(c[xy])?)?")) == ids
    # Spelled out, the text of a special token is text; the token itself never is.
    matcher = start(regex="</s>|x")
    assert allowed(matcher) == {ord("<"), ord("x"), TOKENS.index(b"</s>")}
    assert not matcher.accept(EOS) and matcher.accept(TOKENS.index(b"</s>"))


def test_bytes_of_a_character_come_in_any_cut():
    matcher = start(regex="[\U0001f600-\U0001f64f]")
    assert TOKENS.index(b"\xf0\x9f\x98") in allowed(matcher) and ord("a") not in allowed(matcher)
    assert matcher.accept(TOKENS.index(b"\xf0\x9f"))
    assert allowed(matcher) == {0x98, 0x99}
    assert not may_end(matcher)
    assert spell(start(regex="[\U0001f600-\U0001f64f]"), "\U0001f642")


def test_choice_is_one_of_the_texts_and_a_text_may_begin_another():
    choice = ("a", "ab", "abcd", "\u65e5\u672c", "\U0001f600\U0001f601", "q\"'\\/\n\t\x01\x7f\u2028|.*", "A")
    matcher = start(choice=choice)
    assert spell(matcher, "a") and may_end(matcher) and not matcher.is_finished
    assert (
        spell(matcher, "b") and may_end(matcher) and ord("c") in allowed(matcher) and ord("x") not in allowed(matcher)
    )
    assert spell(matcher, "cd") and matcher.is_finished
    for text in choice:
        assert matches(text, choice=choice)
    assert {walk(start(choice=choice), seed) for seed in range(200)} == set(choice)
    for text in ("", "abc", "b", "ba", "\\"):
        assert not matches(text, choice=choice)


@pytest.mark.parametrize("text", ["{}", '{"a":1}', '{"a": 1, "b":[true, null]}', '{"\u00e9\U0001f600": "\\n\\""}'])
def test_any_json_object(text):
    json.loads(text)
    matcher = start(json_object=True)
    assert spell(matcher, text) and matcher.is_finished


@pytest.mark.parametrize("text", ["[1]", "1", '"a"', "{1:2}", '{"a":01}', '{"a":1,}', ' {"a":1}', '{"a":  1}', "{\n}"])
def test_no_other_json_and_no_needless_white_space(text):
    assert not matches(text, json_object=True)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["x", "\u00e9"]}, "n": {"type": "integer", "minimum": 3, "maximum": 12}},
    "required": ["name"],
    "additionalProperties": False,
}


def test_json_schema_as_text_and_as_mapping():
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert matches('{"name":"\u00e9", "n": 12}', json_schema=schema)
        assert matches('{"name":"x"}', json_schema=schema)
        for text in ('{"name":"y"}', '{"name":"x","n":13}', '{"n":3}', '{"name":"x","o":1}', '{"name":"x"}}'):
            assert not matches(text, json_schema=schema)


def test_recursive_schema():
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    schema = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    assert matches('{"next":{"next":{"next":null}}}', json_schema=schema)
    assert not matches('{"next":{"next":{}}}', json_schema=schema)


ARITHMETIC_LARK = """
start: sum
sum: product (("+" | "-") product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]+/
"""
ARITHMETIC_EBNF = """
# the same language
root    ::= product (("+" | '-') product)*  (* single quotes too *)
product ::= atom ("*" atom)*
atom    ::= [0-9]+
          | "(" root ")"
"""


@pytest.mark.parametrize("grammar", [ARITHMETIC_LARK, ARITHMETIC_EBNF])
def test_recursive_grammar_in_both_notations(grammar):
    for text in ("1", "12*(3+4)-5", "((((7))))"):
        assert matches(text, grammar=grammar)
    for text in ("", "1+", "(1", "1)", "a", "()"):
        assert not matches(text, grammar=grammar)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start ::= "[" items "]"\nitems ::= item{1,2}\nitem ::= "x"', ["[x]", "[xx]"], ["[]", "[xxx]", "x"]),
        ('first ::= start "!"\nstart ::= "a"?', ["!", "a!"], ["a"]),
        ('root ::= "\\u00e9" [\\u4e00-\\u4e10\\U0001F600]', ["\u00e9\u4e01", "\u00e9\U0001f600"], ["\u00e9\u4e11"]),
        ('root ::= [^"\\\\\\n] "\\x41\\"\\\\\\t"', ['xA"\\\t', '/A"\\\t'], ['"A"\\\t', '\nA"\\\t']),
        ("root ::= [\\]\\[\\-^&~/'\"]", list("][-^&~/'\""), ["\\", "a"]),
        ('root ::= . "x" # any character', ["\nx", "\u00e9x"], ["x"]),
        ("root ::= '\"' /* a comment */ \"'\"", ["\"'"], ["'\""]),
    ],
)  # fmt: skip
def test_ebnf(grammar, good, bad):
    assert [matches(text, grammar=grammar) for text in good] == [True] * len(good)
    assert [matches(text, grammar=grammar) for text in bad] == [False] * len(bad)


def test_a_grammar_may_name_a_special_token():
    matcher = start(grammar='start: "a" <tool> "b"')
    assert spell(matcher, "a") and allowed(matcher) == {TOOL}
    assert matcher.accept(TOOL) and spell(matcher, "b") and matcher.is_finished


@pytest.mark.parametrize("end", [EOS, END])
def test_any_end_token_ends_where_the_grammar_does(end):
    matcher = start(regex="ab+")
    assert not matcher.accept(end) and spell(matcher, "ab") and matcher.accept(end)
    assert matcher.is_finished and not matcher.accept(ord("b")) and allowed(matcher) == {EOS, END}
    finished = start(regex="ab")
    assert spell(finished, "ab") and finished.is_finished and finished.accept(end)


def test_a_forbidden_token_changes_nothing():
    matcher = start(regex="ab")
    for token_id in (ord("b"), BOS, TOKENS.index(b"abc"), len(TOKENS) - 1, SIZE - 1, SIZE, 10**9, -1):
        assert not matcher.accept(token_id)
    assert matcher.failure is None and spell(matcher, "ab") and matcher.is_finished


def test_forced_text_comes_in_the_tokenizers_tokens():
    matcher = start(regex="abcab")
    assert allowed(matcher) == {TOKENS.index(b"abc")}
    assert matcher.accept(TOKENS.index(b"abc")) and allowed(matcher) == {TOKENS.index(b"ab")}
    # Long forced text costs no more: only its beginning is tokenized.
    long = start(regex="abc{20000}")
    assert allowed(long) == {TOKENS.index(b"abc")}


def test_an_encoder_that_does_not_spell_the_text_is_not_believed():
    wrong = [
        lambda text: [ord("x")],
        lambda text: [BOS, *longest_first(text)],
        lambda text: longest_first(" " + text.replace("\x02", "\x02 ")),
        lambda text: [SIZE + 1],
        lambda text: 1 / 0,
        None,
    ]
    for encode in wrong:
        compiler = GrammarCompiler(TOKENS, SPECIAL, [EOS], SIZE, encode)
        matcher = start(compiler, regex="abcab")
        assert allowed(matcher) == {TOKENS.index(b"abc")}
        assert spell(matcher, "abcab") and matcher.is_finished
    # Right only behind something, as tokenizers are that put a space before a text.
    compiler = GrammarCompiler(TOKENS, SPECIAL, [EOS], SIZE, lambda text: [ord(" "), *text.encode()])
    assert allowed(start(compiler, regex="abcab")) == {ord("a")}


def test_copies_go_their_own_ways():
    first = start(regex="a(b|c)+d")
    assert spell(first, "a")
    second = first.copy()
    assert spell(first, "bd") and first.is_finished and not second.is_finished
    assert spell(second, "cb") and not may_end(second)
    third = second.copy()
    assert third.accept(ord("d")) and not second.is_finished
    mask = second.next_mask()
    mask[:] = 0
    assert second.next_mask().any()


def test_the_vocabulary_may_lack_what_the_grammar_needs():
    compiler = GrammarCompiler([b"a", b"b", b"</s>"], frozenset({2}), [2], 3, None)
    with pytest.raises(InvalidRequestError, match=r"regex cannot be compiled: no token of the model's vocabulary fits"):
        compiler.compile(StructuredOutputs(regex="xyz"))
    matcher = start(compiler, regex="[ab]x")
    assert matcher.failure is None and matcher.accept(0)
    assert matcher.next_mask().tolist() == [0b100]
    assert matcher.failure == "no token of the model's vocabulary fits"
    assert not matcher.is_finished and not matcher.accept(0) and not matcher.accept(2)


def test_a_model_without_an_end_token_and_one_with_narrow_logits():
    compiler = GrammarCompiler([*TOKENS[:256], b"", b"<s>"], frozenset({257}), [], 255, None)
    matcher = start(compiler, regex="ab*")
    assert matcher.accept(ord("a")) and not matcher.is_finished
    mask = matcher.next_mask()
    assert mask.shape == (8,) and np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [98]
    assert not matcher.accept(255) and not matcher.accept(257)


def test_a_matcher_that_meets_the_limit_of_shared_states_goes_on_with_its_own(monkeypatch):
    limits = {"max_lexer_states": 1500}
    monkeypatch.setattr(grammar_module, "LIMITS", limits)
    grammar = GrammarCompiler(TOKENS, SPECIAL, [EOS], SIZE, None).compile(StructuredOutputs(regex="(.*a.{12}b)?[ab]*"))
    draw, rebuilt = random.Random(0), 0
    for _ in range(40):
        matcher = grammar.start()
        for _ in range(30):
            assert EOS in allowed(matcher)
            assert matcher.accept(draw.choice(b"ab"))
            assert matcher.failure is None
        rebuilt += not matcher._shares_states
    assert rebuilt > 0


def test_a_grammar_that_becomes_too_complex_fails_alone(monkeypatch):
    limits = {"max_items_in_row": 100, "verbose_errors": False}
    monkeypatch.setattr(grammar_module, "LIMITS", limits)
    ambiguous = COMPILER.compile(StructuredOutputs(grammar='start: a\na: a a | "x" | a a a | ""'))
    matcher, other = ambiguous.start(), ambiguous.start()
    for _ in range(200):
        allowed(matcher)
        if not matcher.accept(ord("x")):
            break
    assert matcher.failure is not None and "max is 100;" in matcher.failure
    assert not matcher.is_finished and not matcher.accept(ord("x")) and not matcher.accept(EOS)
    assert other.accept(ord("x")) and other.failure is None


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        ({"json_schema": "{"}, "it is not JSON: Expecting property name"),
        ({"json_schema": "[1]"}, "a schema is an object, or true; this is [1]"),
        ({"json_schema": "false"}, "a schema is an object, or true; this is false"),
        ({"json_schema": "[" * 100_000}, "it is nested too deep"),
        ({"json_schema": '{"items":' * 200 + "{}" + "}" * 200}, "it is nested too deep"),
        ({"json_schema": {"type": "text"}}, "Invalid type: text"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"json_schema": {"properties": {"a": {"not": {}}}}}, 'Unimplemented keys: ["not"]'),
        ({"json_schema": {"$ref": "#/$defs/a"}}, "Pointer '/$defs/a' does not exist"),
        ({"json_schema": {"$ref": "http://example.com/s.json"}}, "is not present in a registry"),
        ({"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf is possible only where"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json_schema": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
        ({"json_schema": {"anyOf": [{"type": "object", "minProperties": 2}]}}, "minProperties is 2"),
        ({"json_schema": {"items": {"divisibleBy": 2}}}, "divisibleBy is not supported"),
        ({"json_schema": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance is not part of JSON schema"),
        ({"json_schema": {"$ref": "#"}}, "no token of the model's vocabulary fits"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "a{3000000}"}, "too many expressions constructed"),
        ({"grammar": "hello"}, "1(6): Expected token ':'"),
        ({"grammar": "start: item"}, 'unknown name: "item"'),
        ({"grammar": "start: <nothing>"}, 'unknown special token: "<nothing>"'),
        ({"grammar": "start: a\na[temperature=0.5]: /x+/"}, "a grammar cannot set a temperature"),
        ({"grammar": 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'}, 'Unimplemented keys: ["not"]'),
        ({"grammar": 'root ::= "a" item'}, "Rule 'item' not found"),
        ({"grammar": 'root ::= "\\d"'}, "\\d is an unknown escape"),
        ({"grammar": 'root ::= "\\ud83d"'}, "\\ud83d is no Unicode character"),
        ({"grammar": "r ::= [a-z]+ \n" * 5000}, "5000 rules in 70000 characters are too many to convert from EBNF"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "its groups are nested too deep"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_with_its_reason(structured, reason):
    [kind] = structured
    with pytest.raises(InvalidRequestError) as caught:
        COMPILER.compile(StructuredOutputs(**structured))
    message = str(caught.value)
    assert message.startswith(f"structured_outputs.{kind} cannot be compiled: ")
    assert reason in message and "\n" not in message and len(message) < 500


CHAIN = "start: r0\n" + "\n".join(f'r{place}: "a" r{place + 1} | "b"' for place in range(5000)) + '\nr5000: "z"'


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        ({"json_schema": {"type": "integer", "multipleOf": 10_000_019}}, "it takes more than 2 seconds to compile"),
        ({"grammar": CHAIN}, "it takes too much memory or too deep a recursion to compile"),
    ],
)
def test_what_would_take_the_server_down_is_refused_and_does_not(structured, reason):
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=reason):
            COMPILER.compile(StructuredOutputs(**structured))
    assert matches("ab", regex="ab|c")


def test_a_process_for_trials_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended with status 1"):
        GrammarTrial([b"a", b"</s>"], [1], [1]).find_harm("start: /a/", {})


def test_too_long_a_source_is_refused_before_it_costs_anything():
    with pytest.raises(InvalidRequestError, match=r"regex has 200000 characters, at most 131072 are possible; shorten"):
        COMPILER.compile(StructuredOutputs(regex="a" * 200_000))


def test_grammars_are_kept_and_compiled_by_many_threads_at_once():
    wishes = [StructuredOutputs(regex=f"a{{{size}}}|b") for size in range(1, 40)] * 2
    with ThreadPoolExecutor(4) as pool:
        grammars = list(pool.map(COMPILER.compile, wishes))
        texts = list(pool.map(lambda grammar: {walk(grammar.start(), seed) for seed in range(2)}, grammars))
    for wish, found in zip(wishes, texts, strict=True):
        assert found <= {"b", "a" * int(re.findall(r"\d+", asdict(wish)["regex"])[0])}
    assert COMPILER.compile(wishes[-1]) is COMPILER.compile(StructuredOutputs(regex=wishes[-1].regex))
    assert len(COMPILER._grammars) == grammar_module.MAX_CACHED_GRAMMARS

"""Pieces of text join to the whole, whatever the tokens and however they are grouped."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.detokenizer import MAX_HELD_TOKENS, IncrementalDetokenizer
from jpaged.engine.tokenizer import Tokenizer
from tests.engine.tokenizer_builds import (
    byte_level_backend,
    metaspace_backend,
    sentencepiece_backend,
    word_level_backend,
)

BUILDS = {
    "byte-level": Tokenizer(byte_level_backend(), {"bos_token": "<s>", "eos_token": "</s>"}),
    "sentencepiece": Tokenizer(sentencepiece_backend(), {"bos_token": "<s>", "eos_token": "</s>"}),
    "sentencepiece, no prefix": Tokenizer(sentencepiece_backend(prefix=False)),
    "metaspace": Tokenizer(metaspace_backend()),
    "word-level": Tokenizer(word_level_backend()),
}
TEXTS = ["he", "hello world", " w  w ", "🙂🎉 né你", "你好,世界", "aé\n", "👩‍👩‍👧"]
FEW = settings(max_examples=150)


def pieces(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], group: int = 1, **options: bool
) -> list[str]:
    """What comes out, push by push; what `finish` gives is last."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    parts = [detokenizer.push(output[start : start + group]) for start in range(0, len(output), group)]
    return [*parts, detokenizer.finish()]


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("skip", [True, False])
def test_random_tokens_join_to_the_decoded_whole(name: str, skip: bool) -> None:
    tokenizer = BUILDS[name]
    ids = st.integers(min_value=0, max_value=tokenizer.vocab_size - 1)

    @given(st.lists(ids, max_size=40), st.integers(min_value=1, max_value=5))
    @FEW
    def check(output: list[int], group: int) -> None:
        whole = tokenizer.decode(output, skip_special_tokens=skip)
        parts = pieces(tokenizer, [], output, group, skip_special_tokens=skip)
        assert "".join(parts) == whole
        assert sum(part.count("\ufffd") for part in parts) == whole.count("\ufffd")

    check()


@pytest.mark.parametrize("name", BUILDS)
def test_after_a_prompt_they_join_to_what_decoding_adds(name: str) -> None:
    tokenizer = BUILDS[name]
    ids = st.lists(st.integers(min_value=0, max_value=tokenizer.vocab_size - 1), max_size=20)

    @given(ids, ids)
    @FEW
    def check(prompt: list[int], output: list[int]) -> None:
        before = tokenizer.decode(prompt)
        if before.endswith("\ufffd"):
            return  # it may end inside a character: see below
        assert "".join(pieces(tokenizer, prompt, output)) == tokenizer.decode(prompt + output)[len(before) :]

    check()


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "sentencepiece, no prefix"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_character_is_held_back_until_it_is_whole(name: str, text: str) -> None:
    tokenizer = BUILDS[name]
    ids = tokenizer.encode(text)
    parts = pieces(tokenizer, [], ids)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    assert parts[-1] == ""  # nothing is left to be finished


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_a_text_cut_inside_a_character_ends_in_one_replacement(name: str) -> None:
    tokenizer = BUILDS[name]
    ids = tokenizer.encode("he🙂", add_special_tokens=False)
    parts = pieces(tokenizer, [], ids[:-1])
    assert "".join(parts) == "he\ufffd"
    assert "".join(parts[:-1]) == "he"


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character_is_not_echoed(name: str, kept: int) -> None:
    tokenizer = BUILDS[name]
    byte = {value: token_id for token_id in range(256 + 3) if len(value := tokenizer.token_bytes(token_id)) == 1}
    emoji = [byte[bytes([value])] for value in "🙂".encode()]
    prompt = [*tokenizer.encode("hello"), *emoji[:kept]]
    # The output completes the character: it is the output's, and only it.
    assert pieces(tokenizer, prompt, emoji[kept:])[-2:] == ["🙂", ""]
    # The output goes on with something else: the broken character is the prompt's.
    assert "".join(pieces(tokenizer, prompt, [byte[b"a"]])) == "a"
    assert "".join(pieces(tokenizer, prompt, emoji)) == "🙂"
    # No output at all.
    assert pieces(tokenizer, prompt, []) == [""]


def test_a_character_broken_by_the_output_is_marked() -> None:
    tokenizer = BUILDS["byte-level"]
    emoji = list("🙂".encode())
    assert "".join(pieces(tokenizer, emoji[:2], [emoji[2], ord("a")])) == "\ufffda"


def test_a_literal_replacement_character_is_kept() -> None:
    tokenizer = BUILDS["byte-level"]
    assert "".join(pieces(tokenizer, [0xEF, 0xBF], [0xBD, ord("a")])) == "\ufffda"


def test_the_leading_space_goes_only_at_the_start_of_all_text() -> None:
    tokenizer = BUILDS["sentencepiece"]
    world = tokenizer.encode("world", add_special_tokens=False)
    assert "".join(pieces(tokenizer, [], world)) == "world"
    assert "".join(pieces(tokenizer, [1], world)) == "world"  # BOS is skipped: no text comes before
    assert "".join(pieces(tokenizer, [1], world, skip_special_tokens=False)) == " world"
    assert "".join(pieces(tokenizer, tokenizer.encode("hello"), world)) == " world"


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_broken_bytes_are_not_held_for_ever(name: str) -> None:
    tokenizer = BUILDS[name]
    bad = next(token_id for token_id in range(300) if tokenizer.token_bytes(token_id) == b"\x9f")
    assert pieces(tokenizer, [], [bad] * 50) == ["\ufffd"] * 50 + [""]


def test_other_decoders_hold_a_bounded_number_of_tokens() -> None:
    backend = sentencepiece_backend()
    tokenizer = Tokenizer(backend)
    tokenizer.byte_codec = None  # as if the decoder were unknown
    bad = backend.encode("\u07ff").ids[-2]  # the first of two bytes
    parts = pieces(tokenizer, [], [bad] * 40)
    assert "".join(parts) == "\ufffd" * 40
    assert max(len(part) for part in parts) <= MAX_HELD_TOKENS + 1
    assert "".join(pieces(tokenizer, [], backend.encode("he🙂 w你").ids)) == "he🙂 w你"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = BUILDS["byte-level"]
    ids = tokenizer.encode("a<s>b</s>")
    assert pieces(tokenizer, [], ids) == ["a", "", "b", "", ""]
    assert pieces(tokenizer, [], ids, skip_special_tokens=False) == ["a", "<s>", "b", "</s>", ""]


def test_spaces_between_special_tokens_are_optional() -> None:
    tokenizer = BUILDS["word-level"]
    ids = tokenizer.encode("red <s> </s> blue")
    for spaces, expected in ((True, "red <s> </s> blue"), (False, "red <s></s> blue")):
        parts = pieces(tokenizer, [], ids, skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert "".join(parts) == expected
        assert tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=spaces) == expected


def test_work_for_a_token_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = BUILDS["metaspace"]
    decoded: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.append(len(ids)) or decode(ids, **options))
    pieces(tokenizer, list(range(3)) * 200, [1, 2, 3] * 200)
    assert max(decoded) <= 6

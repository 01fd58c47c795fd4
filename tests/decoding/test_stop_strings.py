"""Stop strings against a reference that looks at the whole text anew for every character."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.decoding.stop_strings import StopStringMatcher

# Few letters, one of them outside the basic plane, so that texts and stop strings overlap in every way.
LETTERS = st.sampled_from("ab\U0001f600")
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.tuples(st.text(LETTERS, max_size=6), st.booleans()), max_size=8)


def reference(stop: list[str], include: bool, pieces: list[tuple[str, bool]]) -> tuple[list[str], str | None, str]:
    """What should be shown after each piece, the stop string met, and what is held back at the end."""
    known, shown, met = "", 0, None
    outputs = []
    for text, ignoring in pieces:
        for character in text:
            known += character
            complete = [] if ignoring else [candidate for candidate in stop if known.endswith(candidate)]
            if complete:
                met = max(complete, key=len)
                end = len(known) if include else len(known) - len(met)
                return [*outputs, known[shown:end]], met, ""
        held = max(
            (size for text in stop for size in range(1, len(text)) if known.endswith(text[:size])),
            default=0,
        )
        outputs.append(known[shown : len(known) - held])
        shown = len(known) - held
    return outputs, met, known[shown:]


def run(stop: list[str], include: bool, pieces: list[tuple[str, bool]]) -> tuple[list[str], str | None, str]:
    matcher = StopStringMatcher(stop, include)
    outputs = []
    for text, ignoring in pieces:
        shown, met = matcher.push(text, ignoring)
        outputs.append(shown)
        if met is not None:
            assert matcher.flush() == ""
            return outputs, met, ""
    return outputs, None, matcher.flush()


@given(STOPS, st.booleans(), PIECES)
def test_equals_the_reference_piece_by_piece(stop, include, pieces):
    assert run(stop, include, pieces) == reference(stop, include, pieces)


@given(STOPS, st.booleans(), st.text(LETTERS, max_size=30), st.lists(st.integers(0, 30), max_size=8))
def test_cutting_the_text_changes_nothing(stop, include, text, cuts):
    ends = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [(text[start:end], False) for start, end in pairwise(ends)]
    whole, whole_met, whole_rest = run(stop, include, [(text, False)])
    shown, met, rest = run(stop, include, pieces)
    assert ("".join(shown), met, rest) == ("".join(whole), whole_met, whole_rest)


@given(STOPS, st.text(LETTERS, max_size=30))
def test_nothing_of_a_stop_string_that_completes_was_shown(stop, text):
    shown, met, rest = run(stop, False, [(character, False) for character in text])
    if met is None:
        assert "".join(shown) + rest == text
        assert not any(candidate in text for candidate in stop)
    else:
        before = "".join(shown)
        assert text.startswith(before + met)
        assert not any(candidate in (before + met)[:-1] for candidate in stop)


@pytest.mark.parametrize(
    ("stop", "text", "shown", "met"),
    [
        (["END"], "the END of", "the ", "END"),
        (["\n\n", "\n\nUser:"], "x\n\nUser:", "x", "\n\n"),  # the one that completes first
        (["b", "ab"], "xab", "x", "ab"),  # the longest of those that complete together
        (["aab"], "aaab", "a", "aab"),
        (["abcd", "bc"], "abcx", "a", "bc"),  # inside the beginning of another
        (["\U0001f600\U0001f601"], "a\U0001f600\U0001f600\U0001f601", "a\U0001f600", "\U0001f600\U0001f601"),
        (["stop"], "stopped", "", "stop"),
    ],
)
def test_which_match_wins(stop, text, shown, met):
    assert run(stop, False, [(text, False)])[:2] == ([shown], met)
    assert "".join(run(stop, True, [(character, False) for character in text])[0]) == shown + met


def test_holds_back_no_more_than_may_become_a_stop_string():
    matcher = StopStringMatcher(["###", "#!x"], include=False)
    assert matcher.push("a#") == ("a", None)
    assert matcher.push("#") == ("", None)
    assert matcher.push("!") == ("#", None)  # "##!" can no longer be "###", but "#!x"
    assert matcher.push("y") == ("#!y", None)
    assert matcher.push("z##") == ("z", None)
    assert matcher.flush() == "##"
    assert matcher.push("#") == ("", None)  # what was flushed counts no more


def test_matches_that_complete_while_ignored_do_not_count():
    matcher = StopStringMatcher(["aa"], include=False)
    assert matcher.push("aab", ignoring=True) == ("aab", None)
    assert matcher.push("xa", ignoring=True) == ("x", None)
    assert matcher.push("a") == ("", "aa")


def test_without_stop_strings_all_text_passes():
    matcher = StopStringMatcher([], include=False)
    assert (matcher.push("text"), matcher.flush()) == (("text", None), "")


def test_many_long_stop_strings_that_share_beginnings():
    stop = ["a" * 4000 + chr(0x100 + place) for place in range(64)]
    matcher = StopStringMatcher(stop, include=False)
    shown, met = matcher.push("a" * 5000)
    assert (len(shown), met) == (1000, None)
    assert matcher.push(chr(0x105)) == ("", stop[5])

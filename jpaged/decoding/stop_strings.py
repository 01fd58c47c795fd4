"""Stop strings in text that comes in pieces.

What is shown does not depend on how the text is cut: characters are judged one by one, each stop string by the
automaton of Knuth, Morris and Pratt (Fast Pattern Matching in Strings, 1977), which never looks at a character twice.
"""

import re
from collections.abc import Sequence
from functools import lru_cache


class StopStringMatcher:
    """Finds the first stop string in one sequence's text and holds back what may belong to one.

    The match that completes first wins, the longest of those that complete at the same character. At any time the
    longest end of the text that may still become a stop string is held back, and nothing else.
    """

    def __init__(self, stop: Sequence[str], include: bool):
        """`stop` are the texts to find, none of them empty; the text ends before the one that is met, behind it with
        `include`."""
        assert all(stop), "an empty stop string would end every text before it begins"
        self._stop, self._include = tuple(stop), include
        self._fallbacks = [_fallbacks(text) for text in self._stop]
        self._matched = [0] * len(self._stop)  # how many characters of each end the text so far
        self._first = re.compile("|".join(sorted({re.escape(text[0]) for text in self._stop})) or "(?!)")
        self._held = ""
        self._met = False

    def push(self, text: str, ignoring: bool = False) -> tuple[str, str | None]:
        """The next piece of the text: (what may be shown now, the stop string that was met, else None).

        While `ignoring`, a stop string that completes does not count and its text is shown; one that begins then and
        completes later counts. Nothing may be pushed once a stop string was met.
        """
        assert not self._met, "the text has ended at a stop string"
        place = 0
        while place < len(text):
            if not any(self._matched):  # at rest: jump to where a stop string may begin
                found = self._first.search(text, place)
                if found is None:
                    break
                place = found.start()
            complete = self._step(text[place], ignoring)
            place += 1
            if complete is not None:
                self._met = True
                known = self._held + text[:place]
                self._held = ""
                return known if self._include else known[: len(known) - len(complete)], complete
        known = self._held + text
        shown = len(known) - max(self._matched, default=0)
        self._held = known[shown:]
        return known[:shown], None

    def flush(self) -> str:
        """What was held back, for a sequence that ended for another reason."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stop)
        return held

    def _step(self, character: str, ignoring: bool) -> str | None:
        """Judge one character; the longest stop string that it completes, unless those are ignored."""
        complete = None
        for index, text in enumerate(self._stop):
            matched, fallbacks = self._matched[index], self._fallbacks[index]
            while matched and text[matched] != character:
                matched = fallbacks[matched]
            if text[matched] == character:
                matched += 1
            if matched == len(text):
                if not ignoring and len(text) > len(complete or ""):
                    complete = text
                matched = fallbacks[matched]
            self._matched[index] = matched
        return complete


@lru_cache(maxsize=256)  # the samples of a request, and often all requests of a user, have the same stop strings
def _fallbacks(text: str) -> tuple[int, ...]:
    """[length + 1]: for each beginning of `text`, by its length, how long its longest proper end is that is also a
    beginning of `text`."""
    lengths = [0, 0]
    for character in text[1:]:
        length = lengths[-1]
        while length and text[length] != character:
            length = lengths[length]
        lengths.append(length + 1 if text[length] == character else 0)
    return tuple(lengths)

"""Times the engine's loop: what the host does in a turn, and how long the device may have waited for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from jpaged.engine.profiling import HOST_PARTS, host_part
from jpaged.execution.runner import PendingStep
from jpaged.metrics import StepTimes


class StepClock:
    """Belongs to the engine's thread.

    A device says that it is done, but not since when; so the gap between two steps is told from outside, as an upper
    bound: from the last time that it was seen at work until the next step was dispatched.
    """

    def __init__(self) -> None:
        self.turn_seconds = self.host_seconds = self.gap_seconds = 0.0  # of all turns
        self._seen_busy: float | None = None  # `None` while there is no work, which is no gap
        self.begin_turn(None)

    def begin_turn(self, last: PendingStep | None) -> None:
        """`last`: the step that was dispatched last, if its result has not been waited for."""
        self._seconds = dict.fromkeys(HOST_PARTS, 0.0)
        self._gap = 0.0
        self.look(last)

    def end_turn(self) -> StepTimes:
        """Return what the turn took."""
        times = StepTimes(**self._seconds, gap=self._gap)
        self.turn_seconds += times.total
        self.host_seconds += times.host
        self.gap_seconds += times.gap
        return times

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count a block as one of HOST_PARTS."""
        start = time.monotonic()
        with host_part(name):
            yield
        self._seconds[name] += time.monotonic() - start

    def look(self, last: PendingStep | None) -> bool:
        """Note whether the device is at work, and return it."""
        is_busy = last is not None and not last.is_done()
        if is_busy:
            self._seen_busy = time.monotonic()
        return is_busy

    def dispatched(self, before: PendingStep | None) -> None:
        """The next step is with the device, behind the step `before` it."""
        now = time.monotonic()
        if not self.look(before) and self._seen_busy is not None:
            self._gap = now - self._seen_busy
        self._seen_busy = now

    def waited(self) -> None:
        """A result was waited for: the device was at work until now."""
        self._seen_busy = time.monotonic()

    def idle(self) -> None:
        """There is nothing to do."""
        self._seen_busy = None

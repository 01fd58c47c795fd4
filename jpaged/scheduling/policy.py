"""The order in which sequences are served and, read backwards, made to give way."""

from collections.abc import Callable

from jpaged.scheduling.sequence import Sequence

Policy = Callable[[Sequence], tuple[int, ...]]


def first_come_first_served(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.arrival,)


POLICIES: dict[str, Policy] = {"fcfs": first_come_first_served}

"""The order in which groups are served and, read backwards, made to give way."""

from collections.abc import Callable

from jpaged.scheduling.sequence import SequenceGroup

Policy = Callable[[SequenceGroup], tuple[int, ...]]


def first_come_first_served(group: SequenceGroup) -> tuple[int, ...]:
    return (group.group_id,)


def by_priority(group: SequenceGroup) -> tuple[int, ...]:
    """Lower priority numbers first; among equals the first to come."""
    return (group.priority, group.group_id)


POLICIES: dict[str, Policy] = {"fcfs": first_come_first_served, "priority": by_priority}

"""How a group gives way: its pages are copied to the host tier and back, or dropped and computed again."""

from dataclasses import dataclass

from jpaged.paging.page_pool import PagePool
from jpaged.paging.page_table import PageTable
from jpaged.scheduling.sequence import SequenceGroup


@dataclass(frozen=True, slots=True)
class CostModel:
    """Measured rates of this machine.

    Attributes:
        swap_seconds_per_page: to copy a page out and back in.
        compute_seconds_per_token: to compute a token of a prompt.
    """

    swap_seconds_per_page: float = 0.0
    compute_seconds_per_token: float = 0.0

    def prefers_swap(self, num_pages: int, num_tokens: int) -> bool:
        return num_pages * self.swap_seconds_per_page < num_tokens * self.compute_seconds_per_token


def distinct_pages(group: SequenceGroup) -> list[int]:
    """Pages of a group's tables, each once, in a fixed order."""
    return list(dict.fromkeys(page for sequence in group.live for page in sequence.table.pages))


def num_tokens_to_recompute(group: SequenceGroup) -> int:
    """Tokens that a group computes again if its pages are dropped; what its sequences share is computed once."""
    shared = group.fork_length if len(group.live) > 1 else 0
    return shared + sum(max(sequence.num_planned_tokens - shared, 0) for sequence in group.live)


def drop_pages(group: SequenceGroup) -> None:
    """Release everything; the group computes its tokens again, the shared prompt once."""
    for sequence in group.live:
        sequence.table.release()
        sequence.num_planned_tokens = 0
        sequence.chain.clear()
    group.is_forked = len(group.live) == 1
    group.publishes = True  # what is computed now is new, whatever was flushed before


def swap_out(group: SequenceGroup, host_pool: PagePool, page_size_tokens: int) -> list[tuple[int, int]]:
    """Move the tables to host pages, sharing as before; return the copies to plan, (device page, host page).

    The host pool must have as many pages available as the group has distinct ones.
    """
    moves = _move(group, host_pool, page_size_tokens)
    group.is_swapped = True
    return moves


def swap_in(
    group: SequenceGroup, pool: PagePool, page_size_tokens: int
) -> tuple[list[tuple[int, int]], list[PageTable]]:
    """The way back: return the copies to plan, (host page, device page), and the host tables, to be released once the
    plan that copies from them has been dispatched."""
    host_tables = [sequence.table for sequence in group.live]
    moves = _move(group, pool, page_size_tokens, release=False)
    group.is_swapped = False
    for sequence in group.live:
        sequence.chain.clear()  # the entries may be gone; these pages can be named anew
    return moves, host_tables


def _move(group: SequenceGroup, target: PagePool, page_size_tokens: int, release: bool = True) -> list[tuple[int, int]]:
    sources = distinct_pages(group)
    targets = dict(zip(sources, target.allocate(len(sources)), strict=True))
    taken: set[int] = set()
    for sequence in group.live:
        pages = [targets[page] for page in sequence.table.pages]
        for page in pages:
            if page in taken:
                target.share(page)
            taken.add(page)
        if release:
            sequence.table.release()
        sequence.table = PageTable(target, page_size_tokens, pages)
    return list(targets.items())

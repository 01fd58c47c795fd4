"""How a waiting group begins to run: what it needs, what of it is cached, how its pages come back."""

from jpaged.paging.prefix_cache import CachedPage
from jpaged.scheduling.books import Books
from jpaged.scheduling.preemption import distinct_pages, swap_in
from jpaged.scheduling.sequence import Sequence, SequenceGroup
from jpaged.step_plan import StepPlan


def num_missing_pages(books: Books, group: SequenceGroup) -> int:
    """Pages that a group needs on the device for its known tokens, beyond those it has there."""
    swapped = len(distinct_pages(group)) if group.is_swapped else 0
    if group.is_forked:
        return swapped + sum(_num_pages_to_grow(sequence) for sequence in group.live)
    size = books.config.page_size_tokens
    shared = group.fork_length // size
    own = sum(-(-sequence.num_tokens // size) - shared for sequence in group.live)
    return swapped + max(shared + own - len(group.live[0].table.pages), 0)


def _num_pages_to_grow(sequence: Sequence) -> int:
    """Pages until a sequence's known tokens are computed; the one that it shares and writes to next is copied."""
    table = sequence.table
    shares = table.shared_page(sequence.num_planned_tokens) is not None
    return max(table.num_missing_pages(sequence.num_tokens), 0) + shares


def find_hits(books: Books, plan: StepPlan, group: SequenceGroup) -> list[CachedPage] | None:
    """Find cached pages for a group's beginning; `None` if it should wait for one that is being computed."""
    cache, leader = books.cache, group.live[0]
    if cache is None or group.is_swapped or not group.reads_cache:
        return []
    cache.digests(leader.token_ids, group.cache_keys, leader.digests)
    # At least one token is computed: what is drawn next depends on its logits.
    limit = (group.fork_length if len(group.live) > 1 else len(leader.token_ids) - 1) // books.config.page_size_tokens
    hits = cache.match(leader.token_ids, group.cache_keys, leader.digests[:limit], plan.step)
    if len(hits) < limit:
        digest = leader.digests[len(hits)]
        if digest in books.being_computed or cache.is_being_written(digest, plan.step):
            return None
    return hits


def num_pages_taken(books: Books, group: SequenceGroup, hits: list[CachedPage]) -> int:
    """Pages by which `num_available` falls until a group's known tokens are computed."""
    owned = sum(hit.page >= 0 and books.pool.refcount(hit.page) > 0 for hit in hits)
    return num_missing_pages(books, group) - owned


def admit(books: Books, plan: StepPlan, group: SequenceGroup, hits: list[CachedPage]) -> None:
    """Give a group its rows and what is kept of its pages."""
    books.take_rows(plan, group)
    if group.is_swapped:
        moves, host_tables = swap_in(group, books.pool, books.config.page_size_tokens)
        plan.swap_ins += moves
        for table in host_tables:
            books.hold_until_read(table)
        for sequence in group.live:
            books.enter_pages(plan, sequence, 0)
            _enter_history(plan, sequence)
        return
    leader = group.live[0]
    _begin_with(books, plan, leader, hits)
    if not group.num_preemptions:
        group.num_cached_tokens = leader.num_planned_tokens
    _enter_history(plan, leader)
    for digest in leader.digests[len(leader.chain) :]:
        books.being_computed.setdefault(digest, leader)


def _enter_history(plan: StepPlan, sequence: Sequence) -> None:
    """Tell the device the tokens that it will not compute, if what it draws depends on them."""
    if sequence.num_planned_tokens and sequence.sampling.reads_history:
        plan.histories.append((sequence.row, sequence.token_ids[: sequence.num_planned_tokens]))


def _begin_with(books: Books, plan: StepPlan, sequence: Sequence, hits: list[CachedPage]) -> None:
    """Begin a sequence's table with cached pages; those of the host tier are copied in."""
    pool, table = books.pool, sequence.table
    for hit in hits:  # first take hold of all, so that none is evicted to make room for another
        if hit.page >= 0:
            pool.share(hit.page)
    for place, hit in enumerate(hits):
        if hit.page < 0:
            assert books.cache is not None
            [page] = pool.allocate(1)
            if hit.host_page < 0:  # just now evicted from the host tier, for a page that made room for this one
                pool.release(page)
                for other in hits[place:]:
                    if other.page >= 0:
                        pool.release(other.page)
                break
            host_page = books.cache.promote(hit, page, plan.step)
            plan.swap_ins.append((host_page, page))
            books.hold_until_read(host_page)
        table.pages.append(hit.page)
        sequence.chain.append(hit)
    sequence.num_planned_tokens = table.capacity_tokens
    books.enter_pages(plan, sequence, 0)

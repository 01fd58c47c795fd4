"""The state of scheduling, in one place: who waits, who runs in which row, who owns which page."""

from bisect import insort
from collections import Counter
from dataclasses import dataclass

from jpaged.errors import CapacityError
from jpaged.paging.page_pool import PagePool
from jpaged.paging.page_table import PageTable
from jpaged.paging.prefix_cache import PrefixCache
from jpaged.scheduling.policy import POLICIES
from jpaged.scheduling.sequence import Sequence, SequenceGroup
from jpaged.step_plan import StepPlan

FULL_ATTENTION_GROUP = 0  # the only KV group for now


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the pools, and how to choose.

    Attributes:
        num_pages, num_host_pages: pages of the device pool and of the host tier.
        max_pinned_pages: pages of the device pool that pinned prefixes may take.
        preemption: "swap", "recompute", or "auto", which asks the cost model.
    """

    num_pages: int
    page_size_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str = "fcfs"
    num_host_pages: int = 0
    max_pinned_pages: int = 0
    enable_prefix_caching: bool = False
    preemption: str = "auto"


class Books:
    """Groups, rows and pages, and the operations that keep them consistent. Decides nothing.

    Attributes:
        waiting, running: groups in the policy's order.
        sequences: those that have not ended, by id.
        being_computed: names of pages of new prompts that a running sequence is about to compute.
        row_copies: (source, target) sequences that beams have asked for since the last plan.
        next_step: number of the next plan.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.host_pool = PagePool(config.num_host_pages)
        self.cache: PrefixCache | None = None
        if config.enable_prefix_caching:
            host_pool = self.host_pool if config.num_host_pages else None
            self.cache = PrefixCache(self.pool, config.page_size_tokens, host_pool)
        self.order = POLICIES[config.policy]
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.sequences: dict[int, Sequence] = {}
        self.being_computed: dict[bytes, Sequence] = {}
        self.row_copies: list[tuple[Sequence, Sequence]] = []
        self.next_step = 0
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._num_sequences = 0
        self._pins: dict[str, list[int]] = {}
        # Host pages, and tables of them, that the last plan still reads.
        self._being_read: list[PageTable | int] = []

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def new_sequence_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences

    def new_page_table(self) -> PageTable:
        return PageTable(self.pool, self.config.page_size_tokens)

    def wait(self, group: SequenceGroup) -> None:
        insort(self.waiting, group, key=self.order)

    def take_rows(self, plan: StepPlan, group: SequenceGroup) -> None:
        """A waiting group runs from now on."""
        self.waiting.remove(group)
        rows = [self._free_rows.pop() for _ in range(group.num_rows)]
        for sequence in group.live:
            sequence.row = rows.pop()
        group.spare_rows = rows
        # Beams share one set of parameters, so the rows of beams to come can have theirs now.
        plan.rows_taken += [(sequence.row, sequence.sampling) for sequence in group.live]
        plan.rows_taken += [(row, group.live[0].sampling) for row in rows]
        insort(self.running, group, key=self.order)

    def leave_rows(self, group: SequenceGroup) -> None:
        """A running group runs no longer; its pages are the caller's affair."""
        self.running.remove(group)
        self._free_rows += group.spare_rows
        group.spare_rows = []
        for sequence in group.live:
            self._leave_row(sequence)

    def end(self, sequence: Sequence) -> None:
        """A sequence is done: its row and its pages are free at once."""
        group, is_running = sequence.group, sequence.row >= 0
        del self.sequences[sequence.sequence_id]
        if len(group.live) == 1 and is_running:
            self.leave_rows(group)
        elif len(group.live) == 1:
            self.waiting.remove(group)
        elif is_running:
            self._leave_row(sequence)
        group.live.remove(sequence)
        sequence.table.release()
        if len(group.live) == 1:
            group.is_forked = True

    def publish(self, sequence: Sequence, step: int) -> None:
        """Name the pages that are full and whose tokens are known; `step` or an earlier one writes them."""
        num_full = min(sequence.num_planned_tokens, len(sequence.token_ids)) // self.config.page_size_tokens
        group, digests = sequence.group, sequence.digests
        if self.cache is None or num_full <= len(sequence.chain) or not group.publishes or group.is_swapped:
            return
        self.cache.digests(sequence.token_ids, group.cache_keys, digests)
        self.cache.publish(
            sequence.chain, sequence.table.pages, sequence.token_ids, group.cache_keys, digests[:num_full], step
        )
        for digest in digests[:num_full]:
            if self.being_computed.get(digest) is sequence:
                del self.being_computed[digest]

    def enter_pages(self, plan: StepPlan, sequence: Sequence, first: int) -> None:
        """Tell the device a sequence's page table from index `first` on."""
        for index in range(first, len(sequence.table.pages)):
            plan.new_pages.append((FULL_ATTENTION_GROUP, sequence.row, index, sequence.table.pages[index]))

    def hold_until_read(self, what: PageTable | int) -> None:
        """Keep a host page, or a table of them, until the plan in the making has been dispatched."""
        self._being_read.append(what)

    def release_what_was_read(self) -> None:
        """The plan that reads what was held has been dispatched."""
        for item in self._being_read:
            if isinstance(item, PageTable):
                item.release()
            else:
                self.host_pool.release(item)
        self._being_read.clear()

    def pin(self, name: str, token_ids: list[int], keys: tuple[str, ...]) -> int:
        """Keep a prompt's full pages that are cached on the device until `unpin`; return how many those are.

        Raises:
            CapacityError: more than `max_pinned_pages` would be pinned, or too few left for a request that is here.
        """
        assert self.cache is not None and name not in self._pins
        hits = self.cache.match(token_ids, keys, self.cache.digests(token_ids, keys, []), self.next_step)
        pages = [hit.page for hit in hits if hit.page >= 0]
        most_needed = max((group.most_pages for group in self.running + self.waiting), default=0)
        limit = min(self.config.max_pinned_pages, self.config.num_pages - most_needed)
        if self.num_pinned_pages + len(pages) > limit:
            raise CapacityError(
                f"the prefix takes {len(pages)} pages, and {self.num_pinned_pages} of the {limit} that may be pinned"
                " are taken; unpin others, or raise max_pinned_fraction"
            )
        for page in pages:
            self.pool.share(page)
        self._pins = self._pins | {name: pages}  # a new dict: other threads may be counting the old one
        return len(pages)

    def unpin(self, name: str) -> bool:
        """`False` if there is no such pin."""
        pages = self._pins.get(name)
        self._pins = {other: kept for other, kept in self._pins.items() if other != name}
        for page in reversed(pages or []):
            self.pool.release(page)
        return pages is not None

    def is_pinned(self, name: str) -> bool:
        return name in self._pins

    @property
    def num_pinned_pages(self) -> int:
        return len({page for pages in self._pins.values() for page in pages})

    def flush_prefix_cache(self, with_pins: bool = False) -> None:
        """Forget all cached pages; what runs now goes on, but its pages will not be found by others."""
        if self.cache is None:
            return
        for name in list(self._pins) if with_pins else ():
            self.unpin(name)
        self.cache.flush()
        self.being_computed.clear()
        for group in self.running:
            group.publishes = False
        for group in self.waiting:
            group.publishes = group.publishes and not group.is_swapped

    def _leave_row(self, sequence: Sequence) -> None:
        self._free_rows.append(sequence.row)
        sequence.row = -1
        self.give_up_names(sequence)

    def give_up_names(self, sequence: Sequence) -> None:
        """A sequence will not compute the pages that others may be waiting for."""
        for digest in sequence.digests:
            if self.being_computed.get(digest) is sequence:
                del self.being_computed[digest]

    def check_invariants(self) -> None:
        """Assert that rows, pages and queues agree with each other."""
        self.pool.check_invariants()
        self.host_pool.check_invariants()
        if self.cache is not None:
            self.cache.check_invariants()
        running = [sequence for group in self.running for sequence in group.live]
        waiting = [sequence for group in self.waiting for sequence in group.live]
        spare = [row for group in self.running for row in group.spare_rows]
        rows = [sequence.row for sequence in running] + self._free_rows + spare
        assert sorted(rows) == list(range(self.config.max_num_seqs)), "a row is lost or taken twice"
        assert sorted(s.sequence_id for s in running + waiting) == sorted(self.sequences), "a sequence is lost"
        for queue in (self.waiting, self.running):
            assert [self.order(g) for g in queue] == sorted(self.order(g) for g in queue), "a queue is out of order"
        for sequence in running:
            spare_slots = sequence.table.capacity_tokens - sequence.num_planned_tokens
            assert 0 <= spare_slots < self.config.page_size_tokens, "a page came before its first token, or too late"
            assert sequence.num_planned_tokens <= sequence.num_tokens
        owners = Counter(page for sequence in running for page in sequence.table.pages)
        owners.update(page for pages in self._pins.values() for page in pages)
        host_owners = Counter(item for item in self._being_read if isinstance(item, int))
        host_owners.update(page for item in self._being_read if isinstance(item, PageTable) for page in item.pages)
        for sequence in waiting:
            assert sequence.group.is_swapped or not sequence.table.pages, "a waiting sequence owns device pages"
            host_owners.update(sequence.table.pages)
        for pool, counts in ((self.pool, owners), (self.host_pool, host_owners)):
            for page in range(pool.num_pages):
                assert pool.refcount(page) == counts[page], f"page {page} has owners that nobody knows"

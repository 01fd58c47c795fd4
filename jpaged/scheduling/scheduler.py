"""Decides at every step who computes what, and keeps the books.

Tokens are counted as planned when a step is dispatched and as committed when its result is back. With overlap a plan
is made while the step before it is in flight, so the newest token of a decode row may be known on the device only.
"""

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field

from jpaged.errors import CapacityError
from jpaged.paging.page_pool import PagePool
from jpaged.paging.page_table import PageTable
from jpaged.paging.prefix_cache import CachedPage, PrefixCache
from jpaged.scheduling.policy import POLICIES
from jpaged.scheduling.preemption import (
    CostModel,
    distinct_pages,
    drop_pages,
    num_tokens_to_recompute,
    swap_in,
    swap_out,
)
from jpaged.scheduling.sequence import Sequence, SequenceGroup
from jpaged.step_plan import ON_DEVICE, StepPlan, StepResult

FULL_ATTENTION_GROUP = 0  # the only KV group for now


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the pools, and how to choose.

    Attributes:
        num_pages, num_host_pages: pages of the device pool and of the host tier.
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


@dataclass(slots=True)
class Progress:
    """What a commit changed: the sequences that gained a token (and whether it was their last: `sequence.finish`), and
    the beam groups that are done."""

    sequences: list[Sequence] = field(default_factory=list[Sequence])
    beam_groups: list[SequenceGroup] = field(default_factory=list[SequenceGroup])


Work = list[tuple[Sequence, int]]  # sequences and how many tokens each computes


class Scheduler:
    """Continuous batching: chunks of prompts and decode rows share one token budget, the oldest first."""

    def __init__(self, config: SchedulerConfig, costs: CostModel | None = None) -> None:
        self.config = config
        self.costs = costs or CostModel()
        self.pool = PagePool(config.num_pages)
        self.host_pool = PagePool(config.num_host_pages)
        self.cache: PrefixCache | None = None
        if config.enable_prefix_caching:
            host_pool = self.host_pool if config.num_host_pages else None
            self.cache = PrefixCache(self.pool, config.page_size_tokens, host_pool)
        self.preemptions = {"swap": 0, "recompute": 0}
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0
        self._order = POLICIES[config.policy]
        self._sequences: dict[int, Sequence] = {}
        # Both in the policy's order.
        self._waiting: list[SequenceGroup] = []
        self._running: list[SequenceGroup] = []
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._next_step = 0
        self._num_sequences = 0
        # Pages of new prompts that a running sequence is about to compute: others wait for it.
        self._being_computed: dict[bytes, Sequence] = {}
        # What plans made outside of `plan` ask of the next one.
        self._row_copies: list[tuple[Sequence, Sequence]] = []
        self._pins: dict[str, list[int]] = {}
        self._done_with: list[PageTable | int] = []  # host pages and tables that the last plan still reads

    @property
    def num_running(self) -> int:
        """Sequences in a row."""
        return sum(len(group.live) for group in self._running)

    @property
    def num_waiting(self) -> int:
        return sum(len(group.live) for group in self._waiting)

    @property
    def num_preemptions(self) -> int:
        return sum(self.preemptions.values())

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def used_token_slots(self) -> int:
        """Slots of owned pages that have, or in this step get, a token; a shared slot counts once."""
        empty = {
            sequence.table.pages[-1]: sequence.table.capacity_tokens - sequence.num_planned_tokens
            for group in self._running
            for sequence in group.live
            if sequence.table.pages
        }
        return self.allocated_token_slots - sum(empty.values())

    @property
    def allocated_token_slots(self) -> int:
        return self.pool.num_used * self.config.page_size_tokens

    def new_page_table(self) -> PageTable:
        return PageTable(self.pool, self.config.page_size_tokens)

    def check_fits(self, num_prompt_tokens: int, max_length: int, width: int = 1) -> None:
        """Raise CapacityError if a request could not run even with the whole engine to itself."""
        config = self.config
        if width > min(config.max_num_seqs, config.max_num_batched_tokens):
            raise CapacityError(
                f"the request has {width} sequences, a step holds {config.max_num_seqs} sequences and"
                f" {config.max_num_batched_tokens} tokens; lower n or beam_width, or raise the smaller limit"
            )
        # The last token is never computed, so it takes no place. Sequences share the prompt's full pages.
        pages = -(-(max_length - 1) // config.page_size_tokens)
        shared = (num_prompt_tokens - 1) // config.page_size_tokens if width > 1 else 0
        needed = shared + width * (pages - shared) + (1 if width > 1 else 0)
        available = config.num_pages - config.max_pinned_pages
        if needed > available:
            raise CapacityError(
                f"the request needs {needed} pages of {config.page_size_tokens} tokens for {width} x {max_length}"
                f" tokens of prompt and output, the pool has {available};"
                " lower max_tokens, shorten the prompt, or raise num_pages"
            )

    def longest_that_fits(self, num_prompt_tokens: int, width: int) -> int:
        """Return the most tokens of prompt and output with which `check_fits` passes."""
        pages = self.config.num_pages - self.config.max_pinned_pages
        if width > 1:
            shared = (num_prompt_tokens - 1) // self.config.page_size_tokens
            pages = shared + (pages - 1 - shared) // width
        return pages * self.config.page_size_tokens + 1

    def group_of(self, sequence_id: int) -> SequenceGroup:
        """The group of a sequence that has not ended."""
        return self._sequences[sequence_id].group

    def add(self, group: SequenceGroup) -> None:
        """Queue a group whose `live` sequences are new. `check_fits` must have passed."""
        for sequence in group.live:
            self._sequences[sequence.sequence_id] = sequence
        insort(self._waiting, group, key=self._order)

    def abort(self, group: SequenceGroup) -> None:
        """Forget a group wherever it is, and free its pages. Results still in flight for it are dropped."""
        if not group.live:
            return
        for sequence in list(group.live):
            self._end(sequence)

    def commit(self, plan: StepPlan, result: StepResult) -> Progress:
        """Book what a step drew. Tokens of sequences that have ended meanwhile are dropped."""
        progress = Progress()
        candidates: dict[SequenceGroup, dict[Sequence, int]] = {}
        for place, (sequence_id, samples, token_id) in enumerate(
            zip(plan.sequence_ids, plan.samples, result.token_ids.tolist(), strict=True)
        ):
            sequence = self._sequences.get(sequence_id)
            if sequence is None or not samples:
                continue
            sequence.num_in_flight -= 1
            group = sequence.group
            if group.beams is not None:
                candidates.setdefault(group, {})[sequence] = place
                continue
            sequence.token_ids.append(token_id)
            sequence.finish = group.stop_rules.check(token_id, len(sequence.token_ids))
            progress.sequences.append(sequence)
            if self.cache is not None:
                self._publish(sequence, self._next_step - 1)
            if sequence.finish is not None:
                self._end(sequence)
        for group, places in candidates.items():
            self._advance_beams(group, [places[sequence] for sequence in group.live], result)
            if not group.live:
                progress.beam_groups.append(group)
        return progress

    def _advance_beams(self, group: SequenceGroup, places: list[int], result: StepResult) -> None:
        """Let a search go on: beams take over each other's sequences by forking; nothing is computed again."""
        beams, parents = group.beams, list(group.live)
        assert beams is not None and result.candidate_ids is not None and result.candidate_logprobs is not None
        chosen = beams.advance(
            [sequence.output_token_ids for sequence in parents],
            [(result.candidate_ids[place].tolist(), result.candidate_logprobs[place].tolist()) for place in places],
        )
        if not chosen:
            for sequence in parents:
                self._end(sequence)
            return
        # The first child of a beam goes on in its place; the others take places whose beams have no children.
        heirs: dict[int, Sequence] = {}
        for child in chosen:
            heirs.setdefault(child.parent, parents[child.parent])
        childless = [sequence for place, sequence in enumerate(parents) if place not in heirs]
        live: list[Sequence] = []
        for child in chosen:
            sequence = heirs.pop(child.parent, None)
            if sequence is None:
                sequence = childless.pop() if childless else self._new_beam(group)
                parent = parents[child.parent]
                sequence.become_fork_of(parent, parent.num_planned_tokens)
                sequence.token_ids = list(parent.token_ids)
                self._row_copies.append((parent, sequence))
            live.append(sequence)
        for sequence in childless:
            self._retire_beam(sequence)
        group.live = live
        for sequence, child in zip(live, chosen, strict=True):
            sequence.token_ids.append(child.token_id)
            if self.cache is not None and not group.is_swapped:
                self._publish(sequence, self._next_step - 1)

    def _new_beam(self, group: SequenceGroup) -> Sequence:
        first = group.live[0]
        sequence = Sequence(self.new_sequence_id(), group, first.index, first.sampling, self.new_page_table())
        self._sequences[sequence.sequence_id] = sequence
        if first.row >= 0:
            sequence.row = group.spare_rows.pop()
        return sequence

    def _retire_beam(self, sequence: Sequence) -> None:
        del self._sequences[sequence.sequence_id]
        sequence.table.release()
        if sequence.row >= 0:
            sequence.group.spare_rows.append(sequence.row)
            sequence.row = -1

    def new_sequence_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences

    # -- pinned prefixes ---------------------------------------------------------------------------------------------

    def pin(self, name: str, token_ids: list[int], keys: tuple[str, ...]) -> int:
        """Keep a prompt's full pages that are cached on the device until `unpin`; return how many those are.

        Raises:
            CapacityError: more than `max_pinned_pages` would be pinned.
        """
        assert self.cache is not None and name not in self._pins
        hits = self.cache.match(token_ids, keys, self.cache.digests(token_ids, keys, []), self._next_step)
        pages = [hit.page for hit in hits if hit.page >= 0]
        if self.num_pinned_pages + len(pages) > self.config.max_pinned_pages:
            raise CapacityError(
                f"the prefix takes {len(pages)} pages, and {self.num_pinned_pages} of the {self.config.max_pinned_pages}"
                " that may be pinned are taken; unpin others, or raise max_pinned_pages"
            )
        for page in pages:
            self.pool.share(page)
        self._pins[name] = pages
        return len(pages)

    def unpin(self, name: str) -> bool:
        """`False` if there is no such pin."""
        pages = self._pins.pop(name, None)
        for page in reversed(pages or []):
            self.pool.release(page)
        return pages is not None

    def is_pinned(self, name: str) -> bool:
        return name in self._pins

    def flush_prefix_cache(self, with_pins: bool = False) -> None:
        """Forget all cached pages; what runs now goes on, but its pages will not be found by others."""
        if self.cache is None:
            return
        if with_pins:
            for name in list(self._pins):
                self.unpin(name)
        self.cache.flush()
        self._being_computed.clear()
        for group in self._running:
            group.publishes = False
        for group in self._waiting:
            group.publishes = not group.is_swapped

    @property
    def num_pinned_pages(self) -> int:
        return len({page for pages in self._pins.values() for page in pages})

    # -- planning ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Choose the next step's work and reserve its pages; `None` if there is nothing to do before a commit."""
        plan = StepPlan(step=self._next_step)
        self._release_what_was_read()
        prefills: Work = []
        self._copy_rows(plan)
        budget = self._plan_running(plan, prefills)
        self._plan_waiting(plan, prefills, budget)
        plan.num_decode = len(plan.sequence_ids)
        for sequence, count in prefills:
            self._append(plan, sequence, count)
        if self.cache is not None and self.cache.demotions:
            plan.swap_outs += self.cache.demotions
            self.cache.demotions = []
        if not plan.sequence_ids and not plan.has_moves:
            return None
        self._next_step += 1
        return plan

    def _plan_running(self, plan: StepPlan, prefills: Work) -> int:
        """Plan the running groups in order; return what is left of the token budget.

        A prompt's chunk leaves one token of the budget to each decode row behind it, so that a long prompt delays
        nobody; but it always gets one itself, so that the oldest group progresses under any budget.
        """
        budget = self.config.max_num_batched_tokens
        work = [self._wanted(plan, group) for group in self._running]
        decodes_behind = sum(want == 1 for wanted in work for _, want in wanted)
        for group, wanted in zip(list(self._running), work, strict=True):
            if budget <= 0:
                break
            if not wanted or group.live[0].row < 0:
                continue  # nothing to do before a commit, or it has given way to an older one
            if group.beams is not None and budget < len(wanted):
                break  # beams draw together or not at all
            counts: Work = []
            for sequence, want in wanted:
                if want == 1:
                    decodes_behind -= 1
                count = 1 if want == 1 else min(want, max(budget - decodes_behind, 1))
                if budget <= 0:
                    break
                budget -= count
                counts.append((sequence, count))
            if not self._make_room(plan, group, counts):
                break  # the group itself was the newest and has given way
            for sequence, count in counts:
                self._schedule(plan, prefills, sequence, count)
        return budget

    def _wanted(self, plan: StepPlan, group: SequenceGroup) -> Work:
        """What a group's sequences could compute in this plan.

        Before it forks that is its first sequence's part of the prompt. Beams draw together or not at all: while one
        has more than its last token left, the others wait with theirs.
        """
        if not group.is_forked:
            leader = group.live[0]
            left = group.fork_length - leader.num_planned_tokens
            if left > 0:
                return [(leader, left)]
            self._fork(plan, group)
        wanted = [(sequence, want) for sequence in group.live if (want := sequence.num_uncomputed_tokens) > 0]
        if group.beams is not None and len(wanted) > 1 and any(want > 1 for _, want in wanted):
            return [(sequence, want - 1) for sequence, want in wanted if want > 1]
        return wanted

    def _plan_waiting(self, plan: StepPlan, prefills: Work, budget: int) -> None:
        """Admit waiting groups in order while rows, budget and pages last. Nobody is preempted for them."""
        if not (self._waiting and self._free_rows and budget > 0):
            return
        # Room for every known token, and for one page of growth of each running sequence, keeps a group from being
        # admitted only to be preempted again. With nobody running it is admitted whatever the sum says: it fits alone.
        promised = sum(self._missing_pages(group) + len(group.live) for group in self._running)
        for group in list(self._waiting):
            if budget <= 0 or group.num_rows > len(self._free_rows) or group.num_in_flight:
                return  # a preempted group waits for its tokens in flight
            hits = self._match(plan, group)
            if hits is None:
                continue  # another one is computing its prefix just now
            needed = self._missing_pages(group) - sum(
                hit.page >= 0 and self.pool.refcount(hit.page) > 0 for hit in hits
            )
            if promised and promised + needed > self.pool.num_available:
                return
            self._waiting.remove(group)
            self._admit(plan, group, hits)
            wanted = self._wanted(plan, group)
            if group.beams is None or budget >= len(wanted):
                for sequence, want in wanted:
                    count = min(want, budget)
                    budget -= count
                    if count:
                        self._schedule(plan, prefills, sequence, count)
            promised += self._missing_pages(group) + len(group.live)

    def _missing_pages(self, group: SequenceGroup) -> int:
        """Pages that a group needs on the device for its known tokens, beyond those it has there."""
        if group.is_swapped:
            return len(distinct_pages(group))
        if group.is_forked:
            return sum(max(s.table.num_missing_pages(s.num_tokens), 0) for s in group.live)
        shared = group.fork_length // self.config.page_size_tokens
        pages = sum(-(-s.num_tokens // self.config.page_size_tokens) - shared for s in group.live)
        return max(shared + pages - len(group.live[0].table.pages), 0)

    def _match(self, plan: StepPlan, group: SequenceGroup) -> list[CachedPage] | None:
        """Find cached pages for a group's beginning; `None` if it should wait for one that is being computed."""
        cache, leader = self.cache, group.live[0]
        if cache is None or group.is_swapped or not group.reads_cache:
            return []
        size = self.config.page_size_tokens
        cache.digests(leader.token_ids, group.cache_keys, leader.digests)
        limit = (group.fork_length if len(group.live) > 1 else len(leader.token_ids) - 1) // size
        hits = cache.match(leader.token_ids, group.cache_keys, leader.digests[:limit], plan.step)
        if len(hits) < limit:
            digest = leader.digests[len(hits)]
            if digest in self._being_computed or cache.is_being_written(digest, plan.step):
                return None
        return hits

    def _admit(self, plan: StepPlan, group: SequenceGroup, hits: list[CachedPage]) -> None:
        """Give a group its rows and what is kept of its pages."""
        rows = [self._free_rows.pop() for _ in range(group.num_rows)]
        for sequence in group.live:
            sequence.row = rows.pop()
        group.spare_rows = rows
        # Beams share one set of parameters, so the rows of beams to come can have theirs now.
        plan.rows_taken += [(sequence.row, sequence.sampling) for sequence in group.live]
        plan.rows_taken += [(row, group.live[0].sampling) for row in rows]
        insort(self._running, group, key=self._order)
        if group.is_swapped:
            moves, host_tables = swap_in(group, self.pool, self.config.page_size_tokens)
            plan.swap_ins += moves
            self._done_with += host_tables
            for sequence in group.live:
                self._enter_pages(plan, sequence, 0)
            return
        leader = group.live[0]
        self._use_hits(plan, leader, hits)
        if not group.num_preemptions:
            group.num_cached_tokens = leader.num_planned_tokens
            if group.reads_cache and self.cache is not None:
                self.prefix_queries_tokens += len(group.prompt_token_ids)
                self.prefix_hits_tokens += leader.num_planned_tokens
        if self.cache is not None:
            for digest in leader.digests[len(hits) :]:
                self._being_computed.setdefault(digest, leader)

    def _use_hits(self, plan: StepPlan, sequence: Sequence, hits: list[CachedPage]) -> None:
        """Begin a sequence's table with cached pages; those of the host tier are copied in."""
        assert self.cache is not None or not hits
        for hit in hits:  # first take hold of all, so that none is evicted to make room for another
            if hit.page >= 0:
                self.pool.share(hit.page)
        table = sequence.table
        for hit in hits:
            if hit.page < 0 and self.cache is not None:
                [page] = self.pool.allocate(1)
                if hit.host_page < 0:  # evicted from the host tier a moment ago, for a page that was allocated here
                    self.pool.release(page)
                    break
                host_page = self.cache.promote(hit, page, plan.step)
                plan.swap_ins.append((host_page, page))
                self._done_with.append(host_page)
            table.pages.append(hit.page)
            sequence.chain.append(hit)
        for hit in hits[len(table.pages) :]:
            if hit.page >= 0:
                self.pool.release(hit.page)
        sequence.num_planned_tokens = table.capacity_tokens
        self._enter_pages(plan, sequence, 0)

    def _enter_pages(self, plan: StepPlan, sequence: Sequence, first: int) -> None:
        """Tell the device a sequence's page table from index `first` on."""
        for index in range(first, len(sequence.table.pages)):
            plan.new_pages.append((FULL_ATTENTION_GROUP, sequence.row, index, sequence.table.pages[index]))

    def _fork(self, plan: StepPlan, group: SequenceGroup) -> None:
        """Give the other sequences the first one's beginning."""
        leader = group.live[0]
        for sequence in group.live[1:]:
            sequence.become_fork_of(leader, leader.num_planned_tokens)
            plan.row_copies.append((leader.row, sequence.row))
            # The leader's own table may be news of this plan, which come after the row copies.
            self._enter_pages(plan, sequence, 0)
        group.is_forked = True

    def _copy_rows(self, plan: StepPlan) -> None:
        """Plan the row copies that beams have asked for since the last plan."""
        for source, target in self._row_copies:
            if source.row >= 0 and target.row >= 0:
                plan.row_copies.append((source.row, target.row))
        self._row_copies.clear()

    def _schedule(self, plan: StepPlan, prefills: Work, sequence: Sequence, count: int) -> None:
        """Reserve the pages of `count` more tokens and put them into the plan, or behind its decode rows."""
        start, table = sequence.num_planned_tokens, sequence.table
        if table.shared_page(start) is not None:
            index, old, new = table.replace_shared_page(start)
            plan.page_copies.append((old, new))
            plan.new_pages.append((FULL_ATTENTION_GROUP, sequence.row, index, new))
            del sequence.chain[index:]
        if start + count > table.capacity_tokens:
            first = len(table.pages)
            table.grow(start + count)
            self._enter_pages(plan, sequence, first)
        if count == 1:
            self._append(plan, sequence, 1)
        else:
            prefills.append((sequence, count))

    def _append(self, plan: StepPlan, sequence: Sequence, count: int) -> None:
        """Write `count` more tokens of a sequence into the plan and count them as planned."""
        start = sequence.num_planned_tokens
        end = start + count
        known = sequence.token_ids
        samples = end == len(known) + sequence.num_in_flight
        plan.sequence_ids.append(sequence.sequence_id)
        plan.row_ids.append(sequence.row)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.samples.append(samples)
        if count == 1:
            plan.token_ids.append(known[start] if start < len(known) else ON_DEVICE)
        else:
            plan.token_ids += known[start:end]
        sequence.num_planned_tokens = end
        if samples:
            sequence.num_in_flight += 1
            plan.wants_candidates |= sequence.group.beams is not None
        if self.cache is not None and end <= len(known):
            self._publish(sequence, plan.step)

    def _publish(self, sequence: Sequence, step: int) -> None:
        """Name the pages that are full and whose tokens are known."""
        num_full = min(sequence.num_planned_tokens, len(sequence.token_ids)) // self.config.page_size_tokens
        group, digests = sequence.group, sequence.digests
        if self.cache is None or num_full <= len(sequence.chain) or not group.publishes:
            return
        self.cache.digests(sequence.token_ids, group.cache_keys, digests)
        self.cache.publish(
            sequence.chain, sequence.table.pages, sequence.token_ids, group.cache_keys, digests[:num_full], step
        )
        for digest in digests[:num_full]:
            if self._being_computed.get(digest) is sequence:
                del self._being_computed[digest]

    # -- giving way --------------------------------------------------------------------------------------------------

    def _make_room(self, plan: StepPlan, group: SequenceGroup, work: Work) -> bool:
        """Preempt the newest groups until this one's work fits; `False` if it had to go itself."""
        needed = self._pages_for(work)
        while needed > self.pool.num_available:
            victim = self._running[-1]
            self._preempt(plan, victim)
            if victim is group:
                return False
            needed = self._pages_for(work)
        return True

    def _pages_for(self, work: Work) -> int:
        """Pages to allocate for a group's work: new ones, and copies of shared ones.

        Of the owners of a shared page all but one need a copy, if all of them write.
        """
        needed = 0
        writers: dict[int, int] = {}
        for sequence, count in work:
            start = sequence.num_planned_tokens
            needed += max(sequence.table.num_missing_pages(start + count), 0)
            page = sequence.table.shared_page(start)
            if page is not None:
                writers[page] = writers.get(page, 0) + 1
        return needed + sum(min(count, self.pool.refcount(page) - 1) for page, count in writers.items())

    def _preempt(self, plan: StepPlan, group: SequenceGroup) -> None:
        """Send a running group back to wait. Tokens in flight are still booked when they arrive."""
        self._leave(group)
        pages = distinct_pages(group)
        if self._should_swap(group, len(pages)):
            plan.swap_outs += swap_out(group, self.host_pool, self.config.page_size_tokens)
            self.preemptions["swap"] += 1
        else:
            drop_pages(group)
            self.preemptions["recompute"] += 1
        group.num_preemptions += 1
        insort(self._waiting, group, key=self._order)

    def _should_swap(self, group: SequenceGroup, num_pages: int) -> bool:
        if self.config.preemption == "recompute" or not 0 < num_pages <= self.host_pool.num_available:
            return False
        if self.config.preemption == "swap":
            return True
        return self.costs.prefers_swap(num_pages, num_tokens_to_recompute(group))

    def _leave(self, group: SequenceGroup) -> None:
        self._running.remove(group)
        self._free_rows += group.spare_rows
        group.spare_rows = []
        for sequence in group.live:
            self._leave_row(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        self._free_rows.append(sequence.row)
        sequence.row = -1
        for digest in sequence.digests[len(sequence.chain) :]:
            if self._being_computed.get(digest) is sequence:
                del self._being_computed[digest]

    def _end(self, sequence: Sequence) -> None:
        """A sequence is done: its row and its pages are free at once."""
        group, is_running = sequence.group, sequence.row >= 0
        del self._sequences[sequence.sequence_id]
        if len(group.live) == 1:
            if is_running:
                self._running.remove(group)
                self._free_rows += group.spare_rows
                group.spare_rows = []
            else:
                self._waiting.remove(group)
        group.live.remove(sequence)
        if is_running:
            self._leave_row(sequence)
        sequence.table.release()
        if len(group.live) == 1:
            group.is_forked = True

    def _release_what_was_read(self) -> None:
        """The step that copies from these host pages has been dispatched."""
        for item in self._done_with:
            if isinstance(item, PageTable):
                item.release()
            else:
                self.host_pool.release(item)
        self._done_with.clear()

    def check_invariants(self) -> None:
        """Assert that rows, pages and queues agree with each other."""
        self.pool.check_invariants()
        self.host_pool.check_invariants()
        if self.cache is not None:
            self.cache.check_invariants()
        running = [sequence for group in self._running for sequence in group.live]
        waiting = [sequence for group in self._waiting for sequence in group.live]
        spare = [row for group in self._running for row in group.spare_rows]
        rows = [sequence.row for sequence in running] + self._free_rows + spare
        assert sorted(rows) == list(range(self.config.max_num_seqs)), "a row is lost or taken twice"
        assert sorted(s.sequence_id for s in running + waiting) == sorted(self._sequences), "a sequence is lost"
        for queue in (self._waiting, self._running):
            assert [self._order(g) for g in queue] == sorted(self._order(g) for g in queue), "a queue is out of order"
        for sequence in running:
            spare_slots = sequence.table.capacity_tokens - sequence.num_planned_tokens
            assert 0 <= spare_slots < self.config.page_size_tokens, "a page came before its first token, or too late"
            assert sequence.num_planned_tokens <= sequence.num_tokens
        owners: Counter[int] = Counter(page for sequence in running for page in sequence.table.pages)
        owners.update(page for pages in self._pins.values() for page in pages)
        host_owners: Counter[int] = Counter(item for item in self._done_with if isinstance(item, int))
        host_owners.update(page for item in self._done_with if isinstance(item, PageTable) for page in item.pages)
        for sequence in waiting:
            assert sequence.group.is_swapped or not sequence.table.pages, "a waiting sequence owns device pages"
            host_owners.update(sequence.table.pages)
        for pool, counts in ((self.pool, owners), (self.host_pool, host_owners)):
            for page in range(pool.num_pages):
                assert pool.refcount(page) == counts[page], f"page {page} has owners that nobody knows"

"""Decides at every step who computes what, and keeps the books.

Tokens are counted as planned when a step is dispatched and as committed when its result is back. With overlap a plan
is made while the step before it is in flight, so the newest token of a decode row may be known on the device only.
"""

from bisect import insort
from dataclasses import dataclass, field

from jpaged.errors import CapacityError
from jpaged.paging.page_pool import PagePool
from jpaged.paging.page_table import PageTable
from jpaged.scheduling.policy import POLICIES
from jpaged.scheduling.sequence import Sequence
from jpaged.step_plan import ON_DEVICE, StepPlan, StepResult

FULL_ATTENTION_GROUP = 0  # the only KV group for now


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the pool, and the policy's name."""

    num_pages: int
    page_size_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str = "fcfs"


@dataclass(slots=True)
class Progress:
    """What a commit changed: the sequences that gained a token, and whether it was their last (`sequence.finish`)."""

    sequences: list[Sequence] = field(default_factory=list[Sequence])


class Scheduler:
    """Continuous batching: chunks of prompts and decode rows share one token budget, the oldest first."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.num_preemptions = 0
        self._order = POLICIES[config.policy]
        self._sequences: dict[int, Sequence] = {}
        # Both in the policy's order.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._next_step = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def used_token_slots(self) -> int:
        """Tokens that have, or in this step get, their KV in a page."""
        return sum(sequence.num_planned_tokens for sequence in self._running)

    @property
    def allocated_token_slots(self) -> int:
        return self.pool.num_used * self.config.page_size_tokens

    def new_page_table(self) -> PageTable:
        return PageTable(self.pool, self.config.page_size_tokens)

    def check_fits(self, num_tokens: int) -> None:
        """Raise CapacityError if a sequence of `num_tokens` tokens could not run even with the whole pool to itself."""
        # The last token is never computed, so it takes no place.
        needed = -(-(num_tokens - 1) // self.config.page_size_tokens)
        if needed > self.config.num_pages:
            raise CapacityError(
                f"the request needs {needed} pages of {self.config.page_size_tokens} tokens for {num_tokens} tokens"
                f" of prompt and output, the pool has {self.config.num_pages};"
                " lower max_tokens, shorten the prompt, or raise num_pages"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises CapacityError if it can never fit."""
        self.check_fits(sequence.stop_rules.max_length)
        self._sequences[sequence.sequence_id] = sequence
        insort(self._waiting, sequence, key=self._order)

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is, and free its pages. Results still in flight for it are dropped."""
        if self._sequences.pop(sequence.sequence_id, None) is None:
            return
        if sequence.row >= 0:
            self._leave_row(sequence)
        else:
            self._waiting.remove(sequence)

    def plan(self) -> StepPlan | None:
        """Choose the next step's work and reserve its pages; `None` if there is nothing to do before a commit."""
        plan = StepPlan(step=self._next_step)
        prefills: list[tuple[Sequence, int]] = []
        budget = self._plan_running(plan, prefills)
        self._plan_waiting(plan, prefills, budget)
        plan.num_decode = len(plan.sequence_ids)
        for sequence, count in prefills:
            self._append(plan, sequence, count)
        if not plan.sequence_ids:
            return None
        self._next_step += 1
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> Progress:
        """Book the tokens that a step drew. Tokens of sequences that have ended meanwhile are dropped."""
        progress = Progress()
        sequences = self._sequences
        for sequence_id, samples, token_id in zip(
            plan.sequence_ids, plan.samples, result.token_ids.tolist(), strict=True
        ):
            sequence = sequences.get(sequence_id)
            if sequence is None or not samples:
                continue
            sequence.num_in_flight -= 1
            sequence.token_ids.append(token_id)
            sequence.finish = sequence.stop_rules.check(token_id, len(sequence.token_ids))
            if sequence.finish is not None:
                self.abort(sequence)
            progress.sequences.append(sequence)
        return progress

    def _plan_running(self, plan: StepPlan, prefills: list[tuple[Sequence, int]]) -> int:
        """Plan the running sequences in order; return what is left of the token budget.

        A prompt's chunk leaves one token of the budget to each decode row behind it, so that a long prompt delays
        nobody; but it always gets one itself, so that the oldest sequence progresses under any budget.
        """
        budget = self.config.max_num_batched_tokens
        wanted = [sequence.num_uncomputed_tokens for sequence in self._running]
        decodes_behind = wanted.count(1)
        index = 0
        while budget > 0 and index < len(self._running):
            sequence, want = self._running[index], wanted[index]
            index += 1
            if want == 0:
                continue
            if want == 1:
                decodes_behind -= 1
                count = 1
            else:
                count = min(want, max(budget - decodes_behind, 1))
            if not self._make_room(sequence, count):
                break  # the sequence itself was the newest and has given way
            budget -= count
            self._schedule(plan, prefills, sequence, count)
        return budget

    def _plan_waiting(self, plan: StepPlan, prefills: list[tuple[Sequence, int]], budget: int) -> None:
        """Admit waiting sequences in order while rows, budget and pages last. Nobody is preempted for them."""
        if not (self._waiting and self._free_rows and budget > 0):
            return
        # Room for every known token, and for one page of growth of each running sequence, keeps a sequence from being
        # admitted only to be preempted again. With nobody running it is admitted whatever the sum says: it fits alone.
        promised = sum(max(s.table.num_missing_pages(s.num_tokens), 0) + 1 for s in self._running)
        while self._waiting and self._free_rows and budget > 0:
            sequence = self._waiting[0]
            missing = sequence.table.num_missing_pages(sequence.num_tokens)
            # A preempted sequence waits for its token in flight.
            if sequence.num_in_flight or (promised and promised + missing > self.pool.num_free):
                return
            del self._waiting[0]
            sequence.row = self._free_rows.pop()
            insort(self._running, sequence, key=self._order)
            plan.rows_taken.append((sequence.row, sequence.sampling))
            count = min(sequence.num_uncomputed_tokens, budget)
            budget -= count
            self._schedule(plan, prefills, sequence, count)
            promised += max(sequence.table.num_missing_pages(sequence.num_tokens), 0) + 1

    def _schedule(self, plan: StepPlan, prefills: list[tuple[Sequence, int]], sequence: Sequence, count: int) -> None:
        """Reserve the pages of `count` more tokens and put them into the plan, or behind its decode rows."""
        end = sequence.num_planned_tokens + count
        table = sequence.table
        if end > table.capacity_tokens:
            first = len(table.pages)
            for index, page in enumerate(table.grow(end), first):
                plan.new_pages.append((FULL_ATTENTION_GROUP, sequence.row, index, page))
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

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Preempt the newest sequences until `count` more tokens of this one fit; `False` if it had to go itself."""
        missing = sequence.table.num_missing_pages(sequence.num_planned_tokens + count)
        while missing > self.pool.num_free:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to wait; it will compute its tokens again. A token in flight is still booked."""
        self._leave_row(sequence)
        sequence.num_planned_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, sequence, key=self._order)

    def _leave_row(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = -1
        sequence.table.release()

    def check_invariants(self) -> None:
        """Assert that rows, pages and queues agree with each other."""
        self.pool.check_invariants()
        rows = [sequence.row for sequence in self._running] + self._free_rows
        assert sorted(rows) == list(range(self.config.max_num_seqs)), "a row is lost or taken twice"
        assert len(self._waiting) + len(self._running) == len(self._sequences), "a sequence is lost or queued twice"
        for queue in (self._waiting, self._running):
            assert [self._order(s) for s in queue] == sorted(self._order(s) for s in queue), "a queue is out of order"
        owned: list[int] = []
        for sequence in self._running:
            assert sequence.num_planned_tokens <= sequence.num_tokens
            assert sequence.table.capacity_tokens - sequence.num_planned_tokens < self.config.page_size_tokens, (
                "a page was taken before its first token"
            )
            assert sequence.num_planned_tokens <= sequence.table.capacity_tokens, "a token has no page"
            owned += sequence.table.pages
        assert all(not sequence.table.pages for sequence in self._waiting), "a waiting sequence owns pages"
        assert len(owned) == len(set(owned)) == self.pool.num_used, "a page is leaked or shared by accident"

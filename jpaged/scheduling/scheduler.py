"""Decides at every step who computes what.

Tokens are counted as planned when a step is dispatched and as committed when its result is back. With overlap a plan
is made while the step before it is in flight, so the newest token of a decode row may be known on the device only.
"""

from dataclasses import dataclass, field

from jpaged.decoding.stopping import Finish
from jpaged.errors import CapacityError
from jpaged.paging.page_pool import PagePool
from jpaged.paging.page_table import PageTable
from jpaged.paging.prefix_cache import PrefixCache
from jpaged.scheduling.admission import admit, find_hits, num_missing_pages, num_pages_taken
from jpaged.scheduling.beams import advance_beams
from jpaged.scheduling.books import FULL_ATTENTION_GROUP, Books, SchedulerConfig
from jpaged.scheduling.preemption import CostModel, distinct_pages, drop_pages, num_tokens_to_recompute, swap_out
from jpaged.scheduling.sequence import Sequence, SequenceGroup
from jpaged.scheduling.wishes import is_wide, note_wishes
from jpaged.step_plan import ON_DEVICE, StepPlan, StepResult

__all__ = ["Progress", "Scheduler", "SchedulerConfig"]

NO_TOKEN_LEFT = "the grammar and the request's other constraints leave no token to draw"

Work = list[tuple[Sequence, int]]  # sequences and how many tokens each computes


@dataclass(slots=True)
class Progress:
    """What a commit changed: the sequences that gained a token, with their places in the plan (and whether it was their
    last: `sequence.finish`), and the beam groups that are done. One that ended by an error has gained none."""

    sequences: list[tuple[Sequence, int]] = field(default_factory=list[tuple[Sequence, int]])
    beam_groups: list[SequenceGroup] = field(default_factory=list[SequenceGroup])


class Scheduler:
    """Continuous batching: chunks of prompts and decode rows share one token budget, the oldest first."""

    def __init__(self, config: SchedulerConfig, costs: CostModel | None = None) -> None:
        self.config = config
        self.costs = costs or CostModel()
        self.books = Books(config)
        self.preemptions = {"swap": 0, "recompute": 0}
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0

    @property
    def pool(self) -> PagePool:
        return self.books.pool

    @property
    def host_pool(self) -> PagePool:
        return self.books.host_pool

    @property
    def cache(self) -> PrefixCache | None:
        return self.books.cache

    @property
    def num_running(self) -> int:
        """Sequences in a row."""
        return sum(len(group.live) for group in self.books.running)

    @property
    def num_waiting(self) -> int:
        return sum(len(group.live) for group in self.books.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.books.sequences)

    @property
    def used_token_slots(self) -> int:
        """Slots of owned pages that have, or in this step get, a token; a shared slot counts once."""
        size = self.config.page_size_tokens
        empty: dict[int, int] = {}
        for group in self.books.running:
            for sequence in group.live:
                pages = sequence.table.pages
                if pages:
                    empty[pages[-1]] = len(pages) * size - sequence.num_planned_tokens
        return self.allocated_token_slots - sum(empty.values())

    @property
    def allocated_token_slots(self) -> int:
        return self.pool.num_used * self.config.page_size_tokens

    def new_page_table(self) -> PageTable:
        return self.books.new_page_table()

    def new_sequence_id(self) -> int:
        return self.books.new_sequence_id()

    def group_of(self, sequence_id: int) -> SequenceGroup:
        """The group of a sequence that has not ended."""
        return self.books.sequences[sequence_id].group

    def check_width(self, width: int) -> None:
        """Raise CapacityError if a step does not hold the sequences of a request."""
        config = self.config
        if width > min(config.max_num_seqs, config.max_num_batched_tokens):
            raise CapacityError(
                f"the request has {width} sequences, a step holds {config.max_num_seqs} sequences and"
                f" {config.max_num_batched_tokens} tokens; lower n or beam_width, or raise the smaller limit"
            )

    def check_fits(self, num_prompt_tokens: int, max_length: int, width: int = 1) -> int:
        """Return the most pages that a request can need.

        Raises:
            CapacityError: it could not run even with the whole engine, but for the pinned pages, to itself.
        """
        self.check_width(width)
        config = self.config
        # The last token is never computed, so it takes no place. Sequences share the prompt's full pages.
        pages = -(-(max_length - 1) // config.page_size_tokens)
        shared = (num_prompt_tokens - 1) // config.page_size_tokens if width > 1 else 0
        needed = shared + width * (pages - shared) + (1 if width > 1 else 0)
        available = config.num_pages - self.books.num_pinned_pages
        if needed > available:
            raise CapacityError(
                f"the request needs {needed} pages of {config.page_size_tokens} tokens for {width} x {max_length}"
                f" tokens of prompt and output, the pool has {available};"
                " lower max_tokens, shorten the prompt, or raise num_pages"
            )
        return needed

    def longest_that_fits(self, num_prompt_tokens: int, width: int) -> int:
        """Return the most tokens of prompt and output with which `check_fits` passes."""
        pages = self.config.num_pages - self.books.num_pinned_pages
        if width > 1:
            shared = (num_prompt_tokens - 1) // self.config.page_size_tokens
            pages = shared + (pages - 1 - shared) // width
        return pages * self.config.page_size_tokens + 1

    def add(self, group: SequenceGroup) -> None:
        """Queue a group whose `live` sequences are new. Raises CapacityError as `check_fits`."""
        group.most_pages = self.check_fits(len(group.prompt_token_ids), group.stop_rules.max_length, group.width)
        for sequence in group.live:
            self.books.sequences[sequence.sequence_id] = sequence
        self.books.wait(group)

    def abort(self, group: SequenceGroup) -> None:
        """Forget a group wherever it is, and free its pages. Results still in flight for it are dropped."""
        for sequence in list(group.live):
            self.books.end(sequence)

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """End a sequence for a reason that only the text shows. Its token in flight is dropped."""
        sequence.finish = finish
        self.books.end(sequence)

    def plan(self) -> StepPlan | None:
        """Choose the next step's work and reserve its pages; `None` if there is nothing to do before a commit."""
        books = self.books
        plan = StepPlan(step=books.next_step)
        books.release_what_was_read()
        plan.row_copies = [(s.row, t.row) for s, t in books.row_copies if s.row >= 0 and t.row >= 0]
        books.row_copies.clear()
        prefills: Work = []
        budget = self._plan_running(plan, prefills)
        self._plan_waiting(plan, prefills, budget)
        plan.num_decode = len(plan.sequence_ids)
        for sequence, count in prefills:
            self._append(plan, sequence, count)
        self._plan_demotions(plan)
        _keep_last_writes(plan)
        if not plan.sequence_ids and not plan.has_moves:
            return None
        books.next_step += 1
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> Progress:
        """Book what a step drew. Tokens of sequences that have ended meanwhile are dropped."""
        progress, books = Progress(), self.books
        sequences, caching, size = books.sequences, books.cache is not None, self.config.page_size_tokens
        candidates: dict[SequenceGroup, dict[Sequence, int]] = {}
        for place, token_id in enumerate(result.token_ids.tolist()):
            sequence = sequences.get(plan.sequence_ids[place])
            if sequence is None or not plan.samples[place]:
                continue
            sequence.num_in_flight -= 1
            group, token_ids = sequence.group, sequence.token_ids
            if group.beams is not None:
                candidates.setdefault(group, {})[sequence] = place
                continue
            progress.sequences.append((sequence, place))
            if sequence.grammar is not None and not sequence.grammar.accept(token_id):
                self.finish(sequence, Finish("error", sequence.grammar.failure or NO_TOKEN_LEFT))
                continue
            token_ids.append(token_id)
            sequence.finish = group.stop_rules.check(token_id, len(token_ids))
            if sequence.grammar is not None and sequence.finish is None and sequence.grammar.is_finished:
                sequence.finish = Finish("stop")
            if caching and len(token_ids) // size > len(sequence.chain):
                books.publish(sequence, books.next_step - 1)
            if sequence.finish is not None:
                books.end(sequence)
        for group, places in candidates.items():
            advance_beams(books, group, [places[sequence] for sequence in group.live], result)
            if not group.live:
                progress.beam_groups.append(group)
        return progress

    def _plan_running(self, plan: StepPlan, prefills: Work) -> int:
        """Plan the running groups in order; return what is left of the token budget.

        A prompt's chunk leaves one token of the budget to each sequence behind it, so that a long prompt delays
        nobody; but it always gets one itself, so that the oldest group progresses under any budget.
        """
        running = self.books.running
        budget = self.config.max_num_batched_tokens
        behind = sum([len(group.live) for group in running])
        index = 0
        while budget > 0 and index < len(running):
            group = running[index]
            index += 1
            behind -= len(group.live)
            if self._plan_decode_row(plan, group):
                budget -= 1
                continue
            wanted = self._wanted(plan, group)
            if not wanted:
                continue  # nothing to do before a commit
            if group.beams is not None and budget < len(wanted):
                break  # beams draw together or not at all
            counts: Work = []
            for sequence, want in wanted:
                count = min(want, max(budget - behind, 1), budget)
                if count:
                    budget -= count
                    counts.append((sequence, count))
            if not self._make_room(plan, group, counts):
                break  # the group itself was the newest and has given way
            for sequence, count in counts:
                self._schedule(plan, prefills, sequence, count)
        return budget

    def _plan_decode_row(self, plan: StepPlan, group: SequenceGroup) -> bool:
        """Plan one more token of a single sequence whose page has room: almost every turn of the loop, made short.

        `False` if it is anything else, and then nothing has happened.
        """
        if len(group.live) != 1 or group.beams is not None or is_wide(group.num_logprobs):
            return False
        sequence = group.live[0]
        if sequence.grammar is not None:
            return False
        position, table = sequence.num_planned_tokens, sequence.table
        num_known = len(sequence.token_ids)
        num_tokens = num_known + sequence.num_in_flight
        pages, size = table.pages, table.page_size_tokens
        if (
            position != num_tokens - 1
            or num_tokens >= group.stop_rules.max_length
            or position >= len(pages) * size
            or table.is_shared(position // size)
        ):
            return False
        plan.sequence_ids.append(sequence.sequence_id)
        plan.row_ids.append(sequence.row)
        plan.starts.append(position)
        plan.counts.append(1)
        plan.samples.append(True)
        plan.wants_logprobs |= group.num_logprobs is not None
        plan.token_ids.append(sequence.token_ids[position] if position < num_known else ON_DEVICE)
        sequence.num_planned_tokens = position + 1
        sequence.num_in_flight += 1
        if num_known // size > len(sequence.chain):
            self.books.publish(sequence, plan.step)
        return True

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
        books = self.books
        if not books.waiting or not books.num_free_rows or budget <= 0:
            return
        # Room for every known token, and for one page of growth of each running sequence, keeps a group from being
        # admitted only to be preempted again. With nobody running it is admitted whatever the sum says: it fits alone.
        promised = sum(num_missing_pages(books, group) + len(group.live) for group in books.running)
        for group in list(books.waiting):
            if budget <= 0 or group.num_rows > books.num_free_rows or group.num_in_flight:
                return  # a preempted group waits for its tokens in flight
            hits = find_hits(books, plan, group)
            if hits is None:
                continue  # another one is computing its prefix just now
            if promised and promised + num_pages_taken(books, group, hits) > self.pool.num_available:
                return
            admit(books, plan, group, hits)
            if books.cache is not None and group.reads_cache and not group.num_preemptions:
                self.prefix_queries_tokens += len(group.prompt_token_ids)
                self.prefix_hits_tokens += group.num_cached_tokens
            wanted = self._wanted(plan, group)
            if group.beams is None or budget >= len(wanted):
                counts: Work = []
                for sequence, want in wanted:
                    count = min(want, budget)
                    if count:
                        budget -= count
                        counts.append((sequence, count))
                if self._pages_for(counts) <= self.pool.num_available:  # else the next plan makes room
                    for sequence, count in counts:
                        self._schedule(plan, prefills, sequence, count)
            promised += num_missing_pages(books, group) + len(group.live)

    def _fork(self, plan: StepPlan, group: SequenceGroup) -> None:
        """Give the other sequences the first one's beginning."""
        leader = group.live[0]
        for sequence in group.live[1:]:
            sequence.become_fork_of(leader, leader.num_planned_tokens)
            plan.row_copies.append((leader.row, sequence.row))
            # The leader's own table may be news of this plan, which come after the row copies.
            self.books.enter_pages(plan, sequence, 0)
        group.is_forked = True

    def _schedule(self, plan: StepPlan, prefills: Work, sequence: Sequence, count: int) -> None:
        """Reserve the pages of `count` more tokens and put them into the plan, or behind its decode rows."""
        start, table = sequence.num_planned_tokens, sequence.table
        if table.shared_page(start) is not None:
            index, old, new = table.replace_shared_page(start)
            plan.page_copies.append((old, new))
            plan.new_pages.append((FULL_ATTENTION_GROUP, sequence.row, index, new))
        if start + count > table.capacity_tokens:
            first = len(table.pages)
            table.grow(start + count)
            self.books.enter_pages(plan, sequence, first)
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
        if samples or sequence.group.num_scored < sequence.group.prompt_length:
            note_wishes(plan, sequence, end, samples)
        plan.sequence_ids.append(sequence.sequence_id)
        plan.row_ids.append(sequence.row)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.samples.append(samples)
        plan.token_ids += known[start:end] or [ON_DEVICE]
        sequence.num_planned_tokens = end
        if samples:
            sequence.num_in_flight += 1
        self.books.publish(sequence, plan.step)

    def _make_room(self, plan: StepPlan, group: SequenceGroup, work: Work) -> bool:
        """Preempt the newest groups until this one's work fits; `False` if it had to go itself."""
        while self._pages_for(work) > self.pool.num_available:
            victim = self.books.running[-1]
            self._preempt(plan, victim)
            if victim is group:
                return False
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
        rows = {sequence.row for sequence in group.live}
        # It may have forked in this plan, and others may take its rows in it.
        plan.row_copies = [copy for copy in plan.row_copies if copy[1] not in rows]
        plan.new_pages = [entry for entry in plan.new_pages if entry[1] not in rows]
        self.books.leave_rows(group)
        if self._should_swap(group):
            moves = swap_out(group, self.host_pool, self.config.page_size_tokens)
            self._plan_demotions(plan)  # they came first: a host page that was given on since then has the newer page
            plan.swap_outs += moves
            self.preemptions["swap"] += 1
        else:
            drop_pages(group)
            self.preemptions["recompute"] += 1
        group.num_preemptions += 1
        self.books.wait(group)

    def _plan_demotions(self, plan: StepPlan) -> None:
        """Cached pages that have been given away leave for the host tier."""
        if self.books.cache is not None:
            plan.swap_outs += self.books.cache.demotions
            self.books.cache.demotions = []

    def _should_swap(self, group: SequenceGroup) -> bool:
        num_pages = len(distinct_pages(group))
        if self.config.preemption == "recompute" or not 0 < num_pages <= self.host_pool.num_available:
            return False
        if self.config.preemption == "swap":
            return True
        return self.costs.prefers_swap(num_pages, num_tokens_to_recompute(group))

    def check_invariants(self) -> None:
        """Assert that rows, pages and queues agree with each other."""
        self.books.check_invariants()


def _keep_last_writes(plan: StepPlan) -> None:
    """Where a plan writes an entry twice, keep the last: a device may write them in any order."""
    plan.new_pages = [(*where, page) for where, page in {entry[:3]: entry[3] for entry in plan.new_pages}.items()]
    plan.swap_outs = [(page, host_page) for host_page, page in {host: page for page, host in plan.swap_outs}.items()]

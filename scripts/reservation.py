"""Serving real lengths in the same memory, without a device: pages against contiguous reservations.

The contiguous policies are the baselines of the PagedAttention paper (Kwon et al., arXiv 2309.06180, section 6.1): a
request's slots are reserved in one piece when it is admitted, up to the model's maximum length, for an output of the
next power of two, or for the true output length known in advance. They are favoured here: the pieces are taken to fit
together without gaps.

A slot holds one token's KV. Every server gets the same token budget for each step, serves first come first served, and
all requests are there from the start.
"""

import csv
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jpaged.decoding.stopping import StopRules
from jpaged.scheduling.scheduler import Scheduler, SchedulerConfig
from jpaged.scheduling.sequence import Sequence, SequenceGroup
from jpaged.step_plan import RowSampling, StepPlan, StepResult

Lengths = list[tuple[int, int]]  # (prompt tokens, output tokens) of each request
Policy = Callable[[int, int, int], int]  # (prompt tokens, output tokens, maximum length) -> slots
LENGTHS_FILE = Path(__file__).resolve().parent / "workloads" / "sharegpt_lengths.csv"
_GREEDY = RowSampling()


def _to_maximum_length(num_prompt: int, num_output: int, max_length: int) -> int:
    return max_length


def _to_power_of_two(num_prompt: int, num_output: int, max_length: int) -> int:
    return min(num_prompt + (1 << (num_output - 1).bit_length()), max_length)


def _to_true_length(num_prompt: int, num_output: int, max_length: int) -> int:
    return num_prompt + num_output


CONTIGUOUS: dict[str, Policy] = {
    "to the maximum length": _to_maximum_length,
    "to the next power of two": _to_power_of_two,
    "to the true length": _to_true_length,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server has: slots of memory, and the shape of its steps. `max_rows` should not be what binds."""

    memory_slots: int
    max_length: int = 2048
    max_rows: int = 1024
    max_batched_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Served:
    """What came of serving all requests.

    Attributes:
        rows: requests in memory, averaged over the steps in which others waited for room.
        waste: share of reserved slots that held no token, over all steps and requests.
        steps: steps until the last request ended.
        recomputed_tokens: tokens computed again after a request had to give way.
    """

    rows: float
    waste: float
    steps: int
    recomputed_tokens: int = 0


def read_lengths(count: int, path: Path = LENGTHS_FILE) -> Lengths:
    """The first `count` pairs of a file with the columns prompt_tokens and output_tokens."""
    with path.open() as file:
        return [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)][:count]


def rounding_floor(lengths: Lengths, page_size_tokens: int) -> float:
    """Waste that no paging can avoid: the last page's empty slots, over the steps of each request's life.

    A request holds its prompt's tokens when the first output token is drawn, and one more in each step after that.
    """
    reserved = used = 0
    for num_prompt, num_output in lengths:
        for held in range(num_prompt, num_prompt + num_output):
            reserved += -(-held // page_size_tokens) * page_size_tokens
            used += held
    return 1 - used / reserved


def serve_contiguous(lengths: Lengths, policy: Policy, limits: Limits) -> Served:
    """Serve with one reservation for each request, made when it is admitted and given back when it ends."""
    waiting = deque(lengths)
    running: list[_Running] = []
    tally, reserved = _Tally(), 0
    while waiting or running:
        budget = limits.max_batched_tokens
        for request in running:  # decode rows, which come first
            if request.computed >= request.num_prompt:
                request.computed += 1
                budget -= 1
        for request in running:
            budget -= request.prefill(budget)
        while waiting and budget > 0 and len(running) < limits.max_rows:
            slots = policy(*waiting[0], limits.max_length)
            if reserved + slots > limits.memory_slots:
                break
            request = _Running(*waiting.popleft(), slots)
            running.append(request)
            reserved += slots
            budget -= request.prefill(budget)
        tally.count(len(running), reserved, sum(request.computed for request in running), bool(waiting))
        ended = [request for request in running if request.has_drawn_all]
        reserved -= sum(request.slots for request in ended)
        running = [request for request in running if not request.has_drawn_all]
    return tally.result()


def serve_paged(lengths: Lengths, page_size_tokens: int, limits: Limits) -> Served:
    """Serve with the scheduler, by recompute when memory runs out."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=limits.memory_slots // page_size_tokens,
            page_size_tokens=page_size_tokens,
            max_num_seqs=limits.max_rows,
            max_num_batched_tokens=limits.max_batched_tokens,
            preemption="recompute",
        )
    )
    tally, computed = _Tally(), 0
    for plan in run_without_device(scheduler, [([1] * prompt, output) for prompt, output in lengths]):
        computed += plan.num_tokens
        rows, waiting = scheduler.num_running, scheduler.num_waiting > 0
        tally.count(rows, scheduler.allocated_token_slots, scheduler.used_token_slots, waiting)
    needed = sum(prompt + output - 1 for prompt, output in lengths)
    return tally.result(computed - needed)


def run_without_device(
    scheduler: Scheduler, requests: list[tuple[list[int], int]], token_id: int = 7
) -> Iterator[StepPlan]:
    """Serve prompts with output lengths, all at once, as if each step drew `token_id`; yield each plan before it is
    committed. The next plan is made after that, so the scheduler's counts are those of the plan."""
    groups = [make_group(scheduler, place, *request) for place, request in enumerate(requests)]
    for group in groups:
        scheduler.add(group)
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None, "there is work, and nothing is in flight"
        yield plan
        scheduler.commit(plan, draw(plan, token_id))


def make_group(scheduler: Scheduler, group_id: int, prompt_token_ids: list[int], num_output: int) -> SequenceGroup:
    """A greedy request of one sequence that ends by its length."""
    scheduler.check_fits(len(prompt_token_ids), len(prompt_token_ids) + num_output)
    rules = StopRules(frozenset(), frozenset(), len(prompt_token_ids) + num_output)
    group = SequenceGroup(group_id, prompt_token_ids, rules)
    group.live.append(Sequence(scheduler.new_sequence_id(), group, 0, _GREEDY, scheduler.new_page_table()))
    return group


def draw(plan: StepPlan, token_id: int = 7) -> StepResult:
    """What a device would give back that always draws the same token."""
    return StepResult(np.full(plan.num_seqs, token_id, np.int32))


@dataclass(slots=True)
class _Running:
    """A request with a reservation. The last token that it draws is never computed."""

    num_prompt: int
    num_output: int
    slots: int
    computed: int = 0

    @property
    def has_drawn_all(self) -> bool:
        return self.computed >= self.num_prompt + self.num_output - 1

    def prefill(self, budget: int) -> int:
        """Compute what the budget allows of the prompt; return how many tokens that was."""
        count = max(min(self.num_prompt - self.computed, budget), 0)
        self.computed += count
        return count


class _Tally:
    """Sums over steps."""

    def __init__(self) -> None:
        self.steps = self.reserved = self.used = 0
        self.full_steps = self.rows_of_full_steps = 0

    def count(self, rows: int, reserved: int, used: int, others_wait: bool) -> None:
        self.steps += 1
        self.reserved += reserved
        self.used += used
        if others_wait:
            self.full_steps += 1
            self.rows_of_full_steps += rows

    def result(self, recomputed_tokens: int = 0) -> Served:
        rows = self.rows_of_full_steps / max(self.full_steps, 1)
        return Served(rows, 1 - self.used / self.reserved, self.steps, recomputed_tokens)

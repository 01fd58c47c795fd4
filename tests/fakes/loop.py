"""The engine's loop around a scheduler and a simulated device; checks the books after every operation."""

from collections import deque
from dataclasses import replace

from jpaged.decoding.beam_search import BeamSearch
from jpaged.decoding.stopping import StopRules
from jpaged.scheduling.scheduler import Scheduler, SchedulerConfig
from jpaged.scheduling.sequence import Sequence, SequenceGroup
from jpaged.step_plan import RowSampling, StepPlan, StepResult
from tests.fakes.simulated_runner import SimulatedRunner

GREEDY = RowSampling()


class Loop:
    """The engine's loop around a scheduler and a simulated device; checks the books after every operation."""

    def __init__(
        self, *, num_pages=64, page_size=4, rows=4, budget=16, overlap=True, num_host_pages=0, **options
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(num_pages, page_size, rows, budget, num_host_pages=num_host_pages, **options)
        )
        self.runner = SimulatedRunner(num_pages, page_size, rows, num_host_pages)
        self.overlap = overlap
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.groups: list[SequenceGroup] = []
        self.sequences: list[Sequence] = []
        self.plans: list[StepPlan] = []
        self.prompt_scores: dict[tuple[int, int], float] = {}  # by group and position
        self.peak_pages = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        eos: frozenset[int] = frozenset(),
        *,
        n: int = 1,
        beams: BeamSearch | None = None,
        sampling: RowSampling = GREEDY,
        grammar=None,
        **settings,
    ) -> Sequence:
        """Queue a request; return its first sequence. All of them are in `sequences`."""
        scheduler = self.scheduler
        width = n if beams is None else beams.width
        scheduler.check_fits(len(prompt), len(prompt) + max_tokens, width)
        rules = StopRules(eos, frozenset(), len(prompt) + max_tokens)
        group = SequenceGroup(len(self.groups), prompt, rules, width=width, beams=beams, **settings)
        for index in range(n):
            row = replace(sampling, sample_index=index)
            sequence = Sequence(scheduler.new_sequence_id(), group, index, row, scheduler.new_page_table())
            sequence.grammar = grammar and grammar.copy()
            group.live.append(sequence)
        self.groups.append(group)
        self.sequences += group.live
        scheduler.add(group)
        scheduler.check_invariants()
        return group.live[0]

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.scheduler.check_invariants()
        self.peak_pages = max(self.peak_pages, self.scheduler.pool.num_used)
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.runner.run(plan)))
        if self.in_flight and (plan is None or not self.overlap or len(self.in_flight) > 1):
            plan, result = self.in_flight.popleft()
            self.scheduler.commit(plan, result)
            for token, logprob in zip(plan.scored, result.scored.logprobs if result.scored else (), strict=True):
                assert (token.group_id, token.position) not in self.prompt_scores, "a token is scored twice"
                self.prompt_scores[token.group_id, token.position] = float(logprob)
            self.scheduler.check_invariants()

    def run(self, max_steps: int = 10_000) -> None:
        while self.scheduler.has_work or self.in_flight:
            self.step()
            max_steps -= 1
            assert max_steps > 0, "the work does not end"


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 101 + position * 7) % 997 for position in range(length)]

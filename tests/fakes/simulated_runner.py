"""A device made of lists: executes plans as they are, on pages and rows that hold token ids instead of KV.

What a sequence draws next is a function of all its tokens, read back through its page table, so a token in a wrong
page, a page given to two sequences, a missing copy or a stale row changes the outputs.
"""

import math

import numpy as np
from numpy.typing import NDArray

from jpaged.decoding.beam_search import BeamSearch, Hypothesis
from jpaged.step_plan import MAX_CANDIDATES, ON_DEVICE, Logprobs, StepPlan, StepResult
from tests.fakes.plan_checks import check_plan

VOCABULARY = 997


def hash_of(tokens: list[int]) -> int:
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value


def next_token(tokens: list[int], sample_index: int = 0) -> int:
    """The token that follows, by a hash of the whole history."""
    return (hash_of(tokens) + 613 * sample_index) % VOCABULARY


def candidates(tokens: list[int]) -> tuple[list[int], list[float]]:
    """The best next tokens and their logprobs (exact in float32, as the device gives them), best first."""
    value = hash_of(tokens)
    token_ids = [(value + 37 * rank) % VOCABULARY for rank in range(MAX_CANDIDATES)]
    spread = [2 + rank + value % 7 + rank * (value % 3) for rank in range(MAX_CANDIDATES)]
    return token_ids, [float(np.float32(-math.log(number))) for number in spread]


def next_allowed(token: int, mask: NDArray[np.uint32]) -> int:
    """The first token from `token` on that a mask allows."""
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCABULARY])
    return int(min(allowed, key=lambda other: (other - token) % VOCABULARY))


def score(tokens: list[int]) -> int:
    """A number for the last of the tokens, behind the others."""
    return hash_of(tokens) % 10_007


def generate(prompt: list[int], num_tokens: int, eos: frozenset[int] = frozenset(), sample_index: int = 0) -> list[int]:
    """What a sequence must generate, whatever runs beside it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(next_token(tokens, sample_index))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def beam_search(prompt: list[int], search: BeamSearch) -> list[Hypothesis]:
    """The same search on plain lists."""
    outputs: list[list[int]] = [[]]
    while outputs:
        chosen = search.advance(outputs, [candidates(prompt + output) for output in outputs])
        outputs = [[*outputs[child.parent], child.token_id] for child in chosen]
    return search.finished


class SimulatedRunner:
    def __init__(self, num_pages: int, page_size_tokens: int, num_rows: int, num_host_pages: int = 0) -> None:
        self.page_size_tokens = page_size_tokens
        self.pages: list[list[int | None]] = [[None] * page_size_tokens for _ in range(num_pages)]
        self.host_pages: list[list[int | None]] = [[None] * page_size_tokens for _ in range(num_host_pages)]
        self.tables: list[dict[int, int]] = [{} for _ in range(num_rows)]
        self.drawn: list[int | None] = [None] * num_rows
        self.sample_index = [0] * num_rows
        self.reads_history = [False] * num_rows
        self.histories: list[dict[int, int]] = [{} for _ in range(num_rows)]  # what penalties would see
        self.num_computed_tokens = 0

    def run(self, plan: StepPlan) -> StepResult:
        check_plan(plan)
        assert plan.counts[: plan.num_decode] == [1] * plan.num_decode, "decode rows come first"
        assert len(plan.token_ids) == sum(plan.counts)
        assert len(set(plan.row_ids)) == len(plan.row_ids), "a row computes twice in one step"
        self._move_pages(plan)
        self._change_rows(plan)
        first = 0
        for row, start, count in zip(plan.row_ids, plan.starts, plan.counts, strict=True):
            for offset, token in enumerate(plan.token_ids[first : first + count]):
                page, slot = divmod(start + offset, self.page_size_tokens)
                token = self.drawn[row] if token == ON_DEVICE else token
                assert token is not None, "nothing was drawn before"
                self.pages[self.tables[row][page]][slot] = token
                self.histories[row][start + offset] = token
            first += count
        self.num_computed_tokens += first
        return self._draw(plan)

    def _move_pages(self, plan: StepPlan) -> None:
        for page, host_page in plan.swap_outs:
            self.host_pages[host_page] = list(self.pages[page])
        for host_page, page in plan.swap_ins:
            self.pages[page] = list(self.host_pages[host_page])
        contents = [list(self.pages[source]) for source, _ in plan.page_copies]
        for (_, target), content in zip(plan.page_copies, contents, strict=True):
            self.pages[target] = content

    def _change_rows(self, plan: StepPlan) -> None:
        for row, sampling in plan.rows_taken:
            self.tables[row] = {}
            self.drawn[row] = None
            self.sample_index[row] = sampling.sample_index
            self.reads_history[row] = sampling.reads_history
            self.histories[row] = {}
        for row, token_ids in plan.histories:
            self.histories[row] = dict(enumerate(token_ids))
        histories = [dict(self.histories[source]) for source, _ in plan.row_copies]
        for (_, target), history in zip(plan.row_copies, histories, strict=True):
            self.histories[target] = history
        tables = [dict(self.tables[source]) for source, _ in plan.row_copies]
        for (_, target), table in zip(plan.row_copies, tables, strict=True):
            self.tables[target] = table
        for _, row, index, page in plan.new_pages:
            self.tables[row][index] = page

    def _draw(self, plan: StepPlan) -> StepResult:
        num_seqs = plan.num_seqs
        token_ids = np.zeros(num_seqs, np.int32)
        best = np.zeros((num_seqs, MAX_CANDIDATES), np.int32)
        logprobs = np.zeros((num_seqs, MAX_CANDIDATES), np.float32)
        masks = dict(plan.masks)
        for place, (row, start, count) in enumerate(zip(plan.row_ids, plan.starts, plan.counts, strict=True)):
            if plan.samples[place]:
                history = self._history(row, start + count)
                if self.reads_history[row]:
                    seen = [self.histories[row].get(position) for position in range(len(history))]
                    assert seen == history, "penalties would see other tokens than the sequence has"
                drawn = next_token(history, self.sample_index[row])
                drawn = next_allowed(drawn, masks[place]) if place in masks else drawn
                self.drawn[row] = token_ids[place] = drawn
                if plan.wants_logprobs:
                    best[place], logprobs[place] = candidates(history)
        unused = np.zeros(num_seqs)
        found = Logprobs(unused.astype(np.float32), unused.astype(np.int32), best, logprobs)
        return StepResult(token_ids, found, self._score(plan))

    def _score(self, plan: StepPlan) -> Logprobs:
        """Logprobs that name what they are of: the token and all before it."""
        logprobs: list[int] = []
        for token in plan.scored:
            start, place = plan.starts[token.place], token.place
            assert token.index == sum(plan.counts[:place]) + token.position - 1 - start
            assert start < token.position <= start + plan.counts[place], "a token is scored without the one before it"
            history = self._history(plan.row_ids[place], token.position)
            logprobs.append(score([*history, token.token_id]))
        none = np.zeros((len(logprobs), MAX_CANDIDATES), np.int32)
        return Logprobs(np.array(logprobs, np.float32), np.ones(len(logprobs), np.int32), none, none.astype(np.float32))

    def _history(self, row: int, length: int) -> list[int]:
        history = [
            self.pages[self.tables[row][position // self.page_size_tokens]][position % self.page_size_tokens]
            for position in range(length)
        ]
        assert None not in history, "a token was never written, or its page went to someone else"
        return history  # type: ignore[return-value]

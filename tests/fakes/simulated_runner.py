"""A device made of lists: executes plans as they are, on pages and rows that hold token ids instead of KV.

What a sequence draws next is a function of all its tokens, read back through its page table, so a token in a wrong
page, a page given to two sequences, or a stale row changes the outputs.
"""

import numpy as np

from jpaged.step_plan import ON_DEVICE, StepPlan, StepResult

VOCABULARY = 997


def next_token(tokens: list[int]) -> int:
    """The token that follows, by a hash of the whole history."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCABULARY


def generate(prompt: list[int], num_tokens: int, eos: frozenset[int] = frozenset()) -> list[int]:
    """What a sequence must generate, whatever runs beside it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


class SimulatedRunner:
    def __init__(self, num_pages: int, page_size_tokens: int, num_rows: int) -> None:
        self.page_size_tokens = page_size_tokens
        self.pages: list[list[int | None]] = [[None] * page_size_tokens for _ in range(num_pages)]
        self.tables: list[dict[int, int]] = [{} for _ in range(num_rows)]
        self.drawn: list[int | None] = [None] * num_rows

    def run(self, plan: StepPlan) -> StepResult:
        assert plan.counts[: plan.num_decode] == [1] * plan.num_decode, "decode rows come first"
        assert len(plan.token_ids) == sum(plan.counts)
        for row, _ in plan.rows_taken:
            self.tables[row] = {}
            self.drawn[row] = None
        for _, row, index, page in plan.new_pages:
            self.tables[row][index] = page
            self.pages[page] = [None] * self.page_size_tokens
        result, first = [], 0
        for row, start, count, samples in zip(plan.row_ids, plan.starts, plan.counts, plan.samples, strict=True):
            for offset, token in enumerate(plan.token_ids[first : first + count]):
                page, slot = divmod(start + offset, self.page_size_tokens)
                value = self.drawn[row] if token == ON_DEVICE else token
                self.pages[self.tables[row][page]][slot] = value
            first += count
            result.append(self._draw(row, start + count) if samples else 0)
        return StepResult(np.array(result, np.int32))

    def _draw(self, row: int, length: int) -> int:
        history = [
            self.pages[self.tables[row][position // self.page_size_tokens]][position % self.page_size_tokens]
            for position in range(length)
        ]
        assert None not in history, "a token was never written, or its page went to someone else"
        self.drawn[row] = next_token(history)  # type: ignore[arg-type]
        return self.drawn[row]  # type: ignore[return-value]

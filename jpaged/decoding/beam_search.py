"""How beams go on: at every step the best continuations of all beams are kept, and complete ones are collected.

The rules are those of transformers' `generate` (its vectorised beam search): 2 x width candidates a step, complete
hypotheses scored as sum(logprobs) / length ** length_penalty, and three ways to stop (`early_stopping`).
"""

from dataclasses import dataclass, field
from typing import Literal

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One continuation: beam `parent` goes on with `token_id`; `score` is the sum of logprobs with it."""

    parent: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete sequence. `score` is its sum of logprobs over its length to the power of the length penalty."""

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    stop_token_id: int | None  # None: it ended by length


@dataclass(slots=True)
class BeamSearch:
    """The state of one search. `advance` takes what the device found and says how each beam goes on.

    Attributes:
        width: beams kept.
        max_new_tokens: output tokens at most.
        eos_token_ids: what completes a hypothesis; empty to ignore.
        length_penalty: exponent of the length; above 0 favours longer output.
        early_stopping: True stops when `width` hypotheses are complete; False when no running beam looks better at its
            present length; "never" when none could become better at any length.
        scores: sums of logprobs of the running beams.
        finished: the best complete hypotheses, at most `width`, best first.
    """

    width: int
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    scores: list[float] = field(default_factory=lambda: [0.0])
    finished: list[Hypothesis] = field(default_factory=list[Hypothesis])
    num_new_tokens: int = 0
    is_done: bool = False

    @property
    def num_candidates(self) -> int:
        """Candidates looked at in each step: enough that `width` remain when each beam's end tokens are among them."""
        return max(2, 1 + len(self.eos_token_ids)) * self.width

    def advance(self, outputs: list[list[int]], candidates: list[tuple[list[int], list[float]]]) -> list[Candidate]:
        """Take one step.

        Args:
            outputs: each running beam's output tokens so far.
            candidates: for each running beam the best next tokens and their logprobs, best first.

        Returns:
            the beams that go on, best first; empty when the search is done, and then `finished` has the result.
        """
        ranked = self._rank(candidates)
        self.num_new_tokens += 1
        at_limit = self.num_new_tokens >= self.max_new_tokens
        is_complete = [at_limit or candidate.token_id in self.eos_token_ids for candidate in ranked]
        # Only the best `width` may complete; the rest are there so that enough beams go on.
        for candidate, complete in list(zip(ranked, is_complete, strict=True))[: self.width]:
            if complete:
                self._collect(outputs[candidate.parent], candidate)
        self.finished = sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[: self.width]
        running = [c for c, complete in zip(ranked, is_complete, strict=True) if not complete][: self.width]
        self.scores = [candidate.score for candidate in running]
        self.is_done = not running or not self._can_improve()
        return [] if self.is_done else running

    def _rank(self, candidates: list[tuple[list[int], list[float]]]) -> list[Candidate]:
        everything = [
            Candidate(parent, token_id, self.scores[parent] + logprob)
            for parent, (token_ids, logprobs) in enumerate(candidates)
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        ]
        everything.sort(key=lambda candidate: -candidate.score)
        return everything[: self.num_candidates]

    def _collect(self, output: list[int], candidate: Candidate) -> None:
        token_ids = [*output, candidate.token_id]
        stop = candidate.token_id if candidate.token_id in self.eos_token_ids else None
        score = candidate.score / len(token_ids) ** self.length_penalty
        self.finished.append(Hypothesis(token_ids, score, candidate.score, stop))

    def _can_improve(self) -> bool:
        """Whether a running beam could still beat the worst of `width` complete hypotheses."""
        if len(self.finished) < self.width:
            return True
        if self.early_stopping is True:
            return False
        length = self.num_new_tokens
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_new_tokens
        return self.scores[0] / length**self.length_penalty > self.finished[-1].score

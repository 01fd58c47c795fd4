"""What crosses between the decisions (host) and the device: a plan goes over, a result comes back.

A plan is a plain value. It can be logged, replayed, simulated without a device, and sent to other hosts.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

# In StepPlan.token_ids: the token is known on the device only, because the step that draws it is still in flight.
ON_DEVICE = -1
# The most candidates that a step reports for a row: two for each of ten beams.
MAX_CANDIDATES = 20


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling parameters that a row keeps on the device, as SamplingParams defines them.

    `seed` and `sample_index` name the noise stream; `top_k` is 0 for all.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    sample_index: int


@dataclass(slots=True)
class StepPlan:
    """One step. The per-sequence columns have one entry for each sequence of the batch, decode rows (one token) first.

    Attributes:
        step: counts up from 0.
        sequence_ids: who computes.
        row_ids: each one's row on the device.
        starts: position of the first token that is computed.
        counts: how many tokens are computed, at least 1.
        samples: whether a token is drawn after the last one.
        num_decode: how many leading entries are decode rows.
        token_ids: the computed tokens, flat (sum of `counts`); ON_DEVICE where the host does not know the token yet.
        wants_candidates: whether a sequence of the step is a beam, which goes on with one of several best tokens.
        rows_taken: rows that a sequence enters in this step, with what the device must know of it.
        row_copies: (source row, target row): the target takes over history and page table; all sources are read first.
        new_pages: (KV group, row, index in the page table, page id): changes of page tables, after the row copies.
        swap_outs: (device page, host page), copied before anything else.
        swap_ins: (host page, device page), copied after the swap-outs.
        page_copies: (source page, target page), copied after the swap-ins; all sources are read first.
    """

    step: int
    sequence_ids: list[int] = field(default_factory=list[int])
    row_ids: list[int] = field(default_factory=list[int])
    starts: list[int] = field(default_factory=list[int])
    counts: list[int] = field(default_factory=list[int])
    samples: list[bool] = field(default_factory=list[bool])
    num_decode: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    wants_candidates: bool = False
    rows_taken: list[tuple[int, RowSampling]] = field(default_factory=list[tuple[int, RowSampling]])
    row_copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    new_pages: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])

    swap_outs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    swap_ins: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    page_copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def has_moves(self) -> bool:
        return bool(self.swap_outs or self.swap_ins or self.page_copies)

    @property
    def num_seqs(self) -> int:
        return len(self.sequence_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew, in the plan's order; meaningless where `samples` is false.

    Attributes:
        token_ids: int32 [num_seqs].
        candidate_ids, candidate_logprobs: int32 and float32 [num_seqs, MAX_CANDIDATES], the best tokens and their
            logprobs, best first; only if the plan wants candidates.
    """

    token_ids: NDArray[np.int32]
    candidate_ids: NDArray[np.int32] | None = None
    candidate_logprobs: NDArray[np.float32] | None = None

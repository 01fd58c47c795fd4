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
class RowConstraints:
    """What a row may draw, beyond numbers; few requests have any of it.

    Attributes:
        allowed_bits: uint32 [ceil(vocabulary / 32)], bit i % 32 of word i // 32 for token i; `None` allows all.
        logit_bias: (token id, what is added to its logit).
        bad_words: token sequences of at least two tokens, whose last token is not drawn behind the others.
        late_token_ids: tokens that are not drawn before the row's `min_length`.
    """

    allowed_bits: NDArray[np.uint32] | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    late_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling parameters that a row keeps on the device, as SamplingParams defines them.

    Attributes:
        temperature, top_p, min_p: as there.
        top_k: 0 for all.
        seed, sample_index: name the noise stream.
        presence_penalty, frequency_penalty, repetition_penalty: as there.
        prompt_length: tokens of the history that were not generated.
        min_length: tokens of prompt and output before a late token may be drawn.
        is_beam: its candidates' logprobs are those of the logits divided by the temperature.
        constraints: `None` for none.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt_length: int = 0
    min_length: int = 0
    is_beam: bool = False
    constraints: RowConstraints | None = None

    @property
    def reads_history(self) -> bool:
        """Whether what is drawn depends on the row's earlier tokens other than through the model."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        has_bad_words = self.constraints is not None and bool(self.constraints.bad_words)
        return penalties != (0.0, 0.0, 1.0) or has_bad_words


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token whose logprob is wanted, and with it the distribution that it is from.

    Attributes:
        place: the sequence's place in the plan.
        index: which of the step's tokens comes before it, an index into the plan's `token_ids`.
        group_id, position: whose token, and where in the sequence.
        token_id: the token, of a prompt; ON_DEVICE for the one that the step draws.
    """

    place: int
    index: int
    group_id: int
    position: int
    token_id: int


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
        wants_logprobs: whether a sequence of the step needs logprobs and its best tokens: beams, and who asked for it.
        masks: (place, allowed bits as in RowConstraints) for sequences that follow a grammar and draw in this step.
        scored: tokens of prompts whose logprobs are wanted.
        wide: tokens for which the logprobs of the whole vocabulary are wanted, of prompts or drawn in this step.
        rows_taken: rows that a sequence enters in this step, with what the device must know of it.
        histories: (row, token ids from position 0 on) that rows taken in this step need and the device never computed:
            of cached prefixes and swapped-in sequences. They come before the row copies.
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
    wants_logprobs: bool = False
    masks: list[tuple[int, NDArray[np.uint32]]] = field(default_factory=list[tuple[int, NDArray[np.uint32]]])
    scored: list[ScoredToken] = field(default_factory=list[ScoredToken])
    wide: list[ScoredToken] = field(default_factory=list[ScoredToken])
    rows_taken: list[tuple[int, RowSampling]] = field(default_factory=list[tuple[int, RowSampling]])
    histories: list[tuple[int, list[int]]] = field(default_factory=list[tuple[int, list[int]]])
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
class Logprobs:
    """Logprobs of n tokens, and of the best tokens where each could have stood.

    Attributes:
        logprobs: float32 [n], the token's own.
        ranks: int32 [n], how many tokens are at least as likely.
        candidate_ids, candidate_logprobs: int32 and float32 [n, MAX_CANDIDATES], the best tokens, best first.
    """

    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    candidate_ids: NDArray[np.int32]
    candidate_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew, in the plan's order; meaningless where `samples` is false.

    Attributes:
        token_ids: int32 [num_seqs].
        logprobs: of the drawn tokens, only if the plan wants logprobs.
        scored: of the plan's `scored` tokens, in that order.
        wide: float32 [len(plan.wide), vocabulary], the logprobs of all tokens at each of the plan's `wide`.
    """

    token_ids: NDArray[np.int32]
    logprobs: Logprobs | None = None
    scored: Logprobs | None = None
    wide: NDArray[np.float32] | None = None

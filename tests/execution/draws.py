"""Batches that draw tokens, built from plain parameters, and what they must do by plain numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jpaged.execution.batch import DrawBatch, DrawLayout, RowParameters, pack_parameters, unpack_parameters
from jpaged.execution.constraints import Constraints, ConstraintsLayout, make_constraints, num_words
from jpaged.execution.native_draw import draw_natively
from jpaged.execution.rows import Rows, make_rows
from jpaged.step_plan import RowConstraints, RowSampling, StepPlan
from pallas_kernels.native.build import BuildError, InstructionSet, find_compiler
from pallas_kernels.sampling.cpu import CpuSampling

NEVER = -np.inf


def parameters_of(samplings: list[RowSampling]) -> RowParameters:
    """Entries [S]."""
    return unpack_parameters(jnp.asarray(np.array([pack_parameters(sampling) for sampling in samplings]).T))


def same_parameters(count: int, **settings: Any) -> RowParameters:
    """Entries [count], all as RowSampling(**settings)."""
    return jax.tree.map(lambda value: jnp.broadcast_to(value[0], count), parameters_of([RowSampling(**settings)]))


def bits_of(token_ids: list[int], vocabulary: int) -> np.ndarray:
    """Allowed bits, uint32 [W]."""
    bits = np.zeros(num_words(vocabulary), np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    return bits


def allowed_by(bits: np.ndarray, vocabulary: int) -> np.ndarray:
    return np.array([bool(bits[token_id // 32] >> (token_id % 32) & 1) for token_id in range(vocabulary)])


def drawing_state(
    samplings: list[RowSampling], histories: list[list[int]], vocabulary: int, max_model_len: int
) -> tuple[Rows, Constraints]:
    """Rows that hold histories, parameters and constraints; row i is that of entry i."""
    rows = make_rows(len(samplings), max_model_len, 1, 0)
    tokens = np.full(rows.tokens.shape, 1, np.int32)  # what stands behind a history does not count
    for row, history in enumerate(histories):
        tokens[row, : len(history)] = history
    constraints, layout = make_constraints(len(samplings), vocabulary), ConstraintsLayout(vocabulary)
    enter = jax.jit(layout.enter)
    for row, sampling in enumerate(samplings):
        # What a row left behind must not count for the next one, whose flags do not name it.
        left = RowConstraints(np.zeros(num_words(vocabulary), np.uint32), ((0, 9.0),), ((1, 2),), (3, 4))
        constraints = enter(constraints, layout.pack(row, sampling.constraints or left))
    plain = parameters_of([*samplings, RowSampling()])
    return rows._replace(tokens=jnp.asarray(tokens), parameters=plain), constraints


def draw_batch(
    histories: list[list[int]],
    *,
    masks: dict[int, np.ndarray] | None = None,
    samples: list[bool] | None = None,
    wants_logprobs: bool = False,
    num_rows: int | None = None,
) -> DrawBatch:
    """Row i at place i, its next token after its whole history."""
    num_rows = num_rows or len(histories)
    plan = StepPlan(
        step=0,
        sequence_ids=list(range(len(histories))),
        row_ids=list(range(len(histories))),
        starts=[len(history) - 1 for history in histories],
        counts=[1] * len(histories),
        samples=samples or [True] * len(histories),
        wants_logprobs=wants_logprobs,
        masks=list((masks or {}).items()),
    )
    layout = DrawLayout(num_rows, len(histories))
    return layout.unpack(jnp.asarray(layout.pack(plan)))


def packed_masks(masks: dict[int, np.ndarray], num_rows: int, vocabulary: int) -> np.ndarray:
    """uint32 [S, W]; rows without a mask hold zeros, which must not count."""
    packed = np.zeros((num_rows, num_words(vocabulary)), np.uint32)
    for place, bits in masks.items():
        packed[place] = bits
    return packed


def processed_by_numpy(
    logits: np.ndarray, sampling: RowSampling, history: list[int], mask: np.ndarray | None = None
) -> np.ndarray:
    """One row's logits as they are drawn by, float32 [V], in the documented order."""
    logits, constraints = logits.copy(), sampling.constraints or RowConstraints()
    for bits in (constraints.allowed_bits, mask):
        if bits is not None:
            logits[~allowed_by(bits, len(logits))] = NEVER
    for word in constraints.bad_words:
        if history[max(len(history) - len(word) + 1, 0) :] == list(word[:-1]):
            logits[word[-1]] = NEVER
    if len(history) < sampling.min_length:
        logits[list(constraints.late_token_ids)] = NEVER
    for token_id, bias in constraints.logit_bias:
        logits[token_id] += np.float32(bias)
    generated = np.bincount(history[sampling.prompt_length :], minlength=len(logits))
    seen = np.zeros(len(logits), bool)
    seen[history] = True
    penalty = np.float32(sampling.repetition_penalty)
    logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits - np.float32(sampling.frequency_penalty) * generated.astype(np.float32)
    return logits - np.float32(sampling.presence_penalty) * (generated > 0).astype(np.float32)


def native_sampling(instruction_set: InstructionSet | None = None) -> CpuSampling:
    """Skips the test where there is no compiler."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    return CpuSampling.make(instruction_set)


def sample_natively(native: CpuSampling, logits: Array, parameters: RowParameters, positions: Array) -> Array:
    """What `sample` returns, drawn by `native`: the logits are taken as they are, whatever the rows wish of them."""
    none = unpack_parameters(jnp.asarray(pack_parameters(RowSampling())))
    wishes = ("presence_penalty", "frequency_penalty", "repetition_penalty", "flags")
    parameters = parameters._replace(**{name: jnp.broadcast_to(getattr(none, name), len(logits)) for name in wishes})
    places = jnp.zeros(len(logits), jnp.int32)
    rows, constraints = make_rows(1, 1, 1, 0), make_constraints(0, logits.shape[1])
    batch = DrawBatch(places, places, positions, places == 0, places != 0, jnp.bool(False))
    masks = jnp.zeros((len(logits), num_words(logits.shape[1])), jnp.uint32)
    return draw_natively(native, logits, rows, constraints, parameters, batch, masks)


def exact_probabilities(logits: np.ndarray, sampling: RowSampling) -> np.ndarray:
    """Of one row's processed logits [V], by sorting, in float64: temperature, min_p, top_k, top_p."""
    scaled = logits.astype(np.float64) / sampling.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    keep = probabilities >= sampling.min_p * probabilities.max()
    if sampling.top_k > 0:
        keep[order[sampling.top_k :]] = False
    kept = np.where(keep, probabilities, 0)
    kept /= kept.sum()
    before = np.concatenate([[0.0], np.cumsum(kept[order])[:-1]])
    keep[order[before >= sampling.top_p]] = False
    kept = np.where(keep, probabilities, 0)
    return kept / kept.sum()

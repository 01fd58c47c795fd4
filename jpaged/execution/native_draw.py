"""The sampler and the processors in C++, where a step runs on one CPU: what XLA's forms do, a row at a time.

XLA goes over all logits again for each wish of a row; here few tokens are looked at more than once. Letters: S rows,
V vocabulary entries, W = ceil(V / 32) words of allowed bits.
"""

import jax.numpy as jnp
from jax import Array, lax

from jpaged.execution.batch import DrawBatch, RowFlag, RowParameters
from jpaged.execution.constraints import NO_TOKEN, Constraints
from jpaged.execution.noise import draw_keys
from jpaged.execution.processors import (
    BLOCKED_TOKENS,
    blocked_tokens,
    blocks_tokens,
    has_penalties,
    is_masked,
    keep_allowed,
)
from jpaged.execution.rows import Rows
from pallas_kernels.sampling.cpu import CpuSampling, DrawFields


def draw_natively(
    native: CpuSampling,
    logits: Array,
    rows: Rows,
    constraints: Constraints,
    parameters: RowParameters,
    batch: DrawBatch,
    masks: Array,
) -> Array:
    """`sample` of what `process` makes of the logits: token ids, int32 [S].

    Args:
        logits: float32 [S, V].
        parameters: entries [S], of rows that draw nothing without flags and penalties.
        masks: uint32 [S, W], meaningful where the batch says so.
    """
    fields = _fields(parameters, batch)
    blocked = lax.cond(
        jnp.any(blocks_tokens(parameters, batch)),
        lambda: blocked_tokens(rows, constraints, parameters, batch),
        lambda: jnp.full((len(logits), BLOCKED_TOKENS), NO_TOKEN),
    )

    def draw(logits: Array) -> Array:
        return native.draw(logits, fields, rows.tokens, blocked, constraints.bias_ids, constraints.bias_values)

    # Each branch draws for itself: what comes out of a branch is copied, and tokens are less than logits.
    return lax.cond(
        jnp.any(is_masked(parameters, batch)),
        lambda: draw(keep_allowed(logits, constraints, parameters, batch, masks)),
        lambda: draw(logits),
    )


def _fields(parameters: RowParameters, batch: DrawBatch) -> DrawFields:
    first_key, second_key = draw_keys(parameters.seed_low, parameters.seed_high, parameters.sample_index, batch.kv_lens)
    return DrawFields(
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        log_min_p=jnp.log(parameters.min_p),
        presence=parameters.presence_penalty,
        frequency=parameters.frequency_penalty,
        repetition=parameters.repetition_penalty,
        top_k=parameters.top_k,
        first_key=first_key,
        second_key=second_key,
        row_id=batch.row_ids,
        prompt_length=parameters.prompt_length,
        history_length=jnp.where(has_penalties(parameters), batch.kv_lens, 0),
        has_bias=parameters.has(RowFlag.BIAS),
    )

"""The function that draws a step's tokens from its hidden states; jitted once per number of rows, not once per bucket.

Buckets with as many rows share it: of what is compiled for a bucket, what sampling can do would be a third.
Letters: S rows; V vocabulary entries; W = ceil(V / 32) words of bits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jpaged.execution.batch import DrawBatch, DrawLayout, RowFlag, RowParameters, pack_parameters, unpack_parameters
from jpaged.execution.candidates import argmax
from jpaged.execution.constraints import Constraints
from jpaged.execution.logprobs import LOGPROB_WORDS, describe_tokens
from jpaged.execution.native_draw import draw_natively
from jpaged.execution.processors import asks_for_processing, process
from jpaged.execution.rows import Rows, append_tokens
from jpaged.execution.sampler import sample
from jpaged.execution.step import StepParts, head_logits
from jpaged.step_plan import RowSampling
from pallas_kernels.sampling.cpu import CpuSampling

DRAWN_WORDS = 1 + LOGPROB_WORDS

DrawFunction = Callable[[Any, Rows, Array, Constraints, Array, Array], tuple[Rows, Array]]


def make_draw(parts: StepParts, layout: DrawLayout) -> DrawFunction:
    """Return draw(weights, rows, hidden, constraints, words, masks) -> (rows, drawn) for `layout.num_rows` rows.

    `words` is what the plan says of drawing, int32 [layout.num_words]; `masks` is uint32 [S, W], bits of the tokens
    that a grammar allows; `drawn` is int32 [S, DRAWN_WORDS], for each row its token and, if wanted, what
    `describe_tokens` says of it. Rows are meant to be donated.
    """

    def jpaged_draw(
        weights: Any, rows: Rows, hidden: Array, constraints: Constraints, words: Array, masks: Array
    ) -> tuple[Rows, Array]:
        batch = layout.unpack(words)
        drawn = lax.cond(
            jnp.any(batch.samples),
            lambda: draw_tokens(
                # Every device draws for itself: what follows looks at parts of the vocabulary, each row at others.
                head_logits(parts, weights, hidden[batch.indices]),
                rows,
                constraints,
                batch,
                masks,
                parts.sampling,
            ),
            lambda: jnp.zeros((layout.num_rows, DRAWN_WORDS), jnp.int32),
        )
        return append_tokens(rows, batch, drawn[:, 0]), drawn

    jpaged_draw.__name__ = f"jpaged_draw_{layout.num_rows}"
    return jpaged_draw


def draw_tokens(
    logits: Array,
    rows: Rows,
    constraints: Constraints,
    batch: DrawBatch,
    masks: Array,
    native: CpuSampling | None = None,
) -> Array:
    """Draw from the model's logits, float32 [S, V]; return int32 [S, DRAWN_WORDS]. XLA does it, or `native`."""
    with jax.named_scope("sampler"):
        return _draw_tokens(logits, rows, constraints, batch, masks, native)


def _draw_tokens(
    logits: Array, rows: Rows, constraints: Constraints, batch: DrawBatch, masks: Array, native: CpuSampling | None
) -> Array:
    parameters = _of_drawing_rows(rows.parameters, batch)
    draw = _draw_by_xla if native is None else partial(draw_natively, native)
    tokens = draw(logits, rows, constraints, parameters, batch, masks)

    def logprobs() -> Array:
        # A search over beams looks at the distribution that its temperature gives; all others at the model's own.
        divides = parameters.has(RowFlag.BEAM) & (parameters.temperature > 0)
        return describe_tokens(logits, tokens, jnp.where(divides, parameters.temperature, 1.0), native)

    nothing = jnp.zeros((len(logits), LOGPROB_WORDS), jnp.int32)
    return jnp.concatenate([tokens[:, None], lax.cond(batch.wants_logprobs, logprobs, lambda: nothing)], axis=1)


def _draw_by_xla(
    logits: Array, rows: Rows, constraints: Constraints, parameters: RowParameters, batch: DrawBatch, masks: Array
) -> Array:
    processes = asks_for_processing(parameters, batch)

    def with_all() -> Array:
        change = lambda logits: process(logits, rows, constraints, parameters, batch, masks)  # noqa: E731
        return sample(lax.cond(processes, change, lambda logits: logits, logits), parameters, batch.kv_lens)

    # A batch that is plainly greedy does not even copy its logits.
    return lax.cond(processes | jnp.any(parameters.temperature > 0), with_all, lambda: argmax(logits))


def _of_drawing_rows(parameters: RowParameters, batch: DrawBatch) -> RowParameters:
    """Each place's parameters, entries [S]; places that draw nothing ask for nothing."""
    plain = unpack_parameters(jnp.asarray(pack_parameters(RowSampling())))
    return jax.tree.map(lambda values, word: jnp.where(batch.samples, values[batch.row_ids], word), parameters, plain)

"""The function that runs one step; jitted once per bucket.

Letters: T tokens and S rows of the bucket; E hidden features; V vocabulary entries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.execution.batch import BatchLayout, RowFlag, RowParameters, StepBatch, pack_parameters, unpack_parameters
from jpaged.execution.candidates import argmax
from jpaged.execution.constraints import Constraints
from jpaged.execution.logprobs import LOGPROB_WORDS, describe_tokens
from jpaged.execution.processors import asks_for_processing, process
from jpaged.execution.rows import Rows, append_tokens, apply_changes, read_tokens
from jpaged.execution.sampler import sample
from jpaged.parallel.mesh import TENSOR_AXIS
from jpaged.step_plan import RowSampling
from pallas_kernels.paged_attention.api import AttentionBatch, PagedAttention, PageSpec

RESULT_WORDS = 1 + LOGPROB_WORDS

# (pages, rows, hidden), and with them the result
StepFunction = Callable[[Any, Any, Rows, Array, Constraints, Array, Array], tuple[Any, Rows, Array, Array]]


@dataclass(frozen=True)
class StepParts:
    """What every bucket's step has in common."""

    graph: nnx.GraphDef
    attention: PagedAttention
    page_spec: PageSpec
    mesh: Mesh


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def make_step(parts: StepParts, layout: BatchLayout) -> StepFunction:
    """One bucket's step(weights, pages, rows, hidden, constraints, words, masks) -> (pages, rows, hidden, drawn).

    `words` is the packed plan, int32 [layout.num_words]; `masks` is uint32 [S, W], bits of the tokens that a grammar
    allows; `drawn` is int32 [S, RESULT_WORDS], for each row its token and what `describe_tokens` says of it. `hidden`
    keeps the step's hidden states for the functions that look at them again, float32 [most tokens of a step, E].
    Pages, rows and hidden states are meant to be donated.
    """
    num_tokens = layout.bucket.num_tokens

    def step(
        weights: Any, pages: Any, rows: Rows, hidden: Array, constraints: Constraints, words: Array, masks: Array
    ) -> tuple[Any, Rows, Array, Array]:
        batch = layout.unpack(words)
        rows = apply_changes(rows, batch.changes)
        token_rows, positions = _locate_tokens(batch, num_tokens, layout.scratch_row)
        rows, token_ids = read_tokens(rows, batch, token_rows, positions)
        attention_batch = AttentionBatch(
            cu_q_lens=batch.cu_q_lens,
            kv_lens=batch.kv_lens,
            page_table=rows.page_tables[0, batch.row_ids],
            num_decode=batch.num_decode,
            num_seqs=batch.num_seqs,
        )
        work = parts.attention.make_work(attention_batch, num_tokens, parts.page_spec)
        model = nnx.merge(parts.graph, weights)
        computed, pages = model(token_ids, positions, pages, partial(_attend, parts, work))
        drawn = lax.cond(
            jnp.any(batch.samples),
            lambda: _draw(parts, model, computed, rows, constraints, batch, masks),
            lambda: jnp.zeros((layout.bucket.num_rows, RESULT_WORDS), jnp.int32),
        )
        hidden = lax.dynamic_update_slice(hidden, computed, (0, 0))
        return pages, append_tokens(rows, batch, drawn[:, 0]), hidden, drawn

    return step


def _locate_tokens(batch: StepBatch, num_tokens: int, scratch_row: int) -> tuple[Array, Array]:
    """Return each token's row and position, int32 [T]; padding tokens get the scratch row's position 0."""
    indices = jnp.arange(num_tokens, dtype=jnp.int32)
    ends = batch.cu_q_lens[1:]
    place = jnp.searchsorted(ends, indices, side="right").astype(jnp.int32)
    place = jnp.minimum(place, ends.shape[0] - 1)
    first_positions = batch.kv_lens - (ends - batch.cu_q_lens[:-1])
    positions = first_positions[place] + indices - batch.cu_q_lens[place]
    is_real = indices < ends[-1]
    return jnp.where(is_real, batch.row_ids[place], scratch_row), jnp.where(is_real, positions, 0)


def _draw(
    parts: StepParts, model: Any, hidden: Array, rows: Rows, constraints: Constraints, batch: StepBatch, masks: Array
) -> Array:
    last = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
    # Every device draws for itself: what follows looks at parts of the vocabulary, each row at others.
    logits = lax.with_sharding_constraint(model.logits(hidden[last]), replicated(parts.mesh))
    parameters = _of_drawing_rows(rows.parameters, batch)
    processes = asks_for_processing(parameters, batch)

    def with_all() -> Array:
        change = lambda logits: process(logits, rows, constraints, parameters, batch, masks)  # noqa: E731
        return sample(lax.cond(processes, change, lambda logits: logits, logits), parameters, batch.kv_lens)

    # A batch that is plainly greedy does not even copy its logits.
    tokens = lax.cond(processes | jnp.any(parameters.temperature > 0), with_all, lambda: argmax(logits))

    def logprobs() -> Array:
        divides = parameters.has(RowFlag.BEAM) & (parameters.temperature > 0)
        return describe_tokens(logits, tokens, jnp.where(divides, parameters.temperature, 1.0))

    nothing = jnp.zeros((len(logits), LOGPROB_WORDS), jnp.int32)
    return jnp.concatenate([tokens[:, None], lax.cond(batch.wants_logprobs, logprobs, lambda: nothing)], axis=1)


def _of_drawing_rows(parameters: RowParameters, batch: StepBatch) -> RowParameters:
    """Each place's parameters, entries [S]; places that draw nothing ask for nothing."""
    kept = jax.tree.map(lambda values: values[batch.row_ids], parameters)
    plain = jax.tree.map(lambda word: word[None], unpack_parameters(jnp.asarray(pack_parameters(RowSampling()))))
    return jax.tree.map(lambda values, word: jnp.where(batch.samples, values, word), kept, plain)


def _attend(
    parts: StepParts,
    work: Any,
    q: Array,
    k: Array,
    v: Array,
    pages: Any,
    *,
    layer: Array,
    sinks: Array | None,
    **static: Any,
):
    """Run the kernel on each device's own KV heads."""
    heads = PartitionSpec(None, TENSOR_AXIS, None)
    page_specs = parts.attention.page_sharding(parts.page_spec, TENSOR_AXIS)

    def on_device(q: Array, k: Array, v: Array, pages: Any, work: Any, layer: Array, sinks: Array | None):
        return parts.attention.attend(q, k, v, pages, work, layer=layer, sinks=sinks, **static)

    return jax.shard_map(
        on_device,
        mesh=parts.mesh,
        in_specs=(heads, heads, heads, page_specs, PartitionSpec(), PartitionSpec(), PartitionSpec(TENSOR_AXIS)),
        out_specs=(heads, page_specs),
        check_vma=False,
    )(q, k, v, pages, work, layer, sinks)

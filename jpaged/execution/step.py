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

from jpaged.execution.batch import BatchLayout, StepBatch
from jpaged.execution.rows import Rows, apply_changes, read_tokens
from jpaged.parallel.mesh import TENSOR_AXIS
from pallas_kernels.paged_attention.api import AttentionBatch, PagedAttention, PageSpec
from pallas_kernels.sampling.cpu import CpuSampling

StepFunction = Callable[[Any, Any, Rows, Array, Array], tuple[Any, Rows, Array]]


@dataclass(frozen=True)
class StepParts:
    """What every bucket's step has in common. `sampling` draws the tokens; XLA does without it."""

    graph: nnx.GraphDef
    attention: PagedAttention
    page_spec: PageSpec
    mesh: Mesh
    sampling: CpuSampling | None = None


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def head_logits(parts: StepParts, weights: Any, hidden: Array) -> Array:
    """Logits of some hidden states, float32 [N, E] -> [N, V], whole on every device.

    Each device computes those of its part of the vocabulary; without the first constraint XLA would rather gather the
    head's weight.
    """
    with jax.named_scope("logits"):
        logits = nnx.merge(parts.graph, weights).logits(hidden)
    if logits.shape[1] % parts.mesh.shape[TENSOR_AXIS] == 0:
        parted = NamedSharding(parts.mesh, PartitionSpec(None, TENSOR_AXIS))
        logits = lax.with_sharding_constraint(logits, parted)
    return lax.with_sharding_constraint(logits, replicated(parts.mesh))


def make_step(parts: StepParts, layout: BatchLayout) -> StepFunction:
    """Return step(weights, pages, rows, hidden, words) -> (pages, rows, hidden) for one bucket.

    `words` is the packed plan, int32 [layout.num_words]. `hidden` keeps the step's hidden states for the functions that
    make something of them: of drawing tokens, and of scoring. It is float32 [most tokens of a step, E]. Pages, rows and
    hidden states are meant to be donated.
    """
    num_tokens = layout.bucket.num_tokens

    def jpaged_step(weights: Any, pages: Any, rows: Rows, hidden: Array, words: Array) -> tuple[Any, Rows, Array]:
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
        with jax.named_scope("layers"):
            computed, pages = model(token_ids, positions, pages, partial(_attend, parts, work))
        return pages, rows, lax.dynamic_update_slice(hidden, computed, (0, 0))

    # Profiles tell programs apart by their names.
    jpaged_step.__name__ = f"jpaged_step_{layout.bucket.num_tokens}_{layout.bucket.num_rows}"
    return jpaged_step


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
    """Run the kernel on each device's own KV heads. The scope's name is how a profile knows it."""
    heads = PartitionSpec(None, TENSOR_AXIS, None)
    page_specs = parts.attention.page_sharding(parts.page_spec, TENSOR_AXIS)

    def on_device(q: Array, k: Array, v: Array, pages: Any, work: Any, layer: Array, sinks: Array | None):
        with jax.named_scope("paged_attention"):
            return parts.attention.attend(q, k, v, pages, work, layer=layer, sinks=sinks, **static)

    return jax.shard_map(
        on_device,
        mesh=parts.mesh,
        in_specs=(heads, heads, heads, page_specs, PartitionSpec(), PartitionSpec(), PartitionSpec(TENSOR_AXIS)),
        out_specs=(heads, page_specs),
        check_vma=False,
    )(q, k, v, pages, work, layer, sinks)

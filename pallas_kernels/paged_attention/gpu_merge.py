"""Merges the partial results of split-KV decode, as in Flash-Decoding: one CTA for each tile and KV head.

Letters: H KV heads, D head_dim, N columns of a tile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_blocks import FLOOR
from pallas_kernels.paged_attention.gpu_decode import BY_COLUMN, DecodePlan
from pallas_kernels.paged_attention.gpu_parts import LAYOUT

STAGES = 4  # partial results in flight


class _References(NamedTuple):
    """References into device memory, then shared memory and barriers of one CTA."""

    o: Any  # float32 [pieces, D, N]
    lse: Any  # float32 [pieces, N]
    tiles: Any  # of DecodePlan
    per_cta: Any  # int32 [1]
    sinks: Any  # float32 [H, N] in powers of 2, or None
    out: Any  # [tiles, H, D, N]
    o_s: Any
    lse_s: Any
    sink_s: Any
    out_s: Any
    full: Any
    sink_full: Any


def merge_partials(
    o: jax.Array,
    lse: jax.Array,
    plan: DecodePlan,
    sinks: jax.Array | None,
    num_kv_heads: int,
    dtype: Any,
    interpret: Any = False,
) -> jax.Array:
    """The output of every tile, [tiles, H, D, N] in `dtype`, from what `decode_partials` gave.

    `sinks`, float32 [H, N] in powers of 2, take part in the softmax and carry no value. Tiles not in use are left as
    they are.
    """
    _, D, N = o.shape
    tiles = plan.tiles.shape[0]

    def paged_merge(*references: Any) -> None:
        if sinks is None:
            references = (*references[:4], None, *references[4:])
        _merge_pair(_References(*references), lax.axis_index("pair"), num_kv_heads)

    return plgpu.kernel(
        paged_merge,
        out_type=jax.ShapeDtypeStruct((tiles, num_kv_heads, D, N), dtype),
        grid=(tiles * num_kv_heads,),
        grid_names=("pair",),
        scratch_types=[
            plgpu.SMEM((STAGES, D, N), jnp.float32),
            plgpu.SMEM((STAGES, N), jnp.float32),
            plgpu.SMEM((N,), jnp.float32),
            plgpu.SMEM((D, N), dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(o, lse, plan.tiles, plan.blocks_per_cta, *(() if sinks is None else (sinks,)))


def _merge_pair(refs: _References, pair: Any, num_kv_heads: int) -> None:
    tile, head = lax.div(pair, num_kv_heads), lax.rem(pair, num_kv_heads)
    D, N = refs.out_s.shape
    count = refs.tiles[tile, 3]
    start = refs.tiles[tile, 5] + head * count
    first = lax.div(start, refs.per_cta[0])  # CTA whose run holds the pair's first block
    pieces = lax.div(start + count - 1, refs.per_cta[0]) - first + 1

    def copy(index: Any, slot: Any) -> None:
        plgpu.copy_gmem_to_smem(refs.o.at[pair + first + index], refs.o_s.at[slot], refs.full.at[slot])
        plgpu.copy_gmem_to_smem(refs.lse.at[pair + first + index], refs.lse_s.at[slot], refs.full.at[slot])

    def merge_piece(index: Any, carry: tuple) -> tuple:
        weighted, top, total = carry
        slot = lax.rem(index, STAGES)
        plgpu.barrier_wait(refs.full.at[slot])
        value = plgpu.load(refs.o_s.at[slot], layout=LAYOUT)
        weight = plgpu.load(refs.lse_s.at[slot], layout=BY_COLUMN)
        new_top = jnp.maximum(top, weight)
        decay, weight = jnp.exp2(top - new_top), jnp.exp2(weight - new_top)
        weighted = weighted * lax.broadcast_in_dim(decay, weighted.shape, [1])
        weighted += value * lax.broadcast_in_dim(weight, weighted.shape, [1])
        plgpu.commit_smem()  # all have read the stage before it is filled again
        pl.when(index + STAGES < pieces)(lambda: copy(index + STAGES, slot))
        return weighted, new_top, total * decay + weight

    @pl.when(count > 0)
    def _():
        for slot in range(STAGES):
            pl.when(slot < pieces)(lambda slot=slot: copy(slot, slot))
        top = plgpu.layout_cast(jnp.full((N,), FLOOR, jnp.float32), BY_COLUMN)
        total = plgpu.layout_cast(jnp.zeros((N,), jnp.float32), BY_COLUMN)
        if refs.sinks is not None:
            plgpu.copy_gmem_to_smem(refs.sinks.at[head], refs.sink_s, refs.sink_full)
            plgpu.barrier_wait(refs.sink_full)
            top = plgpu.load(refs.sink_s, layout=BY_COLUMN)
            total = total + 1.0
        weighted = plgpu.layout_cast(jnp.zeros((D, N), jnp.float32), LAYOUT)
        weighted, _, total = lax.fori_loop(0, pieces, merge_piece, (weighted, top, total))
        refs.out_s[...] = (weighted / lax.broadcast_in_dim(total, weighted.shape, [1])).astype(refs.out_s.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.out_s, refs.out.at[tile, head])
        plgpu.wait_smem_to_gmem(0)

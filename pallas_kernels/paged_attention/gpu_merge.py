"""Merges the partial results of split-KV decode, as in Flash-Decoding: one CTA for each tile and KV head.

Letters: H KV heads, D head_dim, N columns of a tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_blocks import FLOOR
from pallas_kernels.paged_attention.gpu_decode import BY_COLUMN, DecodePlan
from pallas_kernels.paged_attention.gpu_parts import LAYOUT

STAGES = 4  # partial results in flight


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
        o_g, lse_g, tiles_g, per_cta_g, *sinks_g, out_g, o_s, lse_s, sink_s, out_s, full, sink_full = references
        pair = lax.axis_index("pair")
        tile, head = lax.div(pair, num_kv_heads), lax.rem(pair, num_kv_heads)
        count = tiles_g[tile, 3]
        start = tiles_g[tile, 5] + head * count
        first = lax.div(start, per_cta_g[0])  # CTA whose run holds the pair's first block
        pieces = lax.div(start + count - 1, per_cta_g[0]) - first + 1

        def copy(index: Any, slot: Any) -> None:
            plgpu.copy_gmem_to_smem(o_g.at[pair + first + index], o_s.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(lse_g.at[pair + first + index], lse_s.at[slot], full.at[slot])

        def merge_piece(index: Any, carry: tuple) -> tuple:
            weighted, top, total = carry
            slot = lax.rem(index, STAGES)
            plgpu.barrier_wait(full.at[slot])
            value = plgpu.load(o_s.at[slot], layout=LAYOUT)
            weight = plgpu.load(lse_s.at[slot], layout=BY_COLUMN)
            new_top = jnp.maximum(top, weight)
            decay, weight = jnp.exp2(top - new_top), jnp.exp2(weight - new_top)
            weighted = weighted * lax.broadcast_in_dim(decay, weighted.shape, [1])
            weighted += value * lax.broadcast_in_dim(weight, weighted.shape, [1])
            plgpu.commit_smem()

            @pl.when(index + STAGES < pieces)
            def _():
                copy(index + STAGES, slot)

            return weighted, new_top, total * decay + weight

        @pl.when(count > 0)
        def _():
            for slot in range(STAGES):
                pl.when(slot < pieces)(lambda slot=slot: copy(slot, slot))
            top = plgpu.layout_cast(jnp.full((N,), FLOOR, jnp.float32), BY_COLUMN)
            total = plgpu.layout_cast(jnp.zeros((N,), jnp.float32), BY_COLUMN)
            if sinks_g:
                plgpu.copy_gmem_to_smem(sinks_g[0].at[head], sink_s, sink_full)
                plgpu.barrier_wait(sink_full)
                top = plgpu.load(sink_s, layout=BY_COLUMN)
                total = total + 1.0
            weighted = plgpu.layout_cast(jnp.zeros((D, N), jnp.float32), LAYOUT)
            weighted, _, total = lax.fori_loop(0, pieces, merge_piece, (weighted, top, total))
            out_s[...] = (weighted / lax.broadcast_in_dim(total, weighted.shape, [1])).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s, out_g.at[tile, head])
            plgpu.wait_smem_to_gmem(0)

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

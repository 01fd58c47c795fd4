"""Writes a step's new tokens into their pages in place.

The kernel gets the page arrays as references: with donation nothing is copied, also inside a scan over layers that
carries the pool.

Letters: T tokens, L layers, P pages with the scratch page, H KV heads, D head_dim.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def write_tokens(
    pools: tuple[jax.Array, jax.Array],
    new: tuple[jax.Array, jax.Array],
    slots: jax.Array,
    base: jax.Array,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Writes new K and V, [T, H, D] each, to their places in the pools, [L, P, H, page_size, D] each.

    slots, int32 [T], are page * page_size + offset, or -1 for tokens that are written nowhere; base, int32 [1], is
    layer * P. One CTA a token moves all heads of K and V at once.
    """
    L, P, H, page_size, D = pools[0].shape

    def paged_write(
        k_g: Any, v_g: Any, slots_g: Any, base_g: Any, k_pool: Any, v_pool: Any, k_s: Any, v_s: Any, full: Any
    ) -> None:
        token = lax.axis_index("token")
        slot = slots_g[token]

        @pl.when(slot >= 0)
        def _():
            page, offset = base_g[0] + lax.div(slot, page_size), lax.rem(slot, page_size)
            plgpu.copy_gmem_to_smem(k_g.at[token], k_s, full)
            plgpu.copy_gmem_to_smem(v_g.at[token], v_s, full)
            plgpu.barrier_wait(full)
            plgpu.copy_smem_to_gmem(k_s, k_pool.at[page, :, offset])
            plgpu.copy_smem_to_gmem(v_s, v_pool.at[page, :, offset])
            plgpu.wait_smem_to_gmem(0)

    references = [jax.new_ref(pool.reshape(L * P, H, page_size, D)) for pool in pools]
    plgpu.kernel(
        paged_write,
        out_type=(),
        grid=(len(slots),),
        grid_names=("token",),
        scratch_types=[
            plgpu.SMEM((H, D), pools[0].dtype),
            plgpu.SMEM((H, D), pools[0].dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        interpret=interpret,
    )(*new, slots, base, *references)
    k, v = (jax.freeze(reference).reshape(pool.shape) for reference, pool in zip(references, pools, strict=True))
    return k, v

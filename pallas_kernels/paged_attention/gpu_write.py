"""Writes into the pages in place: a kernel gets the page arrays as references, and with donation nothing is copied.

Letters: T tokens, L layers, P pages with the scratch page, H KV heads, D head_dim, N moved pages.
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

    def body(k_g: Any, v_g: Any, slots_g: Any, base_g: Any, k_pool: Any, v_pool: Any, k_s: Any, v_s: Any, full: Any):
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

    return _in_place(
        body,
        pools,
        (L * P, H, page_size, D),
        (*new, slots, base),
        grid=(len(slots),),
        grid_names=("token",),
        scratch_types=_buffers((H, D), pools[0].dtype),
        interpret=interpret,
    )


def write_pages(
    pools: tuple[jax.Array, jax.Array],
    content: tuple[jax.Array, jax.Array],
    ids: jax.Array,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Writes whole pages, [N, L, H, page_size, D] each of K and V, into pages `ids`, int32 [N], of the pools.

    The scratch page, which is the pools' last, takes nothing.
    """
    L, P, H, page_size, D = pools[0].shape

    def body(k_g: Any, v_g: Any, ids_g: Any, k_pool: Any, v_pool: Any, k_s: Any, v_s: Any, full: Any) -> None:
        index, layer, head = (lax.axis_index(name) for name in ("page", "layer", "head"))
        page = ids_g[index]

        @pl.when(page < P - 1)
        def _():
            source, target = (index * L + layer) * H + head, (layer * P + page) * H + head
            plgpu.copy_gmem_to_smem(k_g.at[source], k_s, full)
            plgpu.copy_gmem_to_smem(v_g.at[source], v_s, full)
            plgpu.barrier_wait(full)
            plgpu.copy_smem_to_gmem(k_s, k_pool.at[target])
            plgpu.copy_smem_to_gmem(v_s, v_pool.at[target])
            plgpu.wait_smem_to_gmem(0)

    flat = (-1, page_size, D)
    return _in_place(
        body,
        pools,
        (L * P * H, page_size, D),
        (*(x.reshape(flat) for x in content), ids),
        grid=(len(ids), L, H),
        grid_names=("page", "layer", "head"),
        scratch_types=_buffers((page_size, D), pools[0].dtype),
        interpret=interpret,
    )


def _buffers(shape: tuple[int, ...], dtype: Any) -> list[Any]:
    return [plgpu.SMEM(shape, dtype), plgpu.SMEM(shape, dtype), plgpu.Barrier(num_arrivals=2)]


def _in_place(
    body: Any, pools: tuple[jax.Array, jax.Array], view: tuple[int, ...], operands: tuple, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Runs a kernel over `operands` and references to both pools, seen in the shape `view`; returns the pools."""
    references = [jax.new_ref(pool.reshape(view)) for pool in pools]
    plgpu.kernel(body, out_type=(), **options)(*operands, *references)
    k, v = (jax.freeze(reference).reshape(pool.shape) for reference, pool in zip(references, pools, strict=True))
    return k, v

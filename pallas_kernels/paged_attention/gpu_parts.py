"""What the decode and the prefill kernel have in common: page copies, products, the arithmetic of logits.

Letters: D head_dim, B KV tokens of a block.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_blocks import LOG2_E, DecodeBlocks, Masking, PrefillBlocks

LAYOUT = plgpu.Layout.WGMMA
ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the form that wgmma and TMA share: 8 x 64 tiles, swizzled over 128 bytes."""
    tiling = plgpu.TilingTransform((8, 64))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def page_sources(
    blocks: DecodeBlocks | PrefillBlocks,
    table: Any,
    table_row: Any,
    first_unit: Any,
    last_unit: Any,
    base: Any,
    head: Any,
    num_kv_heads: int,
) -> list[tuple[Any, Any]]:
    """Where a KV block's units lie: row of the page array, and token within the page.

    To be called before waiting for the stage, so that the page ids' latency hides behind the wait.
    """
    sources = []
    for unit in range(blocks.units):
        token = jnp.minimum(first_unit + unit, last_unit) * blocks.unit
        page = table[table_row + lax.div(token, blocks.page_size)]
        sources.append(((base + page) * num_kv_heads + head, lax.rem(token, blocks.page_size)))
    return sources


def copy_units(
    blocks: DecodeBlocks | PrefillBlocks,
    sources: list[tuple[Any, Any]],
    first_unit: Any,
    last_unit: Any,
    pages: Any,
    stage: Any,
    full: Any,
) -> None:
    """Copies one KV block from its pages; units past the last are left as they are, and count as arrived."""
    for unit, (row, offset) in enumerate(sources):
        exists = first_unit + unit <= last_unit

        @pl.when(exists)
        def _(unit=unit, row=row, offset=offset):
            page = pages.at[row] if blocks.unit == blocks.page_size else pages.at[row, pl.ds(offset, blocks.unit)]
            plgpu.copy_gmem_to_smem(page, stage.at[pl.ds(unit * blocks.unit, blocks.unit)], full)

        @pl.when(jnp.logical_not(exists))
        def _():
            plgpu.barrier_arrive(full)


def drain(steps: Any, stages: int, *free: Any) -> None:
    """Waits until every stage that was ever filled is free: no barrier is left with an arrival nobody saw."""
    for slot in range(stages):

        @pl.when(steps > slot)
        def _(slot=slot):
            for barrier in free:
                plgpu.barrier_wait(barrier.at[slot])


def product(a: Any, b: Any, shape: tuple[int, int]) -> jax.Array:
    """a b in float32 by wgmma, both operands in shared memory."""

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, ACC(shape, jnp.float32))


def clear_tail(v: Any, length: Any) -> None:
    """Zeroes the rows of `v`, [B, D] in shared memory, from `length` on: their weights are 0, but 0 * nan is nan.

    To be called while few registers are in use, and followed by commit_smem.
    """
    width = 64  # columns at a time
    for column in range(0, v.shape[1], width):
        part = v.at[:, pl.ds(column, width)]
        values = plgpu.load(part, layout=LAYOUT)
        row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=LAYOUT)
        part[...] = jnp.where(row < length, values, jnp.zeros_like(values))


def scaled_logits(s: jax.Array, masking: Masking) -> jax.Array:
    """float32 products to logits in powers of 2, soft-capped where asked."""
    if masking.soft_cap is None:
        return s * (masking.scale * LOG2_E)
    return jnp.tanh(s * (masking.scale / masking.soft_cap)) * (masking.soft_cap * LOG2_E)

"""Chunked prefill over pages for Hopper, warp-specialised in the manner of FlashAttention-3 (arXiv 2407.08608).

A tile packs the (token, query head) rows of one sequence and one KV head: row r is token r // G, query head r % G, so
that a page is read once for all heads of a group. A CTA has two compute warpgroups of 64 rows each, which take turns
on the tensor cores, and a memory warpgroup that reads page ids and copies pages by TMA, stages ahead. The causal mask
runs over absolute positions: a chunk on top of a context differs from a first chunk only in where its tiles start.

Letters: L layers, P pages with the scratch page, H KV heads, G query heads per KV head, D head_dim, M rows of a tile,
B KV tokens of a block.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_blocks import FLOOR, WARPGROUP_ROWS, Masking, PrefillBlocks
from pallas_kernels.paged_attention.gpu_parts import (
    ACC,
    LAYOUT,
    clear_tail,
    copy_units,
    drain,
    page_sources,
    scaled_logits,
    swizzled,
)
from pallas_kernels.paged_attention.tiles import Tiles

MEMORY = 2  # the warpgroup after the two that compute
# A thread. A CTA of three warpgroups starts with 168 each and must not ask for more than it started with, or it waits
# for ever: 2 * 240 + 24 = 3 * 168.
COMPUTE_REGISTERS, MEMORY_REGISTERS = 240, 24
BY_ROW = LAYOUT.reduce(1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillPlan:
    """What each tile reads; the same for all layers of a step that share a window."""

    tiles: jax.Array  # int32 [tiles, 5]: sequence, first position, first block, blocks, end of its KV


def plan_prefill(tiles: Tiles, blocks: PrefillBlocks, window: int | None) -> PrefillPlan:
    end = tiles.first_position + tiles.length
    first_seen = jnp.zeros_like(end)
    if window is not None:
        first_seen = jnp.maximum(tiles.first_position - window + 1, 0)
    first_block = first_seen // blocks.kv_tokens
    counts = jnp.where(tiles.length > 0, -(-end // blocks.kv_tokens) - first_block, 0)
    return PrefillPlan(jnp.stack([tiles.sequence, tiles.first_position, first_block, counts, end], axis=1))


class _Tile(NamedTuple):
    """What one CTA works on; scalars."""

    tile: Any
    head: Any
    table_row: Any
    first_position: Any
    first_block: Any
    blocks: Any
    end: Any


class _Gmem(NamedTuple):
    """References into device memory."""

    q: Any  # [tiles, H, M, D]
    k: Any  # [L * P * H, page_size, D]
    v: Any
    table: Any  # int32 [S * pages_per_seq]
    tiles: Any
    base: Any  # int32 [1]: layer * P
    sinks: Any  # float32 [H, M] in powers of 2, or None
    out: Any  # [tiles, H, M, D]


class _Smem(NamedTuple):
    """Shared memory and barriers of one CTA."""

    q: Any  # queries, and at the end the output
    k: Any
    v: Any
    sinks: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    turn: Any  # both compute warpgroups meet here to take turns


@dataclass(frozen=True)
class _Kernel:
    """The static side of the prefill kernel."""

    blocks: PrefillBlocks
    masking: Masking
    num_tiles: int
    num_kv_heads: int
    pages_per_seq: int
    interpret: bool

    def tile(self, cta: Any, tiles_g: Any) -> _Tile:
        """Later tiles first: under a causal mask they are the longest."""
        tile = self.num_tiles - 1 - lax.div(cta, self.num_kv_heads)
        return _Tile(
            tile=tile,
            head=lax.rem(cta, self.num_kv_heads),
            table_row=tiles_g[tile, 0] * self.pages_per_seq,
            first_position=tiles_g[tile, 1],
            first_block=tiles_g[tile, 2],
            blocks=tiles_g[tile, 3],
            end=tiles_g[tile, 4],
        )

    def mask(self, s: jax.Array, tile: _Tile, block: Any, first_row: Any) -> jax.Array:
        """FLOOR where a row does not see a token; row r is token r // G, compared without dividing."""
        kv = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=LAYOUT) + block * self.blocks.kv_tokens
        row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=LAYOUT) + first_row
        distance = (kv - tile.first_position) * self.blocks.group
        visible = distance <= row
        if self.masking.window is not None:
            visible &= distance > row - self.masking.window * self.blocks.group
        return jnp.where(visible, s, FLOOR)

    def accumulate(self, acc: jax.Array, p: jax.Array, v: Any) -> jax.Array:
        """acc + p v, with p in registers.

        The interpreter's wgmma takes operands in shared memory alone: there, a plain dot stands in. It reads V as
        ordinary loads do, which TMA may only overwrite after a fence.
        """
        if self.interpret:
            values = v[...]
            plgpu.commit_smem()
            return acc + jnp.dot(p, values, preferred_element_type=jnp.float32)
        return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, p, v))(ACC.init(acc))


def _memory_warpgroup(kernel: _Kernel, gmem: _Gmem, smem: _Smem, tile: _Tile) -> None:
    blocks = kernel.blocks
    last_unit = lax.div(tile.end - 1, blocks.unit)

    def copy_block(step: Any, carry: None) -> None:
        slot = lax.rem(step, blocks.stages)
        first_unit = (tile.first_block + step) * blocks.units
        sources = page_sources(
            blocks, gmem.table, tile.table_row, first_unit, last_unit, gmem.base[0], tile.head, kernel.num_kv_heads
        )
        for pages, stage, full, free in (
            (gmem.k, smem.k, smem.k_full, smem.k_free),
            (gmem.v, smem.v, smem.v_full, smem.v_free),
        ):
            pl.when(step >= blocks.stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
            copy_units(blocks, sources, first_unit, last_unit, pages, stage.at[slot], full.at[slot])

    lax.fori_loop(0, tile.blocks, copy_block, None)
    drain(tile.blocks, blocks.stages, smem.k_free, smem.v_free)


@dataclass(frozen=True)
class _ComputeWarpgroup:
    """One of the two warpgroups that compute, and its 64 rows of the tile."""

    kernel: _Kernel
    gmem: _Gmem
    smem: _Smem
    tile: _Tile
    index: Any

    @property
    def first_row(self) -> Any:
        return self.index * WARPGROUP_ROWS

    def run(self) -> None:
        blocks, smem, tile = self.kernel.blocks, self.smem, self.tile
        rows = pl.ds(self.first_row, WARPGROUP_ROWS)
        q_s, q_full = smem.q.at[self.index], smem.q_full.at[self.index]
        plgpu.copy_gmem_to_smem(self.gmem.q.at[tile.tile, tile.head, rows], q_s, q_full)
        carry = (
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, blocks.head_dim), jnp.float32), LAYOUT),
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), FLOOR, jnp.float32), BY_ROW),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), BY_ROW),
        )
        plgpu.barrier_wait(q_full)
        pl.when(self.index == 1)(self.take_turns)
        unmasked = jnp.int32(0)
        if self.kernel.masking.window is None:  # blocks that every row sees whole
            unmasked = jnp.minimum(lax.div(tile.first_position + 1, blocks.kv_tokens), tile.blocks)
            carry = lax.fori_loop(0, unmasked, lambda i, c: self.attend_block(i, c, masked=False), carry)
        carry = lax.fori_loop(unmasked, tile.blocks, lambda i, c: self.attend_block(i, c, masked=True), carry)
        pl.when(self.index == 0)(self.take_turns)
        acc, _, total = carry if self.gmem.sinks is None else self.add_sinks(carry)
        acc *= lax.broadcast_in_dim(1.0 / total, acc.shape, [0])
        q_s[...] = acc.astype(q_s.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_s, self.gmem.out.at[tile.tile, tile.head, rows])
        plgpu.wait_smem_to_gmem(0)

    def attend_block(self, step: Any, carry: tuple, masked: bool) -> tuple:
        acc, top, total = carry
        blocks, smem = self.kernel.blocks, self.smem
        slot, block = lax.rem(step, blocks.stages), self.tile.first_block + step
        in_tail = self.tile.end - block * blocks.kv_tokens
        # The first warpgroup clears the last block for both: its turn with V comes before the other's. It does so now,
        # while registers are free.
        clears = (self.index == 0) & (in_tail < blocks.kv_tokens)
        if masked:
            pl.when(clears)(lambda: self.wait_and_clear(slot, in_tail))
        plgpu.barrier_wait(smem.k_full.at[slot])
        s = self.multiply_keys(slot)
        plgpu.barrier_arrive(smem.k_free.at[slot])
        s = scaled_logits(s, self.kernel.masking)
        if masked:
            s = self.kernel.mask(s, self.tile, block, self.first_row)
        new_top = jnp.maximum(top, s.max(axis=1))
        decay = jnp.exp2(top - new_top)
        p = jnp.exp2(s - lax.broadcast_in_dim(new_top, s.shape, [0]))
        acc *= lax.broadcast_in_dim(decay, acc.shape, [0])
        total = total * decay + p.sum(axis=1)
        p = p.astype(smem.v.dtype)
        acc, total, new_top, p = lax.optimization_barrier((acc, total, new_top, p))
        plgpu.barrier_arrive(smem.turn)  # the softmax is done; the other may start its own
        if masked:
            pl.when(jnp.logical_not(clears))(lambda: plgpu.barrier_wait(smem.v_full.at[slot]))
        else:
            plgpu.barrier_wait(smem.v_full.at[slot])
        plgpu.barrier_wait(smem.turn)
        acc = self.kernel.accumulate(acc, p, smem.v.at[slot])
        plgpu.barrier_arrive(smem.v_free.at[slot])
        return acc, new_top, total

    def multiply_keys(self, slot: Any) -> jax.Array:
        """q K^T in float32; the tensor cores pass to the other warpgroup once this one's products are under way."""

        def multiply(accumulator: Any) -> jax.Array:
            plgpu.wgmma(accumulator, self.smem.q.at[self.index], self.smem.k.at[slot].transpose((1, 0)))
            self.take_turns()
            return accumulator[...]

        return pl.run_scoped(multiply, ACC((WARPGROUP_ROWS, self.kernel.blocks.kv_tokens), jnp.float32))

    def take_turns(self) -> None:
        plgpu.barrier_arrive(self.smem.turn)
        plgpu.barrier_wait(self.smem.turn)

    def wait_and_clear(self, slot: Any, length: Any) -> None:
        plgpu.barrier_wait(self.smem.v_full.at[slot])
        clear_tail(self.smem.v.at[slot], length)
        plgpu.commit_smem()

    def add_sinks(self, carry: tuple) -> tuple:
        """Takes each row's sink into its softmax."""
        acc, top, total = carry
        sinks_s, full = self.smem.sinks.at[self.index], self.smem.q_full.at[self.index]
        rows = pl.ds(self.first_row, WARPGROUP_ROWS)
        plgpu.copy_gmem_to_smem(self.gmem.sinks.at[self.tile.head, rows], sinks_s, full)
        plgpu.barrier_wait(full)
        sinks = plgpu.load(sinks_s, layout=BY_ROW)
        new_top = jnp.maximum(top, sinks)
        decay = jnp.exp2(top - new_top)
        acc *= lax.broadcast_in_dim(decay, acc.shape, [0])
        return acc, new_top, total * decay + jnp.exp2(sinks - new_top)


def _scratch(blocks: PrefillBlocks, dtype: Any) -> list[Any]:
    D, B, stages = blocks.head_dim, blocks.kv_tokens, blocks.stages
    memory = _Smem(
        q=swizzled((2, WARPGROUP_ROWS, D), dtype),
        k=swizzled((stages, B, D), dtype),
        v=swizzled((stages, B, D), dtype),
        sinks=plgpu.SMEM((2, WARPGROUP_ROWS), jnp.float32),
        q_full=plgpu.Barrier(num_barriers=2),
        k_full=plgpu.Barrier(num_arrivals=blocks.units, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=blocks.units, num_barriers=stages),
        k_free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        v_free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        turn=plgpu.Barrier(num_arrivals=2),
    )
    return list(memory)


def prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    base: jax.Array,
    plan: PrefillPlan,
    sinks: jax.Array | None,
    blocks: PrefillBlocks,
    masking: Masking,
    interpret: Any = False,
) -> jax.Array:
    """The output of every tile, [tiles, H, M, D] in q's dtype; tiles not in use are left as they are.

    q is [tiles, H, M, D], k and v are [L * P * H, page_size, D], table int32 [S, pages_per_seq], base int32 [1], sinks
    float32 [H, M] in powers of 2.
    """
    tiles, num_kv_heads = q.shape[:2]
    kernel = _Kernel(blocks, masking, tiles, num_kv_heads, table.shape[1], bool(interpret))

    def paged_prefill(*references: Any) -> None:
        *inputs, out = references[: len(operands) + 1]
        sinks_g = inputs[6] if sinks is not None else None
        gmem = _Gmem(*inputs[:6], sinks=sinks_g, out=out)
        smem = _Smem(*references[len(operands) + 1 :])
        warpgroup = lax.axis_index("warpgroup")
        tile = kernel.tile(lax.axis_index("cta"), gmem.tiles)

        @pl.when((tile.blocks > 0) & (warpgroup < MEMORY))
        def _():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _ComputeWarpgroup(kernel, gmem, smem, tile, warpgroup).run()

        @pl.when((tile.blocks > 0) & (warpgroup == MEMORY))
        def _():
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
            _memory_warpgroup(kernel, gmem, smem, tile)

    operands = (q, k, v, table.reshape(-1), plan.tiles, base, *(() if sinks is None else (sinks,)))
    return plgpu.kernel(
        paged_prefill,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(tiles * num_kv_heads,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=_scratch(blocks, q.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands)

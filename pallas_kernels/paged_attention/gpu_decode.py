"""Split-KV paged decode for Hopper: a persistent grid over one stream of KV blocks, and the merge of its partials.

A tile is up to `tile_tokens` query tokens of one sequence; with one KV head it is a pair. All pairs' KV blocks form one
stream, in the order (tile, head, block), which is cut into equal runs, one for each CTA ("stream-K", arXiv 2301.03598):
one long sequence among short ones keeps every SM busy. Where a cut falls inside a pair its runs leave partial softmax
results, numbered pair + CTA (along the stream each step enters a new pair or a new CTA, so no two share a number). A
second kernel merges them as in Flash-Decoding.

Within a CTA a memory warpgroup reads page ids and copies pages by TMA, stages ahead of the one that computes. The
operands are swapped: KV tokens lie on the M of a wgmma and the few grouped queries on its N, so that 8 queries cost
8 columns and not 64 rows: logits S^T = K q^T and output O^T = V^T P^T.

Letters: L layers, P pages with the scratch page, H KV heads, G query heads per KV head, D head_dim, N columns, B KV
tokens of a block.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_blocks import FLOOR, DecodeBlocks, Masking
from pallas_kernels.paged_attention.gpu_parts import (
    LAYOUT,
    clear_tail,
    copy_units,
    drain,
    page_sources,
    product,
    scaled_logits,
    swizzled,
)
from pallas_kernels.paged_attention.tiles import Tiles

COMPUTE, MEMORY = 0, 1  # warpgroups
BY_COLUMN = LAYOUT.reduce(0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """How the stream of KV blocks is cut up; the same for all layers of a step that share a window."""

    tiles: jax.Array  # int32 [tiles, 6]: sequence, first position, first block, blocks, end of its KV, start in stream
    ctas: jax.Array  # int32 [num_ctas, 4]: first pair, pairs touched, first and last (exclusive) block of the stream
    blocks_per_cta: jax.Array  # int32 [1]


def plan_decode(tiles: Tiles, num_kv_heads: int, blocks: DecodeBlocks, window: int | None) -> DecodePlan:
    """Cuts the KV blocks that `tiles` see into equal runs."""
    end = tiles.first_position + tiles.length
    first_seen = jnp.zeros_like(end)
    if window is not None:
        first_seen = jnp.maximum(tiles.first_position - window + 1, 0)
    first_block = first_seen // blocks.kv_tokens
    counts = jnp.where(tiles.length > 0, -(-end // blocks.kv_tokens) - first_block, 0)
    ends = jnp.cumsum(counts) * num_kv_heads
    starts = ends - counts * num_kv_heads
    table = jnp.stack([tiles.sequence, tiles.first_position, first_block, counts, end, starts], axis=1)

    total = ends[-1]
    per_cta = jnp.maximum(-(-total // blocks.num_ctas), 1)
    begin = jnp.minimum(jnp.arange(blocks.num_ctas, dtype=jnp.int32) * per_cta, total)
    stop = jnp.minimum(begin + per_cta, total)

    def pair_of(block: jax.Array) -> jax.Array:
        tile = jnp.sum(ends <= block[:, None], axis=1, dtype=jnp.int32)
        tile = jnp.minimum(tile, len(ends) - 1)
        return tile * num_kv_heads + (block - starts[tile]) // jnp.maximum(counts[tile], 1)

    first_pair, last_pair = pair_of(begin), pair_of(stop - 1)
    pairs = jnp.where(stop > begin, last_pair - first_pair + 1, 0)
    ctas = jnp.stack([first_pair, pairs, begin, stop], axis=1)
    return DecodePlan(table.astype(jnp.int32), ctas.astype(jnp.int32), per_cta[None].astype(jnp.int32))


class _Piece(NamedTuple):
    """One CTA's share of one pair; scalars."""

    number: Any  # where its partial result goes
    tile: Any
    head: Any
    table_row: Any  # of the page table: where the sequence's page ids start
    first_position: Any  # of the tile's first token
    end: Any  # of the tile's KV
    first_block: Any
    blocks: Any


@dataclass(frozen=True)
class _Kernel:
    """The static side of the decode kernel."""

    blocks: DecodeBlocks
    masking: Masking
    num_kv_heads: int
    pages_per_seq: int

    def piece(self, index: Any, cta: Any, tiles_g: Any, ctas_g: Any) -> _Piece:
        """The `index`th piece of this CTA."""
        pair = ctas_g[cta, 0] + index
        tile, head = lax.div(pair, self.num_kv_heads), lax.rem(pair, self.num_kv_heads)
        count = tiles_g[tile, 3]
        start = tiles_g[tile, 5] + head * count
        low = jnp.maximum(ctas_g[cta, 2] - start, 0)
        high = jnp.minimum(ctas_g[cta, 3] - start, count)
        return _Piece(
            number=pair + cta,
            tile=tile,
            head=head,
            table_row=tiles_g[tile, 0] * self.pages_per_seq,
            first_position=tiles_g[tile, 1],
            end=tiles_g[tile, 4],
            first_block=tiles_g[tile, 2] + low,
            blocks=high - low,
        )

    def masked_logits(self, s: jax.Array, piece: _Piece, block: Any) -> jax.Array:
        """Logits in powers of 2 from the products [B, N]; FLOOR where a query does not see a token."""
        s = scaled_logits(s, self.masking)
        kv = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=LAYOUT) + block * self.blocks.kv_tokens
        column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=LAYOUT)
        # Column c belongs to token c // G; compared without dividing: kv - first <= c // G <=> (kv - first) * G <= c.
        distance = (kv - piece.first_position) * self.blocks.group
        visible = distance <= column
        if self.masking.window is not None:
            visible &= distance > column - self.masking.window * self.blocks.group
        return jnp.where(visible, s, FLOOR)


def _memory_warpgroup(kernel: _Kernel, gmem: Any, smem: Any, base: Any, cta: Any, pieces: Any) -> None:
    """Copies each piece's queries, then its pages, into the stages as they fall free."""
    blocks = kernel.blocks

    def copy_piece(index: Any, step: Any) -> Any:
        piece = kernel.piece(index, cta, gmem.tiles, gmem.ctas)
        q_slot = lax.rem(index, 2)

        @pl.when(index >= 2)
        def _():
            plgpu.barrier_wait(smem.q_free.at[q_slot])

        plgpu.copy_gmem_to_smem(gmem.q.at[piece.tile, piece.head], smem.q.at[q_slot], smem.q_full.at[q_slot])
        last_unit = lax.div(piece.end - 1, blocks.unit)

        def copy_block(i: Any, step: Any) -> Any:
            slot = lax.rem(step, blocks.stages)
            first_unit = (piece.first_block + i) * blocks.units
            sources = page_sources(
                blocks, gmem.table, piece.table_row, first_unit, last_unit, base, piece.head, kernel.num_kv_heads
            )
            for pages, stage, full, free in (
                (gmem.k, smem.k, smem.k_full, smem.k_free),
                (gmem.v, smem.v, smem.v_full, smem.v_free),
            ):

                @pl.when(step >= blocks.stages)
                def _(free=free):
                    plgpu.barrier_wait(free.at[slot])

                copy_units(blocks, sources, first_unit, last_unit, pages, stage.at[slot], full.at[slot])
            return step + 1

        return lax.fori_loop(0, piece.blocks, copy_block, step)

    steps = lax.fori_loop(0, pieces, copy_piece, jnp.int32(0))
    drain(pieces, 2, smem.q_free)
    drain(steps, blocks.stages, smem.k_free, smem.v_free)


def _compute_warpgroup(kernel: _Kernel, gmem: Any, smem: Any, cta: Any, pieces: Any) -> None:
    """Attends for each piece and writes its normalised output and the logarithm of its sum."""
    blocks = kernel.blocks
    D, N, B = blocks.head_dim, blocks.columns, blocks.kv_tokens

    def attend_piece(index: Any, step: Any) -> Any:
        piece = kernel.piece(index, cta, gmem.tiles, gmem.ctas)
        q_slot = lax.rem(index, 2)
        plgpu.barrier_wait(smem.q_full.at[q_slot])

        def attend_block(i: Any, carry: tuple) -> tuple:
            o, top, total = carry
            slot, block = lax.rem(step + i, blocks.stages), piece.first_block + i
            in_tail = piece.end - block * B

            @pl.when(in_tail < B)
            def _():
                plgpu.barrier_wait(smem.v_full.at[slot])
                clear_tail(smem.v.at[slot], in_tail)

            plgpu.barrier_wait(smem.k_full.at[slot])
            s = product(smem.k.at[slot], smem.q.at[q_slot].transpose((1, 0)), (B, N))
            plgpu.barrier_arrive(smem.k_free.at[slot])
            s = kernel.masked_logits(s, piece, block)
            new_top = jnp.maximum(top, s.max(axis=0))
            decay = jnp.exp2(top - new_top)
            p = jnp.exp2(s - lax.broadcast_in_dim(new_top, s.shape, [1]))
            # Summed over tokens only once, at the end: a reduction across warps costs more than eight additions.
            total = total * lax.broadcast_in_dim(decay, s.shape, [1]) + p
            smem.p.transpose((1, 0))[...] = p.astype(smem.p.dtype)
            plgpu.commit_smem()

            @pl.when(in_tail >= B)
            def _():
                plgpu.barrier_wait(smem.v_full.at[slot])

            o = o * lax.broadcast_in_dim(decay, o.shape, [1])
            o += product(smem.v.at[slot].transpose((1, 0)), smem.p.transpose((1, 0)), (D, N))
            plgpu.barrier_arrive(smem.v_free.at[slot])
            return o, new_top, total

        fresh = (
            plgpu.layout_cast(jnp.zeros((D, N), jnp.float32), LAYOUT),
            plgpu.layout_cast(jnp.full((N,), FLOOR, jnp.float32), BY_COLUMN),
            plgpu.layout_cast(jnp.zeros((B, N), jnp.float32), LAYOUT),
        )
        o, top, total = lax.fori_loop(0, piece.blocks, attend_block, fresh)
        plgpu.barrier_arrive(smem.q_free.at[q_slot])
        total = total.sum(axis=0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the piece before
        smem.o[...] = o / lax.broadcast_in_dim(total, o.shape, [1])
        smem.lse[...] = top + jnp.log2(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.o, gmem.o.at[piece.number])
        plgpu.copy_smem_to_gmem(smem.lse, gmem.lse.at[piece.number])
        return step + piece.blocks

    lax.fori_loop(0, pieces, attend_piece, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


class _Gmem(NamedTuple):
    """References into device memory."""

    q: Any  # [tiles, H, N, D]
    k: Any  # [L * P * H, page_size, D]
    v: Any
    table: Any  # int32 [S * pages_per_seq]
    tiles: Any
    ctas: Any
    base: Any  # int32 [1]: layer * P
    o: Any  # float32 [pieces, D, N]
    lse: Any  # float32 [pieces, N]


class _Smem(NamedTuple):
    """Shared memory and barriers of one CTA."""

    q: Any
    k: Any
    v: Any
    p: Any
    o: Any
    lse: Any
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any


def _scratch(blocks: DecodeBlocks, dtype: Any) -> list[Any]:
    D, N, B, stages = blocks.head_dim, blocks.columns, blocks.kv_tokens, blocks.stages
    memory = _Smem(
        q=swizzled((2, N, D), dtype),
        k=swizzled((stages, B, D), dtype),
        v=swizzled((stages, B, D), dtype),
        p=swizzled((N, B), dtype),
        o=plgpu.SMEM((D, N), jnp.float32),
        lse=plgpu.SMEM((N,), jnp.float32),
        q_full=plgpu.Barrier(num_barriers=2),
        q_free=plgpu.Barrier(num_barriers=2),
        k_full=plgpu.Barrier(num_arrivals=blocks.units, num_barriers=stages),
        k_free=plgpu.Barrier(num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=blocks.units, num_barriers=stages),
        v_free=plgpu.Barrier(num_barriers=stages),
    )
    return list(memory)


def decode_partials(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    base: jax.Array,
    plan: DecodePlan,
    blocks: DecodeBlocks,
    masking: Masking,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Partial results of every piece: outputs, float32 [pieces, D, N], and logarithms (base 2) of sums [pieces, N].

    q is [tiles, H, N, D], k and v are [L * P * H, page_size, D], table int32 [S, pages_per_seq], base int32 [1].
    Numbers that no piece has are left as they are.
    """
    tiles, num_kv_heads, N, D = q.shape
    kernel = _Kernel(blocks, masking, num_kv_heads, table.shape[1])

    def paged_decode(*references: Any) -> None:
        gmem, smem = _Gmem(*references[: len(_Gmem._fields)]), _Smem(*references[len(_Gmem._fields) :])
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        pieces = gmem.ctas[cta, 1]

        # Registers are not moved between the warpgroups: both need few, so that an SM may hold two CTAs.
        @pl.when(warpgroup == COMPUTE)
        def _():
            _compute_warpgroup(kernel, gmem, smem, cta, pieces)

        @pl.when(warpgroup == MEMORY)
        def _():
            _memory_warpgroup(kernel, gmem, smem, gmem.base[0], cta, pieces)

    pieces = tiles * num_kv_heads + blocks.num_ctas
    return plgpu.kernel(
        paged_decode,
        out_type=(
            jax.ShapeDtypeStruct((pieces, D, N), jnp.float32),
            jax.ShapeDtypeStruct((pieces, N), jnp.float32),
        ),
        grid=(blocks.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=_scratch(blocks, q.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=2 * 128 * 4 * 4),
        interpret=interpret,
    )(q, k, v, table.reshape(-1), plan.tiles, plan.ctas, base)

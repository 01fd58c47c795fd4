"""Paged attention for Hopper GPUs, in Mosaic GPU kernels.

Sequences with few tokens in a step (decode rows, verification spans) go through split-KV decode, the others through
prefill; a step launches both, over work lists that may be empty. Queries are packed into tiles by XLA before, and
results are unpacked after: each is one gather.

Letters in shapes: T tokens, S sequences, N page ids, L layers, H KV heads, G query heads per KV head, D head_dim,
W tokens of a tile.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallas_kernels.paged_attention.api import AttentionBatch, PageSpec
from pallas_kernels.paged_attention.gpu_blocks import (
    LOG2_E,
    DecodeBlocks,
    Masking,
    PrefillBlocks,
    decode_blocks,
    local_sms,
    prefill_blocks,
)
from pallas_kernels.paged_attention.gpu_decode import DecodePlan, decode_partials, plan_decode
from pallas_kernels.paged_attention.gpu_merge import merge_partials
from pallas_kernels.paged_attention.gpu_prefill import plan_prefill, prefill
from pallas_kernels.paged_attention.gpu_write import write_tokens
from pallas_kernels.paged_attention.moves import LayerMajorMoves
from pallas_kernels.paged_attention.tiles import Tiles, TileShape, cut_tiles, token_places

SPAN_TOKENS = 8  # a sequence with up to this many tokens in a step goes through decode
EVERY_LENGTH = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GpuPages:
    """The pool: K and V, [L, num_pages + 1, H, page_size, D] each; as host pages [N, L, H, page_size, D]."""

    k: jax.Array
    v: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenPlaces:
    """Where the T tokens lie among tiles; int32 or bool [T]."""

    tile: jax.Array
    offset: jax.Array  # token of the tile
    used: jax.Array  # whether the token is in a tile at all


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TileClass:
    """The sequences that one kernel serves."""

    tiles: Tiles
    tokens: jax.Array  # int32 [tiles, W]: rows of the flat batch, clipped to it
    places: TokenPlaces


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GpuWork:
    """What all layers of one step share."""

    slots: jax.Array  # int32 [T]: page * page_size + offset of each token, -1 for padding
    page_table: jax.Array  # int32 [S, pages_per_seq]
    short: TileClass
    long: TileClass | None  # None where the step has too few tokens for one
    plan: DecodePlan  # without a window, for all KV heads
    planned_heads: int = field(metadata={"static": True})
    decode_blocks: DecodeBlocks = field(metadata={"static": True})
    prefill_blocks: PrefillBlocks = field(metadata={"static": True})


class GpuPagedAttention(LayerMajorMoves):
    """PagedAttention for CUDA GPUs of compute capability 9.0; see the module's docstring.

    `group` is the number of query heads that share a KV head. `num_sms` sizes the persistent grid of decode; by
    default it is asked of the device. `interpret`, a plgpu.InterpretGPUParams, runs the kernels on a CPU.
    """

    def __init__(
        self, group: int, *, num_sms: int | None = None, span_tokens: int = SPAN_TOKENS, interpret: Any = False
    ) -> None:
        self.group = group
        self.num_sms = num_sms or local_sms()
        self.span_tokens = span_tokens
        self.interpret = interpret

    def make_pages(self, spec: PageSpec) -> GpuPages:
        shape = (spec.num_layers, spec.num_pages + 1, spec.num_kv_heads, spec.page_size_tokens, spec.head_dim)
        return GpuPages(k=jnp.zeros(shape, spec.dtype), v=jnp.zeros(shape, spec.dtype))

    def make_work(self, batch: AttentionBatch, num_tokens: int, spec: PageSpec) -> GpuWork:
        for_decode = decode_blocks(spec, self.group, self.num_sms)
        for_prefill = prefill_blocks(spec, self.group)
        num_seqs = batch.kv_lens.shape[0]
        is_short = jnp.diff(batch.cu_q_lens) <= self.span_tokens
        width = for_decode.tile_tokens
        most_short = min(
            num_tokens, num_tokens // width + num_seqs, num_seqs * -(-min(self.span_tokens, num_tokens) // width)
        )
        long = None
        if num_tokens > self.span_tokens:
            width = for_prefill.tile_tokens
            most_seqs = min(num_seqs, num_tokens // (self.span_tokens + 1))
            most_long = (num_tokens + most_seqs * (width - 1)) // width
            long = _tile_class(batch, ~is_short, width, most_long, num_tokens)
        short = _tile_class(batch, is_short, for_decode.tile_tokens, most_short, num_tokens)
        pages, offsets = token_places(batch, num_tokens, spec)
        slots = jnp.where(pages == spec.scratch_page, -1, pages * spec.page_size_tokens + offsets)
        return GpuWork(
            slots=slots,
            page_table=batch.page_table,
            short=short,
            long=long,
            plan=plan_decode(short.tiles, spec.num_kv_heads, for_decode, None),
            planned_heads=spec.num_kv_heads,
            decode_blocks=for_decode,
            prefill_blocks=for_prefill,
        )

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pages: GpuPages,
        work: GpuWork,
        *,
        layer: jax.Array | int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, GpuPages]:
        num_pages, num_kv_heads = pages.k.shape[1:3]
        dtype = pages.k.dtype
        base = jnp.reshape(jnp.asarray(layer, jnp.int32) * num_pages, 1)
        new = (k.astype(dtype), v.astype(dtype))
        pages = GpuPages(*write_tokens((pages.k, pages.v), new, work.slots, base, self.interpret))

        grouped = q.reshape(len(q), num_kv_heads, self.group, -1)
        masking = Masking(scale, window, soft_cap)
        if sinks is not None:
            sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, self.group) * LOG2_E
        short = self._attend_short(grouped, pages, work, base, masking, sinks)
        used = work.short.places.used[:, None, None, None]
        out = jnp.where(used, short, 0)
        if work.long is not None:
            long = self._attend_long(grouped, pages, work, base, masking, sinks)
            out = jnp.where(work.long.places.used[:, None, None, None], long, out)
        return out.reshape(q.shape), pages

    def _attend_short(
        self,
        q: jax.Array,
        pages: GpuPages,
        work: GpuWork,
        base: jax.Array,
        masking: Masking,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """Attends for tokens of short sequences; [T, H, G, D], of which other tokens' rows mean nothing."""
        blocks, num_kv_heads = work.decode_blocks, q.shape[1]
        plan = work.plan
        if masking.window is not None or num_kv_heads != work.planned_heads:
            plan = plan_decode(work.short.tiles, num_kv_heads, blocks, masking.window)
        tiles = _pack(q, work.short, blocks.columns)
        k, v = _by_head(pages)
        o, lse = decode_partials(tiles, k, v, work.page_table, base, plan, blocks, masking, self.interpret)
        columns = None if sinks is None else _repeat_rows(sinks, blocks.columns)
        out = merge_partials(o, lse, plan, columns, num_kv_heads, q.dtype, self.interpret)  # [tiles, H, D, N]
        tile, head, row = _places(work.short, num_kv_heads, self.group)
        return out.at[tile, head, :, row].get(mode="promise_in_bounds")

    def _attend_long(
        self,
        q: jax.Array,
        pages: GpuPages,
        work: GpuWork,
        base: jax.Array,
        masking: Masking,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """Attends for tokens of long sequences; [T, H, G, D], of which other tokens' rows mean nothing."""
        assert work.long is not None
        blocks, num_kv_heads = work.prefill_blocks, q.shape[1]
        plan = plan_prefill(work.long.tiles, blocks, masking.window)
        tiles = _pack(q, work.long, blocks.rows)
        rows = None if sinks is None else _repeat_rows(sinks, blocks.rows)
        k, v = _by_head(pages)
        out = prefill(tiles, k, v, work.page_table, base, plan, rows, blocks, masking, self.interpret)
        tile, head, row = _places(work.long, num_kv_heads, self.group)
        return out.at[tile, head, row].get(mode="promise_in_bounds")

    # Whole pages are moved by XLA, in LayerMajorMoves: its gathers and in-place scatters of long rows leave a kernel
    # nothing to gain, and they are split among devices by themselves.

    def pack_pages(self, k: np.ndarray, v: np.ndarray) -> GpuPages:
        return GpuPages(*(jnp.asarray(x).swapaxes(2, 3) for x in (k, v)))

    def unpack_pages(self, pages: GpuPages, spec: PageSpec) -> tuple[np.ndarray, np.ndarray]:
        k, v = (np.asarray(x).swapaxes(2, 3) for x in (pages.k, pages.v))
        return k, v

    def page_sharding(self, spec: PageSpec, axis_name: str) -> GpuPages:
        split = PartitionSpec(None, None, axis_name, None, None)
        return GpuPages(k=split, v=split)  # pyright: ignore[reportArgumentType]


def _tile_class(batch: AttentionBatch, in_class: jax.Array, width: int, most: int, num_tokens: int) -> TileClass:
    shape = TileShape(min_tokens=1, max_tokens=EVERY_LENGTH, width=width, chunk_tokens=0, group_items=0)
    tiles = cut_tiles(shape, batch, in_class, max(most, 1))
    rows = tiles.first_row[:, None] + jnp.arange(width, dtype=jnp.int32)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    started = (tiles.length > 0) & (tiles.first_row <= token[:, None])
    tile = jnp.maximum(jnp.sum(started, axis=1, dtype=jnp.int32) - 1, 0)
    offset = token - tiles.first_row[tile]
    used = started[:, 0] & (offset < tiles.length[tile])
    places = TokenPlaces(tile, jnp.clip(offset, 0, width - 1), used)
    return TileClass(tiles, jnp.minimum(rows, num_tokens - 1), places)


def _pack(q: jax.Array, tile_class: TileClass, rows: int) -> jax.Array:
    """Queries [T, H, G, D] to tiles [tiles, H, rows, D]: row r is token r // G, query head r % G."""
    tokens = q.at[tile_class.tokens].get(mode="promise_in_bounds")  # [tiles, W, H, G, D]
    packed = tokens.swapaxes(1, 2).reshape(len(tokens), q.shape[1], -1, q.shape[3])
    return jnp.pad(packed, ((0, 0), (0, 0), (0, rows - packed.shape[2]), (0, 0)))


def _places(tile_class: TileClass, num_kv_heads: int, group: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where the rows of [T, H, G] lie among tiles: tile, head and row."""
    places = tile_class.places
    head = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    row = places.offset[:, None, None] * group + jnp.arange(group, dtype=jnp.int32)
    return places.tile[:, None, None], head, row


def _repeat_rows(sinks: jax.Array, rows: int) -> jax.Array:
    """Sinks [H, G] to [H, rows]: row r is query head r % G."""
    repeats = -(-rows // sinks.shape[1])
    return jnp.tile(sinks, (1, repeats))[:, :rows]


def _by_head(pages: GpuPages) -> tuple[jax.Array, jax.Array]:
    """The pools as [L * P * H, page_size, D]."""
    k, v = (x.reshape(-1, *x.shape[3:]) for x in (pages.k, pages.v))
    return k, v

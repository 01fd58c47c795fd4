"""Paged attention in plain XLA: runs everywhere, and is what serves where no kernel exists.

The work of a step is cut into items: a tile of one sequence's query tokens against a chunk of its KV tokens. Items
are listed tile by tile and processed in groups, in a loop whose trip count follows the true lengths, so that neither
long tables nor padding cost anything. Tiles have three widths: decode rows, verification spans, prefill chunks.
Partial softmax results are merged as in Flash Attention (arXiv 2205.14135) and Flash-Decoding; a tile that goes on in
the next group hands its state over, so memory does not grow with the context.

Letters in shapes: T tokens, S sequences, N page ids, Hq query heads, H KV heads, G query heads per KV head,
D head_dim; B items of a group, R tiles a group may touch, W tokens of a tile, C KV tokens of a chunk, M = W * G.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels.paged_attention.api import AttentionBatch, PageSpec
from pallas_kernels.paged_attention.moves import LayerMajorMoves, at_least_two
from pallas_kernels.paged_attention.tiles import Tiles, TileShape, cut_tiles, token_places

# Below every real logit, yet finite: exp(-inf - FLOOR) is 0, where exp(-inf - -inf) would be nan.
FLOOR = -1e30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class XlaPages:
    """The pool: K and V, [num_layers, num_pages + 1, H, page_size * D] each.

    As host pages the same, with axes [N, num_layers, H, page_size * D]. Token and channel share one axis because XLA's
    CPU gather is twice as fast on long rows.
    """

    k: jax.Array
    v: jax.Array


DECODE = TileShape(min_tokens=1, max_tokens=1, width=1, chunk_tokens=64, group_items=32)
SPAN = TileShape(min_tokens=1, max_tokens=8, width=8, chunk_tokens=64, group_items=8)
PREFILL = TileShape(min_tokens=9, max_tokens=2**31 - 1, width=64, chunk_tokens=128, group_items=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class XlaWork:
    """What all layers of one step share."""

    token_pages: jax.Array  # int32 [T]: the page each token's K and V go to
    token_offsets: jax.Array  # int32 [T]: and the place within it
    page_table: jax.Array  # int32 [S, pages_per_seq]
    decode: Tiles
    span: Tiles
    prefill: Tiles


@dataclass(frozen=True)
class _Call:
    """The arguments of one `attend` that all its tile classes read."""

    q: jax.Array  # [T, H, G, D]
    pages: XlaPages
    page_table: jax.Array
    layer: jax.Array | int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: jax.Array | None  # [H, G]

    @property
    def page_size(self) -> int:
        return self.pages.k.shape[3] // self.q.shape[3]


@dataclass(frozen=True)
class _Sizes:
    """The static sizes of one tile class."""

    tiles: int
    width: int  # W
    chunk_pages: int
    chunk: int  # C
    items: int  # B
    slots: int  # R

    @classmethod
    def of(cls, shape: TileShape, tiles: Tiles, num_tokens: int, page_size: int) -> "_Sizes":
        num_tiles = tiles.length.shape[0]
        chunk_pages = -(-shape.chunk_tokens // page_size)
        # A few rows should not pay for many; yet a single long one still fills a group of eight.
        items = min(shape.group_items, max(num_tiles, 8))
        width = min(shape.width, num_tokens)
        return cls(num_tiles, width, chunk_pages, chunk_pages * page_size, items, min(items, num_tiles))


@dataclass(frozen=True)
class _Items:
    """One group of items; arrays lead with axis B. Items past the last see nothing: their `end` is 0."""

    tile: jax.Array  # [B]
    slot: jax.Array  # [B]: the tile's place among the group's R tiles, which start with tile `base`
    base: jax.Array  # []
    first_row: jax.Array  # [B]: of the tile's tokens in the flat batch
    first_position: jax.Array  # [B]
    first_seen: jax.Array  # [B]: the tile sees KV positions first_seen .. end
    end: jax.Array  # [B]
    page_starts: jax.Array  # [B, chunk pages]: position of each page's first slot
    page_ids: jax.Array  # [B, chunk pages]


class _Softmax(NamedTuple):
    """A softmax in progress for some tiles: sums are relative to exp(top)."""

    top: jax.Array  # [tiles, H, M]
    total: jax.Array  # [tiles, H, M]
    weighted: jax.Array  # [tiles, H, M, D]


def _rows_of(table: jax.Array, index: jax.Array) -> jax.Array:
    """table[index] for an index known to be in bounds, without the checks."""
    return table.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _tile_table(call: _Call, tiles: Tiles, chunk: int) -> tuple[jax.Array, jax.Array]:
    """What `_items_of` needs of each tile, int32 [num_tiles, 6], and the number of items up to and with each tile."""
    ends = tiles.first_position + tiles.length
    first_seen = jnp.zeros_like(ends)
    if call.window is not None:
        first_seen = jnp.maximum(tiles.first_position - call.window + 1, 0)
    first_chunks = first_seen // chunk
    counts = jnp.where(tiles.length > 0, -(-ends // chunk) - first_chunks, 0)
    item_ends = jnp.cumsum(counts)
    chunk_offsets = first_chunks - (item_ends - counts)  # chunk of an item minus the item's number
    columns = (tiles.sequence, tiles.first_row, tiles.first_position, first_seen, ends, chunk_offsets)
    return jnp.stack(columns, axis=1), item_ends


def _items_of(call: _Call, sizes: _Sizes, table: jax.Array, item_ends: jax.Array, group: jax.Array) -> _Items:
    item = group * sizes.items + jnp.arange(sizes.items, dtype=jnp.int32)
    tile = jnp.sum(item_ends <= item[:, None], axis=1, dtype=jnp.int32)
    active = tile < sizes.tiles
    tile = jnp.minimum(tile, sizes.tiles - 1)
    base = jnp.minimum(tile[0], sizes.tiles - sizes.slots)
    sequence, first_row, first_position, first_seen, end, chunk_offset = _rows_of(table, tile).T
    page_slot = (item + chunk_offset)[:, None] * sizes.chunk_pages + jnp.arange(sizes.chunk_pages, dtype=jnp.int32)
    page_starts = page_slot * call.page_size
    # Pages past the end are not read: the last one, already in the cache, stands in for them.
    page_slot = jnp.clip(page_slot, 0, jnp.maximum(end - 1, 0)[:, None] // call.page_size)
    return _Items(
        tile=tile,
        slot=jnp.minimum(tile - base, sizes.slots - 1),
        base=base,
        first_row=first_row,
        first_position=first_position,
        first_seen=first_seen,
        end=jnp.where(active, end, 0),
        page_starts=page_starts,
        page_ids=_rows_of(call.page_table.reshape(-1), sequence[:, None] * call.page_table.shape[1] + page_slot),
    )


def _gather_kv(call: _Call, items: _Items) -> tuple[jax.Array, jax.Array]:
    """K and V of the items' pages, head by head: [B, H, C, D]. V is zero where the tile sees nothing.

    A slot nobody sees may hold nan: its logit is masked, but its value would meet a weight of 0, and 0 * nan is nan.
    """
    _, num_pages, num_heads, row = call.pages.k.shape
    head_dim = row // call.page_size
    pages = (call.layer * num_pages + items.page_ids)[:, None, :]
    rows = pages * num_heads + jnp.arange(num_heads, dtype=jnp.int32)[:, None]
    first, end = (
        ((x[:, None] - items.page_starts) * head_dim)[:, None, :, None] for x in (items.first_seen, items.end)
    )
    # The barriers keep the gathers plain copies of rows: fused with what makes their indices or with what reads them
    # they are many times slower on CPU. The mask of V costs next to nothing inside one, and a pass over V outside.
    rows, first, end = lax.optimization_barrier((rows, first, end))
    k, v = (_rows_of(x.reshape(-1, row), rows) for x in (call.pages.k, call.pages.v))
    place = jnp.arange(row, dtype=jnp.int32)
    v = jnp.where(place < end if call.window is None else (place >= first) & (place < end), v, 0)
    k, v = lax.optimization_barrier((k, v))
    shape = (len(items.tile), num_heads, -1, head_dim)
    return k.reshape(shape), v.reshape(shape)


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product with float32 sums, in the operands' common precision."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.einsum(
        equation, a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=jnp.float32
    )


def _logits(call: _Call, sizes: _Sizes, items: _Items, q: jax.Array, k: jax.Array, rows: jax.Array) -> jax.Array:
    """Masked logits, [B, H, M, C], for the queries [B, H, M, D] of batch rows [B, W]; -inf where nothing is seen."""
    kv = (items.page_starts[:, :1] + jnp.arange(sizes.chunk, dtype=jnp.int32))[:, None, :]
    visible = kv < items.end[:, None, None]  # [B, W or 1, C]
    if sizes.width > 1:
        position = (items.first_position[:, None] + rows - items.first_row[:, None])[:, :, None]
        visible &= kv <= position
        if call.window is not None:
            visible &= kv > position - call.window
    elif call.window is not None:
        visible &= kv >= items.first_seen[:, None, None]
    logits = _dot("bhmd,bhcd->bhmc", q, k) * call.scale
    if call.soft_cap is not None:
        logits = call.soft_cap * jnp.tanh(logits / call.soft_cap)
    by_token = logits.reshape(*logits.shape[:2], sizes.width, -1, sizes.chunk)
    return jnp.where(visible[:, None, :, None, :], by_token, -jnp.inf).reshape(logits.shape)


def _fresh(call: _Call, tiles: int, width: int) -> _Softmax:
    """Tiles that have seen nothing but the sinks."""
    _, H, G, D = call.q.shape
    shape = (tiles, H, width * G)
    # full_like: under shard_map a loop's carry must vary over the mesh as the queries do.
    top, total = (lax.full_like(call.q, value, jnp.float32, shape) for value in (FLOOR, 0.0))
    if call.sinks is not None:
        top = jnp.broadcast_to(jnp.tile(call.sinks, (1, width)), shape)
        total = lax.full_like(call.q, 1.0, jnp.float32, shape)
    return _Softmax(top, total, lax.full_like(call.q, 0.0, jnp.float32, (*shape, D)))


def _merge(before: _Softmax, items: _Items, in_slot: jax.Array, logits: jax.Array, v: jax.Array, dtype) -> _Softmax:
    """Takes the items' logits and values into the group's R tiles; bool [R, B] `in_slot` says which tile is whose."""
    item_top = jnp.where(in_slot[:, :, None, None], jnp.max(logits, axis=-1), FLOOR)
    top = jnp.maximum(before.top, jnp.max(item_top, axis=1))
    weights = jnp.exp(logits - _rows_of(top, items.slot)[..., None])
    decay = jnp.exp(before.top - top)
    merge = in_slot.astype(jnp.float32)
    weighted = _dot("bhmc,bhcd->bhmd", weights.astype(dtype), v)
    return _Softmax(
        top,
        decay * before.total + _dot("rb,bhm->rhm", merge, jnp.sum(weights, axis=-1)),
        decay[..., None] * before.weighted + _dot("rb,bhmd->rhmd", merge, weighted),
    )


def _attend_tiles(call: _Call, shape: TileShape, tiles: Tiles, out: jax.Array) -> jax.Array:
    """Attends for all tiles of one class and writes their rows of `out`, [T, H, G, D] in q's dtype."""
    num_tokens, H, G, D = call.q.shape
    sizes = _Sizes.of(shape, tiles, num_tokens, call.page_size)
    table, item_ends = _tile_table(call, tiles, sizes.chunk)

    def group_step(group: jax.Array, carry: tuple) -> tuple:
        out, unfinished, state = carry
        items = _items_of(call, sizes, table, item_ends, group)
        first_row = jnp.minimum(items.first_row, num_tokens - sizes.width)
        rows = first_row[:, None] + jnp.arange(sizes.width, dtype=jnp.int32)
        # The queries of one KV head are the rows of one matrix: [B, H, M, D].
        q = _rows_of(call.q, rows).swapaxes(1, 2).reshape(sizes.items, H, -1, D)
        k, v = _gather_kv(call, items)
        logits = _logits(call, sizes, items, q, k, rows)

        slots = jnp.arange(sizes.slots, dtype=jnp.int32)
        resumed = (slots == items.slot[0]) & (items.tile[0] == unfinished)
        before = jax.tree.map(
            lambda old, new: jnp.where(resumed.reshape(-1, *(1,) * (new.ndim - 1)), old, new),
            state,
            _fresh(call, sizes.slots, sizes.width),
        )
        in_slot = (slots[:, None] == items.slot) & (items.end > 0)
        after = _merge(before, items, in_slot, logits, v, jnp.promote_types(call.q.dtype, v.dtype))

        result = after.weighted / jnp.where(after.total > 0, after.total, 1.0)[..., None]
        result = result.reshape(sizes.slots, H, sizes.width, G, D).swapaxes(1, 2).astype(out.dtype)
        out = _write_rows(out, result, items.base, jnp.any(in_slot, axis=1), tiles)
        state = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, items.slot[-1], 1), after)
        return out, items.tile[-1], state

    num_groups = (item_ends[-1] + sizes.items - 1) // sizes.items
    carry = (out, jnp.int32(-1), _fresh(call, 1, sizes.width))
    return lax.fori_loop(0, num_groups, group_step, carry)[0]


def _write_rows(out: jax.Array, result: jax.Array, base: jax.Array, touched: jax.Array, tiles: Tiles) -> jax.Array:
    """Writes the rows, [R, W, H, G, D], of tiles base .. base + R into `out` where bool [R] `touched` holds."""
    num_tokens, (slots, width) = out.shape[0], result.shape[:2]
    if width == 1 and slots > 1:  # decode rows come first: a tile's number is its row
        old = lax.dynamic_slice_in_dim(out, base, slots)
        new = jnp.where(touched[:, None, None, None], result[:, 0], old)
        return lax.dynamic_update_slice_in_dim(out, new, base, 0)

    def write_tile(slot: jax.Array, out: jax.Array) -> jax.Array:
        first, length = tiles.first_row[base + slot], tiles.length[base + slot]
        start = jnp.minimum(first, num_tokens - width)
        row = start + jnp.arange(width, dtype=jnp.int32)
        keep = touched[slot] & (row >= first) & (row < first + length)
        new = jnp.where(keep[:, None, None, None], result[slot], lax.dynamic_slice_in_dim(out, start, width))
        return lax.dynamic_update_slice_in_dim(out, new, start, 0)

    return lax.fori_loop(0, slots, write_tile, out)


def _write_tokens(pages: XlaPages, k: jax.Array, v: jax.Array, work: XlaWork, layer: jax.Array | int) -> XlaPages:
    """Writes K and V, [T, H, D], to the tokens' places, in the pages' dtype."""

    def write(pool: jax.Array, new: jax.Array) -> jax.Array:
        layers, num_pages, num_heads, row = pool.shape
        where = jnp.stack([layer * num_pages + work.token_pages, work.token_offsets * new.shape[2]], axis=1)
        where, new = at_least_two(where, new)
        written = lax.scatter(
            pool.reshape(layers * num_pages, num_heads, row),
            where,
            new.astype(pool.dtype),
            lax.ScatterDimensionNumbers(
                update_window_dims=(1, 2), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 2)
            ),
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )
        return written.reshape(pool.shape)

    return XlaPages(k=write(pages.k, k), v=write(pages.v, v))


class XlaPagedAttention(LayerMajorMoves):
    """PagedAttention for every platform; see the module's docstring."""

    def make_pages(self, spec: PageSpec) -> XlaPages:
        shape = (spec.num_layers, spec.num_pages + 1, spec.num_kv_heads, spec.page_size_tokens * spec.head_dim)
        return XlaPages(k=jnp.zeros(shape, spec.dtype), v=jnp.zeros(shape, spec.dtype))

    def make_work(self, batch: AttentionBatch, num_tokens: int, spec: PageSpec) -> XlaWork:
        num_seqs = batch.kv_lens.shape[0]
        q_lens = jnp.diff(batch.cu_q_lens)
        index = jnp.arange(num_seqs, dtype=jnp.int32)
        is_decode = index < batch.num_decode
        is_span = ~is_decode & (q_lens <= SPAN.max_tokens)
        is_prefill = ~is_decode & (q_lens > SPAN.max_tokens)
        most = min(num_seqs, num_tokens)
        longest = min(num_seqs, num_tokens // PREFILL.min_tokens)  # sequences that may be in the prefill class
        prefill_tiles = max(1, (num_tokens + longest * (PREFILL.width - 1)) // PREFILL.width)
        token_pages, token_offsets = token_places(batch, num_tokens, spec)
        return XlaWork(
            token_pages=token_pages,
            token_offsets=token_offsets,
            page_table=batch.page_table,
            decode=cut_tiles(DECODE, batch, is_decode, most),
            span=cut_tiles(SPAN, batch, is_span, most),
            prefill=cut_tiles(PREFILL, batch, is_prefill, prefill_tiles),
        )

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pages: XlaPages,
        work: XlaWork,
        *,
        layer: jax.Array | int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, XlaPages]:
        num_tokens, num_q_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        group = num_q_heads // num_kv_heads
        pages = _write_tokens(pages, k, v, work, layer)
        call = _Call(
            q=q.reshape(num_tokens, num_kv_heads, group, head_dim),
            pages=pages,
            page_table=work.page_table,
            layer=layer,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=None if sinks is None else sinks.astype(jnp.float32).reshape(num_kv_heads, group),
        )
        out = jnp.zeros_like(call.q)
        out = _attend_tiles(call, DECODE, work.decode, out)
        out = _attend_tiles(call, SPAN, work.span, out)
        if num_tokens >= PREFILL.min_tokens:
            out = _attend_tiles(call, PREFILL, work.prefill, out)
        return out.reshape(q.shape), pages

    def pack_pages(self, k: np.ndarray, v: np.ndarray) -> XlaPages:
        layers, num_pages, _, num_heads, _ = k.shape
        packed = [jnp.asarray(x).swapaxes(2, 3).reshape(layers, num_pages, num_heads, -1) for x in (k, v)]
        return XlaPages(*packed)

    def unpack_pages(self, pages: XlaPages, spec: PageSpec) -> tuple[np.ndarray, np.ndarray]:
        k, v = (
            np.asarray(x).reshape(*x.shape[:3], spec.page_size_tokens, spec.head_dim).swapaxes(2, 3)
            for x in (pages.k, pages.v)
        )
        return k, v

    def page_sharding(self, spec: PageSpec, axis_name: str) -> XlaPages:
        split = PartitionSpec(None, None, axis_name, None)
        return XlaPages(k=split, v=split)  # pyright: ignore[reportArgumentType]

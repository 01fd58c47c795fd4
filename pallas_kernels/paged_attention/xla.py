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

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels.paged_attention.api import AttentionBatch, PageSpec

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


@dataclass(frozen=True)
class TileShape:
    """How one class of sequences is cut up: static."""

    min_tokens: int  # the class: sequences with min_tokens .. max_tokens tokens in this step
    max_tokens: int
    width: int  # query tokens of a tile
    chunk_tokens: int  # KV tokens of an item, at least; rounded up to whole pages
    group_items: int  # items processed together, at most


DECODE = TileShape(min_tokens=1, max_tokens=1, width=1, chunk_tokens=64, group_items=32)
SPAN = TileShape(min_tokens=1, max_tokens=8, width=8, chunk_tokens=64, group_items=8)
PREFILL = TileShape(min_tokens=9, max_tokens=2**31 - 1, width=64, chunk_tokens=256, group_items=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """The query tiles of one class, in token order; all int32 [num_tiles], unused entries last with length 0."""

    sequence: jax.Array
    first_row: jax.Array  # of the flat token batch
    first_position: jax.Array
    length: jax.Array  # tokens


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


def _tiles(shape: TileShape, batch: AttentionBatch, in_class: jax.Array, max_tiles: int) -> Tiles:
    """Cuts the sequences where bool [S] `in_class` holds into tiles of `shape.width` tokens."""
    q_lens = jnp.diff(batch.cu_q_lens)
    counts = jnp.where(in_class, -(-q_lens // shape.width), 0)
    ends = jnp.cumsum(counts)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    sequence = jnp.sum(ends <= tile[:, None], axis=1, dtype=jnp.int32)
    used = sequence < q_lens.shape[0]
    sequence = jnp.minimum(sequence, q_lens.shape[0] - 1)
    first = (tile - (ends - counts)[sequence]) * shape.width
    return Tiles(
        sequence=sequence,
        first_row=jnp.where(used, batch.cu_q_lens[sequence] + first, 0),
        first_position=jnp.where(used, (batch.kv_lens - q_lens)[sequence] + first, 0),
        length=jnp.where(used, jnp.minimum(q_lens[sequence] - first, shape.width), 0),
    )


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
class _Items:
    """One group of items; arrays lead with axis B."""

    tile: jax.Array  # [B]
    slot: jax.Array  # [B]: the tile's place among the R tiles of the group
    active: jax.Array  # [B]
    kv_positions: jax.Array  # [B, C]
    page_starts: jax.Array  # [B, pages of a chunk]: position of each page's first slot
    page_ids: jax.Array  # [B, pages of a chunk]


def _gather_kv(call: _Call, page_ids: jax.Array, held: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """K and V of pages [B, n], head by head: [B, H, n * page_size, D].

    V is zero outside slots held[0] .. held[1], each [B, n], of a page: others may hold nan, and 0 * nan is nan.
    """
    _, num_pages, num_heads, row = call.pages.k.shape
    head_dim = row // call.page_size
    batch, n = page_ids.shape
    pages = (call.layer * num_pages + page_ids)[:, None, :]
    rows = pages * num_heads + jnp.arange(num_heads, dtype=jnp.int32)[:, None]
    # The barriers keep the gathers plain copies of rows: fused with what makes their indices or with what reads them
    # they are many times slower on CPU. The mask of V costs next to nothing inside one, and a pass over V outside.
    rows, first, end = lax.optimization_barrier((rows, *(x[:, None, :, None] * head_dim for x in held)))
    k, v = (x.reshape(-1, row).at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False) for x in (call.pages.k, call.pages.v))
    place = jnp.arange(row, dtype=jnp.int32)
    v = jnp.where((place >= first) & (place < end) if call.window is not None else place < end, v, 0)
    k, v = lax.optimization_barrier((k, v))
    shape = (batch, num_heads, n * call.page_size, head_dim)
    return k.reshape(shape), v.reshape(shape)


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product with float32 sums, in the operands' common precision."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.einsum(
        equation, a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=jnp.float32
    )


def _attend_tiles(call: _Call, shape: TileShape, tiles: Tiles, out: jax.Array) -> jax.Array:
    """Attends for all tiles of one class and writes their rows of `out`, [T, H, G, D] in q's dtype."""
    num_tokens, H, G, D = call.q.shape
    num_tiles = tiles.length.shape[0]
    width = min(shape.width, num_tokens)
    pages_per_chunk = -(-shape.chunk_tokens // call.page_size)
    chunk = pages_per_chunk * call.page_size
    num_items = min(shape.group_items, max(num_tiles, 8))
    num_slots = min(num_items, num_tiles)
    M = width * G

    ends = tiles.first_position + tiles.length  # the tile sees KV positions below
    first_chunks = jnp.zeros_like(ends)
    if call.window is not None:
        first_chunks = jnp.maximum(tiles.first_position - call.window + 1, 0) // chunk
    counts = jnp.where(tiles.length > 0, -(-ends // chunk) - first_chunks, 0)
    item_ends = jnp.cumsum(counts)

    def items_of(group: jax.Array, first_tile_limit: int) -> tuple[_Items, jax.Array]:
        item = group * num_items + jnp.arange(num_items, dtype=jnp.int32)
        tile = jnp.sum(item_ends <= item[:, None], axis=1, dtype=jnp.int32)
        active = tile < num_tiles
        tile = jnp.minimum(tile, num_tiles - 1)
        base = jnp.minimum(tile[0], first_tile_limit)
        chunk_index = first_chunks[tile] + item - (item_ends - counts)[tile]
        page_slot = chunk_index[:, None] * pages_per_chunk + jnp.arange(pages_per_chunk, dtype=jnp.int32)
        page_starts = page_slot * call.page_size
        # Pages past the end are not read: the last one, already in the cache, stands in for them.
        page_slot = jnp.clip(page_slot, 0, jnp.maximum(ends[tile] - 1, 0)[:, None] // call.page_size)
        items = _Items(
            tile=tile,
            slot=jnp.minimum(tile - base, num_slots - 1),
            active=active,
            kv_positions=chunk_index[:, None] * chunk + jnp.arange(chunk, dtype=jnp.int32),
            page_starts=page_starts,
            page_ids=call.page_table.at[tiles.sequence[tile][:, None], page_slot].get(mode="promise_in_bounds"),
        )
        return items, base

    # full_like: under shard_map a loop's carry must vary over the mesh as the queries do.
    def initial(slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        top = lax.full_like(call.q, FLOOR, jnp.float32, (slots, H, M))
        total = lax.full_like(call.q, 0.0, jnp.float32, (slots, H, M))
        if call.sinks is not None:
            top = jnp.broadcast_to(jnp.tile(call.sinks, (1, width)), (slots, H, M)) + total
            total = total + 1.0
        return top, total, lax.full_like(call.q, 0.0, jnp.float32, (slots, H, M, D))

    def group_step(group: jax.Array, carry: tuple) -> tuple:
        out, going_on, *state = carry
        items, base = items_of(group, num_tiles - num_slots)
        rows = jnp.minimum(tiles.first_row[items.tile], num_tokens - width)[:, None] + jnp.arange(width)
        positions = tiles.first_position[items.tile][:, None] + rows - tiles.first_row[items.tile][:, None]
        # [B, H, M, D]: the queries of one KV head are the rows of one matrix
        q = call.q.at[rows].get(mode="promise_in_bounds").transpose(0, 2, 1, 3, 4).reshape(num_items, H, M, D)
        seen_end = jnp.where(items.active, ends[items.tile], 0)[:, None]
        first_seen = jnp.zeros_like(seen_end)
        if call.window is not None:
            first_seen = tiles.first_position[items.tile][:, None] - call.window + 1
        k, v = _gather_kv(call, items.page_ids, (first_seen - items.page_starts, seen_end - items.page_starts))

        readable = (items.kv_positions < seen_end) & (items.kv_positions >= first_seen)  # [B, C]
        visible = readable[:, None, :]  # [B, W, C]
        if width > 1:
            visible &= items.kv_positions[:, None, :] <= positions[:, :, None]
            if call.window is not None:
                visible &= items.kv_positions[:, None, :] > positions[:, :, None] - call.window
        visible = jnp.repeat(visible, M // visible.shape[1], axis=1)[:, None]  # [B, 1, M, C]

        logits = _dot("bhmd,bhcd->bhmc", q, k) * call.scale
        if call.soft_cap is not None:
            logits = call.soft_cap * jnp.tanh(logits / call.soft_cap)
        logits = jnp.where(visible, logits, -jnp.inf)

        # The group's tiles: the first may go on from the group before.
        resumed = (jnp.arange(num_slots) == items.slot[0]) & (items.tile[0] == going_on)
        resumed = resumed.reshape(-1, 1, 1)
        top, total, weighted = initial(num_slots)
        top = jnp.where(resumed, state[0], top)
        total = jnp.where(resumed, state[1], total)
        weighted = jnp.where(resumed[..., None], state[2], weighted)

        in_slot = (items.slot == jnp.arange(num_slots)[:, None]) & items.active  # [R, B]
        item_top = jnp.max(logits, axis=-1)
        new_top = jnp.maximum(
            top, jnp.max(jnp.where(in_slot[:, :, None, None], item_top, FLOOR), axis=1)
        )
        weights = jnp.exp(logits - new_top[items.slot][..., None])
        item_total = jnp.sum(weights, axis=-1)
        item_weighted = _dot("bhmc,bhcd->bhmd", weights.astype(jnp.promote_types(q.dtype, v.dtype)), v)
        decay = jnp.exp(top - new_top)
        merge = in_slot.astype(jnp.float32)
        total = decay * total + _dot("rb,bhm->rhm", merge, item_total)
        weighted = decay[..., None] * weighted + _dot("rb,bhmd->rhmd", merge, item_weighted)

        result = weighted / jnp.where(total > 0, total, 1.0)[..., None]
        result = result.reshape(num_slots, H, width, G, D).transpose(0, 2, 1, 3, 4).astype(out.dtype)
        touched = jnp.any(in_slot, axis=1)
        out = _write_rows(out, result, base, touched, tiles, width)
        last = items.slot[-1]
        state = [lax.dynamic_slice_in_dim(x, last, 1) for x in (new_top, total, weighted)]
        return (out, items.tile[-1], *state)

    num_groups = -(-item_ends[-1] // num_items)
    carry = (out, jnp.int32(-1), *initial(1))
    return lax.fori_loop(0, num_groups, group_step, carry)[0]


def _write_rows(
    out: jax.Array, result: jax.Array, base: jax.Array, touched: jax.Array, tiles: Tiles, width: int
) -> jax.Array:
    """Writes the rows [R, W, H, G, D] of tiles base .. base + R into `out`, where they are touched."""
    num_tokens, num_slots = out.shape[0], result.shape[0]
    if width == 1 and num_slots > 1:  # decode rows come first: a tile's number is its row
        start, result, keep = base, result[:, 0], touched
        old = lax.dynamic_slice_in_dim(out, start, num_slots)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(keep[:, None, None, None], result, old), start, 0)
    for slot in range(num_slots):
        first = tiles.first_row[base + slot]
        start = jnp.minimum(first, num_tokens - width)
        row = start + jnp.arange(width)
        keep = touched[slot] & (row >= first) & (row < first + tiles.length[base + slot])
        old = lax.dynamic_slice_in_dim(out, start, width)
        new = jnp.where(keep[:, None, None, None], result[slot], old)
        out = lax.dynamic_update_slice_in_dim(out, new, start, 0)
    return out


class XlaPagedAttention:
    """PagedAttention for every platform; see the module's docstring."""

    def make_pages(self, spec: PageSpec) -> XlaPages:
        shape = (spec.num_layers, spec.num_pages + 1, spec.num_kv_heads, spec.page_size_tokens * spec.head_dim)
        return XlaPages(k=jnp.zeros(shape, spec.dtype), v=jnp.zeros(shape, spec.dtype))

    def make_work(self, batch: AttentionBatch, num_tokens: int, spec: PageSpec) -> XlaWork:
        num_seqs = batch.kv_lens.shape[0]
        q_lens = jnp.diff(batch.cu_q_lens)
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        sequence = jnp.sum(batch.cu_q_lens[1:] <= token[:, None], axis=1, dtype=jnp.int32)
        used = sequence < num_seqs
        sequence = jnp.minimum(sequence, num_seqs - 1)
        position = jnp.where(used, (batch.kv_lens - q_lens - batch.cu_q_lens[:-1])[sequence] + token, 0)
        page = batch.page_table[sequence, position // spec.page_size_tokens]

        index = jnp.arange(num_seqs, dtype=jnp.int32)
        is_decode = index < batch.num_decode
        is_span = ~is_decode & (q_lens <= SPAN.max_tokens)
        is_prefill = ~is_decode & (q_lens > SPAN.max_tokens)
        most = min(num_seqs, num_tokens)
        longest = min(num_seqs, num_tokens // PREFILL.min_tokens)  # sequences that may be in the prefill class
        prefill_tiles = max(1, (num_tokens + longest * (PREFILL.width - 1)) // PREFILL.width)
        return XlaWork(
            token_pages=jnp.where(used, page, spec.scratch_page),
            token_offsets=position % spec.page_size_tokens,
            page_table=batch.page_table,
            decode=_tiles(DECODE, batch, is_decode, most),
            span=_tiles(SPAN, batch, is_span, most),
            prefill=_tiles(PREFILL, batch, is_prefill, prefill_tiles),
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

    def copy_pages(self, pages: XlaPages, source_ids: jax.Array, target_ids: jax.Array) -> XlaPages:
        return jax.tree.map(lambda x: x.at[:, target_ids].set(x[:, source_ids]), pages)

    def read_pages(self, pages: XlaPages, ids: jax.Array) -> XlaPages:
        return jax.tree.map(lambda x: x[:, ids].swapaxes(0, 1), pages)

    def write_pages(self, pages: XlaPages, ids: jax.Array, host_pages: XlaPages) -> XlaPages:
        return jax.tree.map(lambda x, new: x.at[:, ids].set(new.swapaxes(0, 1)), pages, host_pages)

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


def _write_tokens(
    pages: XlaPages, k: jax.Array, v: jax.Array, work: XlaWork, layer: jax.Array | int
) -> XlaPages:
    """Writes K and V, [T, H, D], to the tokens' places, in the pages' dtype."""

    def write(pool: jax.Array, new: jax.Array) -> jax.Array:
        layers, num_pages, num_heads, row = pool.shape
        where = jnp.stack([layer * num_pages + work.token_pages, work.token_offsets * new.shape[2]], axis=1)
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

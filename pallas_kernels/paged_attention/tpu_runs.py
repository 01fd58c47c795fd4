"""The TPU kernel for runs of tokens: verification spans, prompt chunks.

A run's queries lie in tiles of 16 tokens and its new K and V in slabs (`tpu_layout`). An item is one pass over the KV
for a block of a run's queries: over its context, read from pages, and causally over the run itself, read from where
the new tokens are laid out. So no read waits for a write: the new slabs go to their pages meanwhile, and not through
VMEM. The one exception is the edge, a slab that holds both old and new tokens: it is put together in VMEM and written
by the last item that reads it.

Letters in shapes: S sequences, M rows of queries (tokens x grouped heads), C KV tokens of a product, R rows of a slab,
G query heads per KV head.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_layout import LANES, TILE_TOKENS
from pallas_kernels.paged_attention.tpu_stream import (
    FLOOR,
    Launch,
    Pool,
    attend_products,
    cdiv,
    div,
    load_kv,
    rem,
    result,
    token_mask,
    wait_bytes_of,
    when,
    zero_tail,
)


def runs_kernel(launch: Launch, *refs: Any) -> None:
    """`refs` are the fields of `_Runs`, in order."""
    _Runs(launch, *refs).run()


@dataclass(frozen=True)
class _Item:
    """A block of a run's queries. All but `launch` are traced int32 scalars."""

    launch: Launch
    run: Any  # its number in the launch
    sequence: Any
    number: Any  # the block's, in the run
    context: Any  # tokens in the pages already
    q_len: Any  # tokens of the whole run
    run_tile: Any  # the run's first tile
    run_slab: Any  # the run's first slab of new tokens

    @property
    def first_position(self) -> Any:
        return self.context + self.number * self.launch.q_tokens

    @property
    def length(self) -> Any:
        return jnp.minimum(self.q_len - self.number * self.launch.q_tokens, self.launch.q_tokens)

    @property
    def is_last(self) -> Any:
        return (self.number + 1) * self.launch.q_tokens >= self.q_len

    @property
    def num_tiles(self) -> Any:
        return cdiv(self.length, TILE_TOKENS)

    @property
    def tiles(self) -> Any:
        return pl.ds(self.run_tile + self.number * self.launch.q_tiles, self.num_tiles)

    @property
    def lowest_slab(self) -> Any:
        return self.launch.first_slab(self.first_position)

    @property
    def end_slab(self) -> Any:
        return cdiv(self.first_position + self.length, self.launch.layout.slab_tokens)

    @property
    def num_blocks(self) -> Any:
        return cdiv(self.end_slab - self.lowest_slab, self.launch.block_slabs)

    @property
    def edge(self) -> Any:
        """The slab where the new tokens begin."""
        return div(self.context, self.launch.layout.slab_tokens)

    @property
    def edge_tokens(self) -> Any:
        """How many of its tokens are in its page already; with none it is a new slab like the others."""
        return rem(self.context, self.launch.layout.slab_tokens)

    @property
    def end_old_slab(self) -> Any:
        """The end of the slabs that are read from pages; the edge, if there is one, is the last of them."""
        return cdiv(self.context, self.launch.layout.slab_tokens)

    @property
    def num_new_slabs(self) -> Any:
        """Slabs of the whole run that hold new tokens only."""
        return cdiv(self.context + self.q_len, self.launch.layout.slab_tokens) - self.end_old_slab

    def new_slab(self, slab: Any) -> Any:
        """Where a slab lies among the new tokens."""
        return self.run_slab + slab - self.edge

    @property
    def writes_edge(self) -> Any:
        """Whether it is the last item that reads the edge from its page."""
        if self.launch.window is None:
            return self.is_last
        return self.is_last | (self.launch.first_slab(self.first_position + self.launch.q_tokens) > self.edge)

    def block(self, number: Any) -> tuple[Any, Any, Any]:
        """Of a block: its first slab, how many of its slabs are read from pages, and how many from the new tokens."""
        first = self.lowest_slab + number * self.launch.block_slabs
        count = jnp.minimum(self.end_slab - first, self.launch.block_slabs)
        old = jnp.clip(self.end_old_slab - first, 0, count)
        return first, old, count - old

    def has_edge(self, number: Any) -> Any:
        """Whether the edge lies in a block, and has to be put together."""
        first, old, new = self.block(number)
        return (self.edge_tokens > 0) & (first <= self.edge) & (self.edge < first + old + new)


@dataclass(frozen=True)
class _Runs:
    """The kernel's memory, and what it does with it."""

    launch: Launch
    layer: Any  # SMEM int32 [1]
    num_runs: Any  # SMEM int32 [1]
    runs: Any  # SMEM int32 [S]: sequence ids
    kv_lens: Any  # SMEM int32 [S]
    q_lens: Any  # likewise
    first_tiles: Any  # likewise
    first_slabs: Any  # likewise
    page_table: Any  # SMEM int32 [S * pages_per_seq]
    new_slabs: Any  # HBM uint32 [slabs, R, 8, 128]
    sinks: Any  # VMEM float32 [Hkv, G * 16, 128]; FLOOR where there are none
    tiles_before: Any  # inputs that are the same memory as the outputs
    pages_before: Any
    tiles: Any  # HBM [tiles, Hkv, G * 16, q_lanes]: queries, and in their place results
    pages: Any  # HBM uint32 [L, slabs, R, 8, 128]
    blocks: Any  # VMEM uint32 [2, block_slabs, R, 8, 128]
    edges: Any  # VMEM uint32 [2, R, 8, 128]
    queries: Any  # VMEM [2, q_tiles, Hkv, G * 16, q_lanes]
    results: Any  # VMEM [q_tiles, Hkv, G * 16, q_lanes]
    tops: Any  # VMEM float32 [Hkv, q_tiles, G * 16, 128]
    totals: Any  # likewise
    weighted: Any  # VMEM float32 [Hkv, q_tiles, G * 16, q_lanes]
    fetched: Any  # DMA semaphores [2]
    edges_fetched: Any  # likewise
    queries_fetched: Any  # likewise
    results_written: Any  # DMA semaphore
    edge_written: Any  # likewise
    slabs_written: Any  # likewise

    @property
    def pool(self) -> Pool:
        return Pool(self.launch, self.pages, self.layer[0], self.page_table)

    def item(self, run: Any, number: Any) -> _Item:
        s = self.runs[run]
        context = self.kv_lens[s] - self.q_lens[s]
        return _Item(self.launch, run, s, number, context, self.q_lens[s], self.first_tiles[s], self.first_slabs[s])

    def run(self) -> None:
        def attend_run(run: Any, carry: tuple) -> tuple:
            num_items = cdiv(self.q_lens[self.runs[run]], self.launch.q_tokens)
            return lax.fori_loop(0, num_items, lambda i, carry: self.attend_item(self.item(run, i), carry), carry)

        when(self.num_runs[0] > 0, lambda: self.start_fetch(self.item(0, 0), 0, 0, 0))
        zero = jnp.int32(0)
        _, _, tiles_before = lax.fori_loop(0, self.num_runs[0], attend_run, (zero, zero, zero))
        self.wait_for_results(tiles_before)

    def attend_item(self, item: _Item, carry: tuple) -> tuple:
        """`carry`: the buffers where its first block and its queries arrive, and how many tiles the item before
        wrote."""
        buffer, q_buffer, tiles_before = carry
        wait_bytes_of(self.queries.at[q_buffer, pl.ds(0, item.num_tiles)], self.queries_fetched.at[q_buffer])
        when(item.number == 0, lambda: self.start_slab_writes(item))
        self.start_softmax()
        buffer = lax.fori_loop(
            0, item.num_blocks, lambda i, buffer: self.attend_block(item, i, buffer, q_buffer), buffer
        )
        self.wait_for_results(tiles_before)
        self.finish_softmax()
        source = self.results.at[pl.ds(0, item.num_tiles)]
        pltpu.make_async_copy(source, self.tiles.at[item.tiles], self.results_written).start()
        when(item.is_last, lambda: self.wait_for_slab_writes(item))
        return buffer, 1 - q_buffer, item.num_tiles

    def attend_block(self, item: _Item, number: Any, buffer: Any, q_buffer: Any) -> Any:
        first, old, new = item.block(number)
        block = self.blocks.at[buffer]
        self.prefetch(item, number, 1 - buffer, q_buffer)
        wait_bytes_of(block.at[pl.ds(0, old + new)], self.fetched.at[buffer])

        has_edge, place = item.has_edge(number), item.edge - first
        when(has_edge, lambda: self.merge_edge(item, place, buffer))
        write = self.pool.write_slab(item.sequence, item.edge, block.at[place], self.edge_written)
        when(has_edge & item.writes_edge, write.start)
        products = zero_tail(self.launch, block, old + new)
        self.attend_products(item, block, first, products, q_buffer)
        when(has_edge & item.writes_edge, write.wait)  # the buffer is filled again soon
        return 1 - buffer

    def prefetch(self, item: _Item, number: Any, buffer: Any, q_buffer: Any) -> None:
        """Starts to fetch the block after this one: of the item, of the next item or of the next run."""
        ends_item = number + 1 == item.num_blocks
        next_run = jnp.where(ends_item & item.is_last, item.run + 1, item.run)

        def fetch() -> None:
            item_number = jnp.where(ends_item, jnp.where(item.is_last, 0, item.number + 1), item.number)
            next_q_buffer = jnp.where(ends_item, 1 - q_buffer, q_buffer)
            block_number = jnp.where(ends_item, 0, number + 1)
            self.start_fetch(self.item(next_run, item_number), block_number, buffer, next_q_buffer)

        when(next_run < self.num_runs[0], fetch)

    def start_fetch(self, item: _Item, number: Any, buffer: Any, q_buffer: Any) -> None:
        first, old, new = item.block(number)
        self.pool.start_fetch(item.sequence, first, old, self.blocks.at[buffer], self.fetched.at[buffer])
        source = self.new_slabs.at[pl.ds(item.new_slab(first + old), new)]
        target = self.blocks.at[buffer, pl.ds(old, new)]
        when(new > 0, pltpu.make_async_copy(source, target, self.fetched.at[buffer]).start)
        source, target = self.new_slabs.at[item.run_slab], self.edges.at[buffer]
        when(item.has_edge(number), pltpu.make_async_copy(source, target, self.edges_fetched.at[buffer]).start)
        source, target = self.tiles.at[item.tiles], self.queries.at[q_buffer, pl.ds(0, item.num_tiles)]
        when(number == 0, pltpu.make_async_copy(source, target, self.queries_fetched.at[q_buffer]).start)

    def merge_edge(self, item: _Item, place: Any, buffer: Any) -> None:
        """Old tokens are there, from the page; new ones are taken from the edge's new slab."""
        wait_bytes_of(self.edges.at[buffer], self.edges_fetched.at[buffer])
        old = token_mask(self.launch.layout, lambda token: token < item.edge_tokens)
        self.blocks[buffer, place] = (self.blocks[buffer, place] & old) | (self.edges[buffer] & ~old)

    def start_slab_writes(self, item: _Item) -> None:
        first = item.new_slab(item.end_old_slab)

        def write(offset: Any, slab_id: Any, length: Any) -> None:
            source = self.new_slabs.at[pl.ds(first + offset, length)]
            target = self.pages.at[self.layer[0], pl.ds(slab_id, length)]
            pltpu.make_async_copy(source, target, self.slabs_written).start()

        self.pool.for_each_piece(item.sequence, item.end_old_slab, item.num_new_slabs, write)

    def wait_for_slab_writes(self, item: _Item) -> None:
        count = item.num_new_slabs
        when(count > 0, lambda: wait_bytes_of(self.new_slabs.at[pl.ds(0, count)], self.slabs_written))

    def wait_for_results(self, num_tiles: Any) -> None:
        when(num_tiles > 0, lambda: wait_bytes_of(self.results.at[pl.ds(0, num_tiles)], self.results_written))

    def start_softmax(self) -> None:
        def start_head(head: Any, carry: Any) -> Any:
            top = jnp.broadcast_to(self.sinks[head][None], self.tops.shape[1:])
            self.tops[head] = top
            self.totals[head] = (top > FLOOR).astype(jnp.float32)
            self.weighted[head] = jnp.zeros(self.weighted.shape[1:], jnp.float32)
            return carry

        lax.fori_loop(0, self.launch.layout.num_kv_heads, start_head, 0)

    def finish_softmax(self) -> None:
        num_tiles, _, rows, lanes = self.results.shape

        def finish_head(head: Any, carry: Any) -> Any:
            total, weighted = self.totals[head].reshape(-1, LANES), self.weighted[head].reshape(-1, lanes)
            self.results[:, head] = result(total, weighted, self.results.dtype).reshape(num_tiles, rows, lanes)
            return carry

        lax.fori_loop(0, self.launch.layout.num_kv_heads, finish_head, 0)

    def attend_products(self, item: _Item, block: Any, first: Any, products: Any, q_buffer: Any) -> None:
        """The products of a KV block and the item's queries, but for those that are masked altogether."""
        launch = self.launch
        q_tokens = launch.compute_tiles * TILE_TOKENS
        q_products = cdiv(item.length, q_tokens)

        def attend(index: Any, carry: Any) -> Any:
            product, q_product = div(index, q_products), rem(index, q_products)
            start, tile = product * launch.compute_slabs, q_product * launch.compute_tiles
            kv_start = (first + start) * launch.layout.slab_tokens
            kv_last = kv_start + launch.compute_tokens - 1
            q_start = item.first_position + q_product * q_tokens
            q_last = q_start + q_tokens - 1
            is_seen, is_inner = kv_start <= q_last, kv_last <= q_start
            if launch.window is not None:
                is_seen &= kv_last > q_start - launch.window
                is_inner &= kv_start > q_last - launch.window
            when(is_inner, lambda: self.attend_heads(block, start, tile, q_buffer, None))
            when(is_seen & ~is_inner, lambda: self.attend_heads(block, start, tile, q_buffer, (q_start, kv_start)))
            return carry

        lax.fori_loop(0, products * q_products, attend, 0)

    def attend_heads(self, block: Any, start: Any, tile: Any, q_buffer: Any, starts: tuple[Any, Any] | None) -> None:
        """One product for every head; `starts`, the first query's and the first key's position, if masked."""
        launch = self.launch
        tiles = pl.ds(tile, launch.compute_tiles)

        def attend_head(head: Any, carry: Any) -> Any:
            q = self.queries[q_buffer, tiles, head]
            num_tiles, tile_rows, _ = q.shape
            visible = None if starts is None else self.visible(num_tiles, tile_rows, *starts)
            kv = load_kv(launch, block, start, head)
            refs = self.tops, self.totals, self.weighted
            state = tuple(ref[head, tiles].reshape(-1, ref.shape[3]) for ref in refs)
            state = attend_products(launch, q.reshape(-1, q.shape[2]), kv, visible, state)
            for ref, value in zip(refs, state, strict=True):
                ref[head, tiles] = value.reshape(num_tiles, tile_rows, ref.shape[3])
            return carry

        lax.fori_loop(0, launch.layout.num_kv_heads, attend_head, 0)

    def visible(self, num_tiles: int, tile_rows: int, q_start: Any, kv_start: Any) -> jax.Array:
        """bool [M, C]: the causal mask, within the window. A row's token is its number modulo 16 in its tile."""
        token = lax.broadcasted_iota(jnp.int32, (tile_rows, 1), 0) & (TILE_TOKENS - 1)
        position = q_start + jnp.concatenate([token + i * TILE_TOKENS for i in range(num_tiles)], axis=0)
        key = kv_start + lax.broadcasted_iota(jnp.int32, (1, self.launch.compute_tokens), 1)
        visible = key <= position
        if self.launch.window is not None:
            visible &= key > position - self.launch.window
        return visible

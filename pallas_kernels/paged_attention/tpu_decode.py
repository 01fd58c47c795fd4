"""The TPU kernel for decode rows: sequences that have one new token.

No causal mask, and no mask at all but at a sequence's ends; the new token is put into its slab in VMEM, where the slab
is anyway, and the slab is written back while the last block is computed.

Letters in shapes: S sequences, M rows of queries (the grouped heads of one KV head, padded), R rows of a slab.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.tpu_layout import LANES, SUBLANES
from pallas_kernels.paged_attention.tpu_stream import (
    FLOOR,
    Launch,
    Pool,
    attend_products,
    cdiv,
    load_kv,
    rem,
    result,
    token_mask,
    wait_bytes_of,
    when,
    zero_tail,
)


def decode_kernel(launch: Launch, *refs: Any) -> None:
    """`refs` are the fields of `_Decode`, in order."""
    _Decode(launch, *refs).run()


@dataclass(frozen=True)
class _Decode:
    """The kernel's memory, and what it does with it."""

    launch: Launch
    layer: Any  # SMEM int32 [1]
    num_rows: Any  # SMEM int32 [1]: sequences 0 .. num_rows
    kv_lens: Any  # SMEM int32 [S]
    page_table: Any  # SMEM int32 [S * pages_per_seq]
    queries: Any  # VMEM [S, Hkv, M, q_lanes]
    new_tokens: Any  # VMEM uint32 [S, R, 128]: each row's token, in every place of a word
    sinks: Any  # VMEM float32 [Hkv, M, 128]; FLOOR where there are none
    pages_before: Any  # the pages as an input: the same memory as the output
    results: Any  # VMEM [S, Hkv, M, q_lanes]
    pages: Any  # HBM uint32 [L, slabs, R, 8, 128]
    blocks: Any  # VMEM uint32 [2, block_slabs, R, 8, 128]
    tops: Any  # VMEM float32 [Hkv, M, 128]
    totals: Any  # likewise
    weighted: Any  # VMEM float32 [Hkv, M, q_lanes]
    fetched: Any  # DMA semaphores [2]
    written: Any  # DMA semaphore

    @property
    def pool(self) -> Pool:
        return Pool(self.launch, self.pages, self.layer[0], self.page_table)

    @property
    def heads(self) -> range:
        return range(self.launch.layout.num_kv_heads)

    def run(self) -> None:
        when(self.num_rows[0] > 0, lambda: self.start_fetch(0, 0, 0))
        lax.fori_loop(0, self.num_rows[0], self.attend_row, jnp.int32(0))

    def slabs_of(self, row: Any, number: Any) -> tuple[Any, Any, Any]:
        """The first slab and the number of slabs of a row's block, and how many blocks the row has."""
        launch = self.launch
        lowest = launch.first_slab(self.kv_lens[row] - 1)
        end = cdiv(self.kv_lens[row], launch.layout.slab_tokens)
        first = lowest + number * launch.block_slabs
        return first, jnp.minimum(end - first, launch.block_slabs), cdiv(end - lowest, launch.block_slabs)

    def start_fetch(self, row: Any, number: Any, buffer: Any) -> None:
        first, count, _ = self.slabs_of(row, number)
        self.pool.start_fetch(row, first, count, self.blocks.at[buffer], self.fetched.at[buffer])

    def attend_row(self, row: Any, buffer: Any) -> Any:
        """One row, whose first block is on its way to `buffer`; returns where the next row's is."""
        self.tops[...] = self.sinks[...]
        self.totals[...] = (self.sinks[...] > FLOOR).astype(jnp.float32)
        self.weighted[...] = jnp.zeros(self.weighted.shape, jnp.float32)
        num_blocks = self.slabs_of(row, 0)[2]
        buffer = lax.fori_loop(0, num_blocks, lambda i, buffer: self.attend_block(row, i, buffer), buffer)
        for head in self.heads:
            self.results[row, head] = result(self.totals[head], self.weighted[head], self.results.dtype)
        return buffer

    def attend_block(self, row: Any, number: Any, buffer: Any) -> Any:
        launch = self.launch
        first, count, num_blocks = self.slabs_of(row, number)
        block, is_last = self.blocks.at[buffer], number + 1 == num_blocks
        next_row, next_number = jnp.where(is_last, row + 1, row), jnp.where(is_last, 0, number + 1)
        when(next_row < self.num_rows[0], lambda: self.start_fetch(next_row, next_number, 1 - buffer))
        wait_bytes_of(block.at[pl.ds(0, count)], self.fetched.at[buffer])

        write = self.pool.write_slab(row, first + count - 1, block.at[count - 1], self.written)

        def enter_new_token() -> None:
            self.enter_new_token(row, block, count - 1)
            write.start()

        when(is_last, enter_new_token)
        products = zero_tail(launch, block, count)

        def attend_product(product: Any, carry: Any) -> Any:
            start = product * launch.compute_slabs
            position = (first + start) * launch.layout.slab_tokens
            is_inner = position + launch.compute_tokens <= self.kv_lens[row]
            if launch.window is not None:
                is_inner &= position >= self.kv_lens[row] - launch.window
            when(is_inner, lambda: self.attend_product(row, block, start, None))
            when(~is_inner, lambda: self.attend_product(row, block, start, position))
            return carry

        lax.fori_loop(0, products, attend_product, 0)
        when(is_last, write.wait)  # the buffer is filled again soon
        return 1 - buffer

    def enter_new_token(self, row: Any, block: Any, place: Any) -> None:
        """Merges the new token into the row's last slab, and zeroes what is after it."""
        layout = self.launch.layout
        offset = rem(self.kv_lens[row] - 1, layout.slab_tokens)
        old = token_mask(layout, lambda token: token < offset)
        fresh = token_mask(layout, lambda token: token == offset)
        for r in range(layout.rows):
            token = jnp.broadcast_to(self.new_tokens[row, r : r + 1], (SUBLANES, LANES))
            block[place, r] = (block[place, r] & old) | (token & fresh)

    def attend_product(self, row: Any, block: Any, start: Any, position: Any | None) -> None:
        """All heads against the KV from slab `start` of a block on; `position` is its first token's, if masked."""
        launch = self.launch
        visible = None
        if position is not None:
            position += lax.broadcasted_iota(jnp.int32, (1, launch.compute_tokens), 1)
            visible = position < self.kv_lens[row]
            if launch.window is not None:
                visible &= position >= self.kv_lens[row] - launch.window
        # Unrolled: while one head waits for the matrix unit, another's softmax goes on.
        for head in self.heads:
            kv = load_kv(launch, block, start, head)
            state = self.tops[head], self.totals[head], self.weighted[head]
            state = attend_products(launch, self.queries[row, head], kv, visible, state)
            self.tops[head], self.totals[head], self.weighted[head] = state

"""What the TPU kernels share: pages streamed through VMEM, and the softmax over what arrives.

Both kernels (`tpu_decode`, `tpu_runs`) walk over their sequences in one grid step and stream each one's KV through two
buffers in VMEM: while one block is computed, the next is on its way, across the ends of sequences. Only slabs that
hold tokens are moved. The softmax is carried along in float32 (Flash Attention, arXiv 2205.14135).

What may not be read never is: slots past a sequence's end are overwritten with zeros in VMEM, because a masked logit
ends as a weight of 0, and 0 * nan is nan.

Letters in shapes: M rows of queries (tokens x grouped heads), C KV tokens of one product, R rows of a slab.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_layout import LANES, SUBLANES, TILE_TOKENS, Layout

# Below every real logit, yet finite: exp(-inf - FLOOR) is 0, where exp(-inf - -inf) would be nan.
FLOOR = -1e30


def div(a: Any, b: Any) -> Any:
    """a // b of numbers that are not negative: jnp's would ask for their signs."""
    return lax.div(jnp.asarray(a, jnp.int32), jnp.asarray(b, jnp.int32))


def rem(a: Any, b: Any) -> Any:
    """a % b, likewise."""
    return lax.rem(jnp.asarray(a, jnp.int32), jnp.asarray(b, jnp.int32))


def cdiv(a: Any, b: Any) -> Any:
    """a / b, rounded up, likewise."""
    return div(a + b - 1, b)


@dataclass(frozen=True)
class Launch:
    """What is static of a launch."""

    layout: Layout
    pages_per_seq: int
    scale: float
    window: int | None
    soft_cap: float | None
    block_slabs: int  # slabs of one DMA block
    compute_slabs: int  # slabs of one matrix product; divides block_slabs
    q_tiles: int = 0  # tiles of 16 query tokens in one pass over the KV; none in decode
    compute_tiles: int = 0  # tiles of one matrix product; divides q_tiles

    def __post_init__(self) -> None:
        assert self.block_slabs % self.compute_slabs == 0
        assert self.q_tiles == 0 or self.q_tiles % self.compute_tiles == 0

    @property
    def compute_tokens(self) -> int:
        return self.compute_slabs * self.layout.slab_tokens

    @property
    def q_tokens(self) -> int:
        return self.q_tiles * TILE_TOKENS

    def first_slab(self, first_position: Any) -> Any:
        """The first slab that a query at a position, or later, sees."""
        if self.window is None:
            return jnp.int32(0)
        return div(jnp.maximum(first_position - self.window + 1, 0), self.layout.slab_tokens)


@dataclass(frozen=True)
class Pool:
    """The pages as a kernel sees them: uint32 [L, slabs, R, 8, 128] in HBM, and where sequences' slabs lie."""

    launch: Launch
    slabs: Any
    layer: Any
    page_table: Any

    def slab_id(self, sequence: Any, slab: Any) -> Any:
        per_page = self.launch.layout.slabs_per_page
        page = self.page_table[sequence * self.launch.pages_per_seq + div(slab, per_page)]
        return page * per_page + rem(slab, per_page)

    def for_each_piece(self, sequence: Any, first: Any, count: Any, visit: Any) -> None:
        """Calls visit(offset, slab_id, length) for each page's share of a sequence's slabs first .. first + count."""
        per_page = self.launch.layout.slabs_per_page
        first_page = div(first, per_page)
        num_pages = jnp.where(count > 0, div(first + count - 1, per_page) + 1 - first_page, 0)

        def visit_page(index: Any, carry: Any) -> Any:
            page = first_page + index
            start = jnp.maximum(page * per_page, first)
            length = 1 if per_page == 1 else jnp.minimum((page + 1) * per_page, first + count) - start
            visit(start - first, self.slab_id(sequence, start), length)
            return carry

        lax.fori_loop(0, num_pages, visit_page, 0)

    def start_fetch(self, sequence: Any, first: Any, count: Any, block: Any, semaphore: Any) -> None:
        """Starts copies of a sequence's slabs first .. first + count to the beginning of a VMEM block."""

        def fetch(offset: Any, slab_id: Any, length: Any) -> None:
            source = self.slabs.at[self.layer, pl.ds(slab_id, length)]
            pltpu.make_async_copy(source, block.at[pl.ds(offset, length)], semaphore).start()

        self.for_each_piece(sequence, first, count, fetch)

    def write_slab(self, sequence: Any, slab: Any, source: Any, semaphore: Any) -> Any:
        """A copy of one slab into its page; to be started and waited for."""
        return pltpu.make_async_copy(source, self.slabs.at[self.layer, self.slab_id(sequence, slab)], semaphore)


def wait_bytes_of(ref: Any, semaphore: Any) -> None:
    """Waits until copies of as many bytes as `ref` has are done."""
    pltpu.make_async_copy(ref, ref, semaphore).wait()


def when(condition: Any, body: Any) -> None:
    pl.when(condition)(body)


def token_mask(layout: Layout, places: Any) -> jax.Array:
    """uint32 [8, 128]: the bits of a slab's words that belong to tokens for which bool `places(token)` holds."""
    sublane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)
    bits = 32 // layout.pack
    mask = jnp.zeros((SUBLANES, LANES), jnp.uint32)
    for i in range(layout.pack):
        ones = jnp.uint32(((1 << bits) - 1) << (i * bits))
        mask |= jnp.where(places(sublane * layout.pack + i), ones, jnp.uint32(0))
    return mask


def zero_tail(launch: Launch, block: Any, count: Any) -> Any:
    """Zeroes the slabs past `count` that the last matrix product reads; returns how many products there are."""
    products = cdiv(count, launch.compute_slabs)

    def zero(slab: Any, carry: Any) -> Any:
        block[slab] = jnp.zeros(block.shape[1:], block.dtype)
        return carry

    lax.fori_loop(count, products * launch.compute_slabs, zero, 0)
    return products


def load_kv(launch: Launch, block: Any, first: Any, head: Any) -> tuple[jax.Array, jax.Array]:
    """K and V of one head, [C, q_lanes], from slab `first` of a block on."""
    layout = launch.layout

    def load(row: Any) -> jax.Array:
        words = block[pl.ds(first, launch.compute_slabs), row]
        words = words.reshape(launch.compute_slabs * SUBLANES, LANES)
        if layout.pack == 1:
            return lax.bitcast_convert_type(words, layout.dtype)
        return pltpu.bitcast(words, layout.dtype)

    k_row, v_row = layout.rows_of(head)
    k = [load(k_row + i) for i in range(layout.chunks)]
    v = k if layout.side_by_side else [load(v_row + i) for i in range(layout.chunks)]
    return _side_by_side(k), _side_by_side(v)


def _side_by_side(parts: list[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A product with float32 sums, in the operands' common precision."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def attend_products(
    launch: Launch, q: jax.Array, kv: tuple[jax.Array, jax.Array], visible: jax.Array | None, state: tuple
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes K and V into a softmax in progress: top and total [M, 128], equal in all lanes, weighted [M, q_lanes]."""
    k, v = kv
    top_before, total, weighted = state
    logits = _dot(q, k, (1, 1)) * launch.scale
    if launch.soft_cap is not None:
        logits = launch.soft_cap * jnp.tanh(logits / launch.soft_cap)
    if visible is not None:
        logits = jnp.where(visible, logits, -jnp.inf)
    top = jnp.maximum(top_before, jnp.max(logits, axis=1, keepdims=True))
    weights = jnp.exp(logits - top[:, :1])
    decay = jnp.exp(top_before - top)
    total = decay * total + jnp.sum(weights, axis=1, keepdims=True)
    values = _dot(weights.astype(jnp.promote_types(q.dtype, v.dtype)), v, (1, 0))
    return top, total, decay[:, :1] * weighted + values


def result(total: jax.Array, weighted: jax.Array, dtype: Any) -> jax.Array:
    """Zero where nothing was seen."""
    return (weighted / jnp.where(total > 0, total, 1.0)[:, :1]).astype(dtype)

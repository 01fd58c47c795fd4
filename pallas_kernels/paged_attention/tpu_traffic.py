"""What the TPU kernels move and multiply for a step, counted from their plan, against the least that would do.

The plan is the kernels' own, retold in integers; a test holds it against the copies that the interpreter carries out.
Nothing here is a measurement.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp

from pallas_kernels.paged_attention.tpu_blocks import Blocks, Shape, fit_blocks
from pallas_kernels.paged_attention.tpu_layout import TILE_TOKENS


@dataclass
class Traffic:
    """Bytes that pass between HBM and VMEM (or from HBM to HBM: counted as read and as written), and operations.

    Copies are those that the kernels start; decode rows' operands, which XLA places in VMEM, are bytes only.
    """

    copies: int = 0
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    operand_bytes: int = 0
    flops: int = 0
    useful_bytes: int = 0
    useful_flops: int = 0

    def copy(self, kind: str, num_bytes: int, copies: int = 1) -> None:
        self.copies += copies
        self.bytes_by_kind[kind] = self.bytes_by_kind.get(kind, 0) + num_bytes

    @property
    def copied_bytes(self) -> int:
        return sum(self.bytes_by_kind.values())

    @property
    def moved_bytes(self) -> int:
        """All of them; a copy from HBM to HBM is a read as well."""
        return self.copied_bytes + self.operand_bytes + self.bytes_by_kind.get("new slabs to pages", 0)

    @property
    def useful_byte_share(self) -> float:
        return self.useful_bytes / self.moved_bytes

    @property
    def useful_flop_share(self) -> float:
        return self.useful_flops / self.flops


def count_traffic(
    shape: Shape,
    blocks: Blocks,
    sequences: Sequence[tuple[int, int]],
    *,
    num_seqs: int,
    pages_per_seq: int,
    num_decode: int,
    window: int | None = None,
) -> Traffic:
    """The traffic of one layer for `sequences`, (tokens in the cache, new tokens), the first `num_decode` of which
    are decode rows, in a step compiled for `num_seqs` sequences of `pages_per_seq` pages."""
    layout, traffic = shape.layout, Traffic()
    traffic.operand_bytes = shape.decode_operand_bytes(num_seqs)
    decode = fit_blocks(layout, pages_per_seq, blocks.decode_kv, blocks.decode_product_kv)
    long = fit_blocks(layout, pages_per_seq, blocks.run_kv, blocks.run_product_kv)
    for context, _ in sequences[:num_decode]:
        _count_decode_row(traffic, shape, decode, context + 1, window)
    for context, new in sequences[num_decode:]:
        if new <= TILE_TOKENS:
            _count_run(traffic, shape, decode, TILE_TOKENS, TILE_TOKENS, context, new, window)
        else:
            _count_run(traffic, shape, long, blocks.run_q, blocks.run_product_q, context, new, window)
    for context, new in sequences:
        _count_useful(traffic, shape, context, new, window)
    return traffic


def _count_useful(traffic: Traffic, shape: Shape, context: int, new: int, window: int | None) -> None:
    """Every visible token's K and V read once, every new one's once more and written; queries in, results out."""
    layout = shape.layout
    first_seen = 0 if window is None else max(context - window + 1, 0)
    token_bytes = 2 * layout.num_kv_heads * layout.head_dim * jnp.dtype(layout.dtype).itemsize
    query_bytes = layout.num_kv_heads * shape.group * layout.head_dim * jnp.dtype(shape.q_dtype).itemsize
    traffic.useful_bytes += (context - min(first_seen, context) + 2 * new) * token_bytes + 2 * new * query_bytes
    pairs = sum(min(position + 1, window or position + 1) for position in range(context, context + new))
    traffic.useful_flops += 4 * layout.num_kv_heads * shape.group * layout.head_dim * pairs


def _count_decode_row(traffic: Traffic, shape: Shape, sizes: tuple[int, int], kv_len: int, window: int | None) -> None:
    layout, (block_slabs, compute_slabs) = shape.layout, sizes
    lowest = _first_slab(shape, kv_len - 1, window)
    end = -(-kv_len // layout.slab_tokens)
    for first in range(lowest, end, block_slabs):
        count = min(end - first, block_slabs)
        traffic.copy("slabs from pages", count * layout.slab_bytes, _num_pieces(shape, first, count))
        products = -(-count // compute_slabs)
        traffic.flops += products * _product_flops(shape, shape.decode_rows, compute_slabs * layout.slab_tokens)
    traffic.copy("slabs put together to pages", layout.slab_bytes)


def _count_run(
    traffic: Traffic,
    shape: Shape,
    sizes: tuple[int, int],
    q_tokens: int,
    product_q: int,
    context: int,
    new: int,
    window: int | None,
) -> None:
    layout, slab_tokens = shape.layout, shape.layout.slab_tokens
    tile_bytes = layout.num_kv_heads * shape.group * TILE_TOKENS * layout.q_lanes * jnp.dtype(shape.q_dtype).itemsize
    edge, end_old = context // slab_tokens, -(-context // slab_tokens)
    for start in range(0, new, q_tokens):
        length, position = min(q_tokens, new - start), context + start
        tiles = -(-length // TILE_TOKENS)
        traffic.copy("queries", tiles * tile_bytes)
        traffic.copy("results", tiles * tile_bytes)
        for first, count in _blocks(shape, sizes[0], position, length, window):
            old = min(max(end_old - first, 0), count)
            traffic.copy("slabs from pages", old * layout.slab_bytes, _num_pieces(shape, first, old))
            if count > old:
                traffic.copy("new slabs", (count - old) * layout.slab_bytes)
            if context % slab_tokens and first <= edge < first + count:
                traffic.copy("new slabs", layout.slab_bytes)
            traffic.flops += _run_flops(shape, sizes[1], product_q, first, count, position, length, window)
    if context % slab_tokens:
        traffic.copy("slabs put together to pages", layout.slab_bytes)
    new_slabs = -(-(context + new) // slab_tokens) - end_old
    traffic.copy("new slabs to pages", new_slabs * layout.slab_bytes, _num_pieces(shape, end_old, new_slabs))


def _blocks(
    shape: Shape, block_slabs: int, position: int, length: int, window: int | None
) -> Iterator[tuple[int, int]]:
    """The first slab and the number of slabs of each KV block that queries from `position` on read."""
    end = -(-(position + length) // shape.layout.slab_tokens)
    for first in range(_first_slab(shape, position, window), end, block_slabs):
        yield first, min(end - first, block_slabs)


def _run_flops(
    shape: Shape, compute_slabs: int, product_q: int, first: int, count: int, position: int, length: int, window
) -> int:
    """Products of one KV block that are not masked altogether."""
    tokens = compute_slabs * shape.layout.slab_tokens
    flops = 0
    for kv_slab in range(first, first + count, compute_slabs):
        kv_start = kv_slab * shape.layout.slab_tokens
        for q_start in range(position, position + length, product_q):
            is_seen = kv_start <= q_start + product_q - 1
            if window is not None:
                is_seen &= kv_start + tokens - 1 > q_start - window
            flops += is_seen * _product_flops(shape, shape.group * product_q, tokens)
    return flops


def _product_flops(shape: Shape, rows: int, tokens: int) -> int:
    """Both products of all heads, padding included."""
    return 4 * shape.layout.num_kv_heads * rows * tokens * shape.layout.q_lanes


def _first_slab(shape: Shape, position: int, window: int | None) -> int:
    return 0 if window is None else max(position - window + 1, 0) // shape.layout.slab_tokens


def _num_pieces(shape: Shape, first: int, count: int) -> int:
    """Copies for a run of slabs: one a page."""
    per_page = shape.layout.slabs_per_page
    return (first + count - 1) // per_page - first // per_page + 1 if count else 0

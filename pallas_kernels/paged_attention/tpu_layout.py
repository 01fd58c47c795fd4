"""How K and V lie in a TPU's pages, and how a step's new tokens are laid out for the kernels.

A page is a run of slabs; a slab is 16 tokens (bfloat16; 8 in float32), all KV heads, as 32-bit words: [R, 8, 128].
Each of its R rows is one (8, 128) vector register: sublane i holds tokens i * pack .. of the slab, packed into one
word, lane c their value c. So
- a page is one contiguous DMA of all heads, and any run of slabs within it is one too;
- the slab axis is untiled, so that a DMA moves only slabs that hold tokens, wherever they start;
- a head's K is read with plain aligned loads and reinterpreted as bfloat16 for the matrix unit without an instruction:
  no strided loads (which meet in the same memory banks), no shifts to take K and V apart, no repacking;
- a pool has no padding: head_dim 64 puts K and V side by side into the 128 lanes of one row. Other sizes are padded to
  64, 128, 256, ... lanes.
The price is that a new token is written with the other 15 of its slab.

Letters in shapes: T tokens, S sequences, U slabs, R rows of a slab, Hkv KV heads, G query heads per KV head,
D head_dim.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.api import AttentionBatch, PageSpec

LANES = 128
SUBLANES = 8
HALF = LANES // 2
# Query tokens are handed to the chunk kernel in tiles of this many: with any number of grouped heads a tile then
# fills whole registers, and a row's token is its number modulo 16.
TILE_TOKENS = 16


@dataclass(frozen=True)
class Layout:
    """The layout of one pool on one device; everything follows from these four."""

    num_kv_heads: int
    head_dim: int
    page_size_tokens: int
    dtype: Any

    @classmethod
    def of(cls, spec: PageSpec) -> "Layout":
        return cls(spec.num_kv_heads, spec.head_dim, spec.page_size_tokens, spec.dtype)

    @property
    def pack(self) -> int:
        """Tokens in a 32-bit word."""
        return 4 // jnp.dtype(self.dtype).itemsize

    @property
    def slab_tokens(self) -> int:
        return SUBLANES * self.pack

    @property
    def slabs_per_page(self) -> int:
        return self.page_size_tokens // self.slab_tokens

    @property
    def side_by_side(self) -> bool:
        """Whether K and V share a row: K in lanes 0 .. 63, V in lanes 64 .. 127."""
        return self.head_dim <= HALF

    @property
    def chunks(self) -> int:
        """Rows that one K, or one V, takes."""
        return -(-self.head_dim // LANES)

    @property
    def rows_per_head(self) -> int:
        return 1 if self.side_by_side else 2 * self.chunks

    @property
    def rows(self) -> int:
        """R."""
        return self.num_kv_heads * self.rows_per_head

    @property
    def q_lanes(self) -> int:
        """Lanes of a query, and of an accumulated value: head_dim, padded."""
        return self.chunks * LANES

    @property
    def v_lane(self) -> int:
        """The lane where a head's result begins among the accumulator's."""
        return HALF if self.side_by_side else 0

    @property
    def slab_bytes(self) -> int:
        return self.rows * SUBLANES * LANES * 4

    @property
    def token_bytes(self) -> int:
        """K and V of one token, all heads, padding included."""
        return self.slab_bytes // self.slab_tokens

    def rows_of(self, head: Any) -> tuple[Any, Any]:
        """The first row of a head's K and of its V."""
        first = head * self.rows_per_head
        return first, first if self.side_by_side else first + self.chunks

    def pages_shape(self, num_layers: int, num_pages: int) -> tuple[int, ...]:
        return num_layers, num_pages * self.slabs_per_page, self.rows, SUBLANES, LANES


def to_rows(layout: Layout, k: jax.Array, v: jax.Array) -> jax.Array:
    """K and V, [..., Hkv, D], as rows [..., R, 128] in the pages' dtype."""
    width = HALF if layout.side_by_side else layout.chunks * LANES
    padding = [(0, 0)] * (k.ndim - 1) + [(0, width - layout.head_dim)]
    k, v = (jnp.pad(x.astype(layout.dtype), padding) for x in (k, v))
    return jnp.concatenate([k, v], axis=-1).reshape(*k.shape[:-2], layout.rows, LANES)


def from_rows(layout: Layout, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of `to_rows`."""
    width = HALF if layout.side_by_side else layout.chunks * LANES
    heads = rows.reshape(*rows.shape[:-2], layout.num_kv_heads, 2 * width)
    return heads[..., : layout.head_dim], heads[..., width : width + layout.head_dim]


def pack_slabs(layout: Layout, rows: jax.Array) -> jax.Array:
    """Rows of whole slabs, [..., U * slab_tokens, R, 128], as words, uint32 [..., U, R, 8, 128]."""
    *lead, tokens, _, _ = rows.shape
    bits = _bits(layout, rows).reshape(*lead, tokens // layout.slab_tokens, SUBLANES, layout.pack, layout.rows, LANES)
    shifts = jnp.arange(layout.pack, dtype=jnp.uint32) * (32 // layout.pack)
    words = jnp.sum(bits << shifts[:, None, None], axis=-3, dtype=jnp.uint32)
    return jnp.swapaxes(words, -2, -3)


def unpack_slabs(layout: Layout, words: jax.Array) -> jax.Array:
    """The inverse of `pack_slabs`."""
    *lead, slabs, _, _, _ = words.shape
    shifts = jnp.arange(layout.pack, dtype=jnp.uint32) * (32 // layout.pack)
    bits = jnp.swapaxes(words, -2, -3)[..., None, :, :] >> shifts[:, None, None]
    unsigned = jnp.dtype(f"uint{32 // layout.pack}")
    rows = lax.bitcast_convert_type(bits.astype(unsigned), layout.dtype)
    return rows.reshape(*lead, slabs * layout.slab_tokens, layout.rows, LANES)


def spread_token(layout: Layout, rows: jax.Array) -> jax.Array:
    """Rows of single tokens, [..., R, 128], as words that hold the token in every place, for a masked merge."""
    bits = _bits(layout, rows)
    return sum((bits << (i * (32 // layout.pack)) for i in range(1, layout.pack)), bits)


def _bits(layout: Layout, rows: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(rows, jnp.dtype(f"uint{32 // layout.pack}")).astype(jnp.uint32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TpuWork:
    """What all layers of one step share. Sequences past the decode rows are "runs": of one token or many.

    Their queries are laid out in tiles of 16 tokens and their new K and V in slabs aligned to positions; each run has
    consecutive ones. Short runs (verification spans, the ends of prompts) and long ones go to launches of their own.
    """

    page_table: jax.Array  # int32 [S * pages_per_seq]
    kv_lens: jax.Array  # int32 [S]
    q_lens: jax.Array  # int32 [S]
    first_tiles: jax.Array  # int32 [S]: the run's first tile
    first_slabs: jax.Array  # int32 [S]: the run's first slab of new tokens
    num_decode: jax.Array  # int32 [1]
    short_runs: jax.Array  # int32 [S]: sequence ids, `num_short` of them
    num_short: jax.Array  # int32 [1]
    long_runs: jax.Array  # int32 [S]
    num_long: jax.Array  # int32 [1]
    tile_tokens: jax.Array  # int32 [tiles, 16]: row of the flat batch; T where there is no token
    slab_tokens: jax.Array  # int32 [slabs, slab_tokens]: likewise
    token_tile: jax.Array  # int32 [T]: where to find a token's result
    token_slot: jax.Array  # int32 [T]
    token_kind: jax.Array  # int32 [T]: 0 padding, 1 decode row, 2 token of a run


def make_work(batch: AttentionBatch, num_tokens: int, layout: Layout) -> TpuWork:
    """Cuts the ragged batch into tiles and slabs: a few operations on int32 arrays."""
    num_seqs, slab_tokens = batch.kv_lens.shape[0], layout.slab_tokens
    sequence = jnp.arange(num_seqs, dtype=jnp.int32)
    q_lens = jnp.diff(batch.cu_q_lens)
    context = batch.kv_lens - q_lens
    is_run = (sequence >= batch.num_decode) & (q_lens > 0)
    run_lens = jnp.where(is_run, q_lens, 0)

    tiles = -(-run_lens // TILE_TOKENS)
    offset = jnp.where(is_run, context % slab_tokens, 0)  # tokens of the first slab that are in its page already
    slabs = -(-(run_lens + jnp.where(is_run, offset, 0)) // slab_tokens)
    most = min(num_seqs, num_tokens)
    first_tiles, tile_tokens = _lay_out(
        batch, tiles, run_lens, jnp.zeros_like(offset), TILE_TOKENS, num_tokens, most_units(num_tokens, most, 16, 1)
    )
    first_slabs, slab_rows = _lay_out(
        batch, slabs, run_lens, offset, slab_tokens, num_tokens, most_units(num_tokens, most, slab_tokens, 2)
    )
    is_short = is_run & (q_lens <= TILE_TOKENS)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.sum(batch.cu_q_lens[1:] <= token[:, None], axis=1, dtype=jnp.int32)
    used = owner < num_seqs
    owner = jnp.minimum(owner, num_seqs - 1)
    place = token - batch.cu_q_lens[owner]
    return TpuWork(
        page_table=batch.page_table.reshape(-1),
        kv_lens=batch.kv_lens,
        q_lens=q_lens,
        first_tiles=first_tiles,
        first_slabs=first_slabs,
        num_decode=batch.num_decode.reshape(1),
        short_runs=jnp.argsort(~is_short, stable=True).astype(jnp.int32),
        num_short=jnp.sum(is_short, dtype=jnp.int32).reshape(1),
        long_runs=jnp.argsort(~(is_run & ~is_short), stable=True).astype(jnp.int32),
        num_long=jnp.sum(is_run & ~is_short, dtype=jnp.int32).reshape(1),
        tile_tokens=tile_tokens,
        slab_tokens=slab_rows,
        token_tile=jnp.where(used & is_run[owner], first_tiles[owner] + place // TILE_TOKENS, 0),
        token_slot=place % TILE_TOKENS,
        token_kind=jnp.where(used, jnp.where(is_run[owner], 2, 1), 0),
    )


def most_units(num_tokens: int, num_runs: int, size: int, partial_ends: int) -> int:
    """An upper bound of the tiles or slabs that so many tokens of so many runs take, with this many ends of a run
    in units that are not full."""
    return max((num_tokens + partial_ends * (size - 1) * num_runs) // size, 1)


def _lay_out(
    batch: AttentionBatch,
    counts: jax.Array,
    run_lens: jax.Array,
    offset: jax.Array,
    size: int,
    num_tokens: int,
    most: int,
) -> tuple[jax.Array, jax.Array]:
    """Each run's first unit, int32 [S], and the tokens of all units, int32 [most, size]."""
    ends = jnp.cumsum(counts)
    unit = jnp.arange(most, dtype=jnp.int32)
    sequence = jnp.sum(ends <= unit[:, None], axis=1, dtype=jnp.int32)
    used = sequence < counts.shape[0]
    sequence = jnp.minimum(sequence, counts.shape[0] - 1)
    first = ends - counts
    place = ((unit - first[sequence]) * size - offset[sequence])[:, None] + jnp.arange(size, dtype=jnp.int32)
    real = used[:, None] & (place >= 0) & (place < run_lens[sequence][:, None])
    return first, jnp.where(real, batch.cu_q_lens[sequence][:, None] + place, num_tokens)


def lay_out_queries(layout: Layout, q: jax.Array, work: TpuWork) -> jax.Array:
    """Queries [T, Hq, D] as tiles [tiles, Hkv, G * 16, q_lanes], token the minor part of a row's number."""
    tiles = jnp.take(q, work.tile_tokens, axis=0, mode="fill", fill_value=0)  # [tiles, 16, Hq, D]
    tiles = tiles.reshape(*tiles.shape[:2], layout.num_kv_heads, -1, layout.head_dim)
    tiles = tiles.transpose(0, 2, 3, 1, 4).reshape(tiles.shape[0], layout.num_kv_heads, -1, layout.head_dim)
    return jnp.pad(tiles, ((0, 0),) * 3 + ((0, layout.q_lanes - layout.head_dim),))


def lay_out_new_tokens(layout: Layout, rows: jax.Array, work: TpuWork) -> jax.Array:
    """Rows of the new tokens, [T, R, 128], as slabs, uint32 [slabs, R, 8, 128]; zero where there is no token."""
    return pack_slabs(layout, jnp.take(rows, work.slab_tokens, axis=0, mode="fill", fill_value=0))[:, 0]


def collect_results(layout: Layout, tiles: jax.Array, work: TpuWork) -> jax.Array:
    """The inverse of `lay_out_queries`: results [tiles, Hkv, G * 16, q_lanes] as [T, Hq, D]; junk for other tokens."""
    num_tiles, heads, rows, _ = tiles.shape
    values = tiles[..., layout.v_lane : layout.v_lane + layout.head_dim]
    values = values.reshape(num_tiles, heads * rows // TILE_TOKENS, TILE_TOKENS, layout.head_dim)
    return values[work.token_tile, :, work.token_slot]

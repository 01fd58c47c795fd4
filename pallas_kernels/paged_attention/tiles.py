"""Cuts a ragged batch into work: where each token's K and V go, and tiles of query tokens."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.api import AttentionBatch, PageSpec


@dataclass(frozen=True)
class TileShape:
    """How one class of sequences is cut up: static."""

    min_tokens: int  # the class: sequences with min_tokens .. max_tokens tokens in this step
    max_tokens: int
    width: int  # query tokens of a tile
    chunk_tokens: int  # KV tokens of an item, at least; rounded up to whole pages
    group_items: int  # items processed together, at most


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """The query tiles of one class, in token order; all int32 [num_tiles], unused entries last with length 0."""

    sequence: jax.Array
    first_row: jax.Array  # of the flat token batch
    first_position: jax.Array
    length: jax.Array  # tokens


def cut_tiles(shape: TileShape, batch: AttentionBatch, in_class: jax.Array, max_tiles: int) -> Tiles:
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


def token_places(batch: AttentionBatch, num_tokens: int, spec: PageSpec) -> tuple[jax.Array, jax.Array]:
    """The page each of the T tokens goes to, and the slot within it, int32 [T]; padding goes to the scratch page."""
    num_seqs = batch.kv_lens.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    sequence = jnp.sum(batch.cu_q_lens[1:] <= token[:, None], axis=1, dtype=jnp.int32)
    used = sequence < num_seqs
    sequence = jnp.minimum(sequence, num_seqs - 1)
    position = jnp.where(used, (batch.kv_lens - batch.cu_q_lens[1:])[sequence] + token, 0)
    page = batch.page_table[sequence, position // spec.page_size_tokens]
    return jnp.where(used, page, spec.scratch_page), position % spec.page_size_tokens

"""The contract of paged attention: what every implementation takes and gives back.

Letters in shapes: T tokens of the flat batch, S sequences, N page ids, Hq query heads, Hkv KV heads, D head_dim.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

Pages = Any  # the pool's arrays, all layers: a pytree whose layout belongs to the implementation
Work = Any  # what one step's layers share: a pytree that belongs to the implementation
HostPages = Any  # pages taken out of the pool: a pytree whose leaves lead with axis N


@dataclass(frozen=True)
class PageSpec:
    """The shape of a page pool: static and hashable, so that it may key a compilation.

    `num_pages` counts usable pages. The arrays hold one more per layer, `scratch_page`, which belongs to nobody:
    padding tokens write there.
    """

    num_layers: int
    num_pages: int
    page_size_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: Any  # anything numpy takes for a dtype; kept as np.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        for name in ("num_layers", "num_pages", "page_size_tokens", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"PageSpec.{name} is {getattr(self, name)}, it must be at least 1")

    @property
    def scratch_page(self) -> int:
        """The id of the page that belongs to nobody."""
        return self.num_pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: K and V, all layers."""
        values = self.num_layers * self.page_size_tokens * self.num_kv_heads * self.head_dim
        return 2 * values * np.dtype(self.dtype).itemsize


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionBatch:
    """Where one step's tokens belong: a ragged mix of decode rows, prefill chunks and verification spans.

    Sequence s owns rows `cu_q_lens[s] .. cu_q_lens[s + 1]` of the flat token batch; they are its last tokens, at
    positions `kv_lens[s] - q_len .. kv_lens[s]`. Rows past `cu_q_lens[num_seqs]` are padding.
    """

    cu_q_lens: jax.Array  # int32 [S + 1]; entries past num_seqs repeat the last
    kv_lens: jax.Array  # int32 [S]; length including this step's new tokens; 0 for sequences not in use
    page_table: jax.Array  # int32 [S, pages_per_seq]; unused entries may hold anything in [0, num_pages]
    num_decode: jax.Array  # int32 []; sequences [0, num_decode) have exactly one token
    num_seqs: jax.Array  # int32 []; sequences in use


class PagedAttention(Protocol):
    """One implementation of paged attention. All methods are pure and may be traced."""

    def make_pages(self, spec: PageSpec) -> Pages:
        """The pool, all layers, filled with zeros."""
        ...

    def make_work(self, batch: AttentionBatch, num_tokens: int, spec: PageSpec) -> Work:
        """What all layers of one step share, for `num_tokens` (T) rows: computed once, outside the scan over layers."""
        ...

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pages: Pages,
        work: Work,
        *,
        layer: jax.Array | int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Pages]:
        """Writes the new K and V into `pages`, then attends causally over every sequence's pages.

        q is [T, Hq, D], k and v are [T, Hkv, D]; query head i reads KV head i // (Hq // Hkv). `layer` may be traced;
        `window` (a token at position p sees positions above p - window) and `soft_cap` (c * tanh(logit / c)) are
        static. `sinks`, float32 [Hq], are logits that take part in the softmax and carry no value. The softmax is in
        float32. Returns [T, Hq, D] in q's dtype, zero for padding tokens, and the pages; donate the pages, or the
        pool is copied.
        """
        ...

    def copy_pages(self, pages: Pages, source_ids: jax.Array, target_ids: jax.Array) -> Pages:
        """Copies pages, all layers; ids are int32 [N]. All sources are read before any target is written.

        Pad with scratch to scratch.
        """
        ...

    def read_pages(self, pages: Pages, ids: jax.Array) -> HostPages:
        """The content of pages `ids`, int32 [N], all layers; for `write_pages`."""
        ...

    def write_pages(self, pages: Pages, ids: jax.Array, host_pages: HostPages) -> Pages:
        """Writes what `read_pages` gave into pages `ids`, int32 [N]. Pad with scratch."""
        ...

    def pack_pages(self, k: np.ndarray, v: np.ndarray) -> Pages:
        """Pages from K and V in plain order, [num_layers, num_pages + 1, page_size, Hkv, D]: for tests and tools."""
        ...

    def unpack_pages(self, pages: Pages, spec: PageSpec) -> tuple[np.ndarray, np.ndarray]:
        """The inverse of `pack_pages`."""
        ...

    def page_sharding(self, spec: PageSpec, axis_name: str) -> Any:
        """A PartitionSpec for each leaf of the pages, splitting the KV heads over `axis_name`."""
        ...

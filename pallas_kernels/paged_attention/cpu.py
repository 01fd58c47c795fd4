"""Paged attention in C++ for the CPU; cpu_attention.cc says how it works and how its pages lie.

Letters in shapes: T tokens, S sequences, Hq query heads, H KV heads, D head_dim.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallas_kernels.native.build import BuildError, InstructionSet, build, choose_instruction_set
from pallas_kernels.paged_attention.api import AttentionBatch, PageSpec
from pallas_kernels.paged_attention.moves import LayerMajorMoves

SOURCE = Path(__file__).with_name("cpu_attention.cc")
BLOCK_TOKENS = 16
ATTEND, MAKE_PAGES = "jpaged_attend", "jpaged_make_pages"


def refuse(spec: PageSpec, num_q_heads: int, q_dtype: np.dtype) -> str | None:
    """What speaks against the native form, or None; builds it if nothing else does."""
    if num_q_heads % spec.num_kv_heads:
        return f"{num_q_heads} query heads do not divide evenly among {spec.num_kv_heads} KV heads"
    for what, dtype in (("queries", q_dtype), ("pages", spec.dtype)):
        if str(dtype) not in ("float32", "bfloat16"):
            return f"{what} are {dtype}; it takes float32 and bfloat16"
    if spec.page_size_tokens % BLOCK_TOKENS:
        return f"pages of {spec.page_size_tokens} tokens are not whole blocks of {BLOCK_TOKENS}"
    if spec.dtype == jnp.bfloat16 and spec.head_dim % 2:
        return f"head_dim {spec.head_dim} is odd and bfloat16 lies in pairs"
    try:
        register(choose_instruction_set())
    except BuildError as error:
        return str(error)
    return None


def register(instruction_set: InstructionSet) -> str:
    """Builds the kernel and makes it known to XLA; returns the ending of its names there. Raises BuildError."""
    library = build(SOURCE, instruction_set)
    for name in (ATTEND, MAKE_PAGES):
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(f"{name}_{instruction_set.name}", handler, platform="cpu")
    return instruction_set.name


def pack_pages(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """K and V in plain order, [num_layers, num_pages + 1, page_size, H, D], as the kernel has them."""
    layers, num_pages, page_size, num_heads, head_dim = k.shape
    pack = 4 // k.dtype.itemsize
    blocks = (layers, num_pages, page_size // BLOCK_TOKENS)
    keys = np.asarray(k).reshape(*blocks, BLOCK_TOKENS, num_heads, head_dim // pack, pack)
    values = np.asarray(v).reshape(*blocks, BLOCK_TOKENS // pack, pack, num_heads, head_dim)
    shape = (layers, num_pages, num_heads, blocks[2], BLOCK_TOKENS * head_dim)
    halves = (
        keys.transpose(0, 1, 4, 2, 5, 3, 6).reshape(shape),  # [.., H, block, D / pack, token, pack]
        values.transpose(0, 1, 5, 2, 3, 6, 4).reshape(shape),  # [.., H, block, token / pack, D, pack]
    )
    return np.stack(halves, axis=4).reshape(layers, num_pages, num_heads, -1)


class CpuPagedAttention(LayerMajorMoves):
    """PagedAttention for the CPU. The pages are one array [num_layers, num_pages + 1, H, page_size * 2 * D]."""

    def __init__(self, instruction_set: InstructionSet | None = None) -> None:
        self._ending = register(instruction_set or choose_instruction_set())

    def make_pages(self, spec: PageSpec) -> jax.Array:
        row = 2 * spec.page_size_tokens * spec.head_dim
        shape = (spec.num_layers, spec.num_pages + 1, spec.num_kv_heads, row)
        return jax.ffi.ffi_call(f"{MAKE_PAGES}_{self._ending}", jax.ShapeDtypeStruct(shape, spec.dtype))()

    def make_work(self, batch: AttentionBatch, num_tokens: int, spec: PageSpec) -> AttentionBatch:
        return batch

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pages: jax.Array,
        work: AttentionBatch,
        *,
        layer: jax.Array | int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        sinks = jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
        result = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, pages))
        call = jax.ffi.ffi_call(f"{ATTEND}_{self._ending}", result, input_output_aliases={3: 1})
        layer = jnp.asarray(layer, jnp.int32)
        out, pages = call(
            q,
            k,
            v,
            pages,
            work.cu_q_lens,
            work.kv_lens,
            work.page_table,
            work.num_seqs,
            layer,
            sinks,
            scale=np.float32(scale),
            soft_cap=np.float32(soft_cap or 0.0),
            window=np.int64(window or 0),
        )
        return out, pages

    def pack_pages(self, k: np.ndarray, v: np.ndarray) -> jax.Array:
        return jnp.asarray(pack_pages(k, v))

    def unpack_pages(self, pages: jax.Array, spec: PageSpec) -> tuple[np.ndarray, np.ndarray]:
        pack, head_dim = 4 // spec.dtype.itemsize, spec.head_dim
        halves = np.asarray(pages).reshape(*pages.shape[:3], -1, 2, BLOCK_TOKENS * head_dim)
        keys = halves[..., 0, :].reshape(*halves.shape[:4], head_dim // pack, BLOCK_TOKENS, pack)
        values = halves[..., 1, :].reshape(*halves.shape[:4], BLOCK_TOKENS // pack, head_dim, pack)
        shape = (*pages.shape[:2], spec.page_size_tokens, pages.shape[2], head_dim)
        return keys.transpose(0, 1, 3, 5, 2, 4, 6).reshape(shape), values.transpose(0, 1, 3, 4, 6, 2, 5).reshape(shape)

    def page_sharding(self, spec: PageSpec, axis_name: str) -> PartitionSpec:
        return PartitionSpec(None, None, axis_name, None)

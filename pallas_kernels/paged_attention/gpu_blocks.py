"""Sizes of the Hopper kernels, and what they refuse.

A CUDA block ("CTA") here is one persistent or one short-lived worker of a kernel; a KV block is a run of tokens that
one pass of a kernel's loop reads. Both are tiles inside a kernel, never pages.
"""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.api import PageSpec

# Below every real logit, yet finite: exp2(FLOOR - FLOOR) is 1, where exp2(-inf - -inf) would be nan. What a column
# that has seen nothing sums up is wiped by a factor of exp2(FLOOR - real) = 0.
FLOOR = -1e30
LOG2_E = 1.4426950408889634

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float16")
WARPGROUP_ROWS = 64  # the M of one wgmma
# Grouped queries of one decode tile, and its output's numbers: more do not fit in registers.
MAX_COLUMNS, MAX_OUTPUT = 32, 32 * 128

# wgmma and setmaxnreg exist on compute capability 9.0 alone, neither before nor after it.
HOPPER = re.compile(r"\b(H100|H200|H800|H20|GH200)\b")
SHARED_MEMORY_BYTES = 227 * 1024  # a CTA may have on Hopper
HOPPER_SMS = 132  # of an H100 SXM or H200: used where no device is there to ask
SCRATCH_BYTES = 8 * 1024  # barriers, cross-warp reductions and what the compiler aligns


@dataclass(frozen=True)
class Masking:
    """What is done to logits: static, shared by both kernels."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True)
class DecodeBlocks:
    """Sizes of the decode kernel; static."""

    head_dim: int
    group: int  # query heads per KV head
    page_size: int
    columns: int  # N: a tile's grouped queries, (token, query head), padded to a multiple of 8
    tile_tokens: int  # tokens of a tile
    kv_tokens: int  # of a KV block
    stages: int  # KV blocks in flight
    num_ctas: int

    @property
    def unit(self) -> int:
        """Tokens of one copy: a page, or a part of a large one. Two copies a block at least: with one, ptxas spills."""
        return min(self.page_size, self.kv_tokens // 2)

    @property
    def units(self) -> int:
        return self.kv_tokens // self.unit


@dataclass(frozen=True)
class PrefillBlocks:
    """Sizes of the prefill kernel; static."""

    head_dim: int
    group: int
    page_size: int
    rows: int  # M: a tile's packed (token, query head) rows, those of two warpgroups
    tile_tokens: int
    kv_tokens: int
    stages: int

    unit = DecodeBlocks.unit
    units = DecodeBlocks.units


def decode_blocks(spec: PageSpec, group: int, num_sms: int) -> DecodeBlocks:
    """As much KV in flight as shared memory holds; two CTAs share an SM where that leaves enough for each."""
    columns = -(-group // 8) * 8
    # Registers hold head_dim x columns of output and twice kv_tokens x columns of logits and weights.
    kv_tokens = 64 if spec.head_dim == 256 or columns > 16 else 128
    stage_bytes = 2 * kv_tokens * spec.head_dim * 2  # K and V, two bytes a number
    # Two stages of queries, the weights, the partial output in float32.
    fixed_bytes = columns * (2 * 2 * spec.head_dim + 2 * kv_tokens + 4 * spec.head_dim) + SCRATCH_BYTES
    ctas_per_sm = 2 if spec.head_dim == 64 and columns <= 16 else 1
    stages = min(4, (SHARED_MEMORY_BYTES // ctas_per_sm - fixed_bytes) // stage_bytes)
    return DecodeBlocks(
        head_dim=spec.head_dim,
        group=group,
        page_size=spec.page_size_tokens,
        columns=columns,
        tile_tokens=max(1, columns // group),
        kv_tokens=kv_tokens,
        stages=stages,
        num_ctas=num_sms * ctas_per_sm,
    )


def prefill_blocks(spec: PageSpec, group: int) -> PrefillBlocks:
    """Two warpgroups of 64 rows: registers hold 64 x head_dim of output and 64 x kv_tokens of logits for each."""
    rows = 2 * WARPGROUP_ROWS
    kv_tokens = 64 if spec.head_dim == 256 else 128
    return PrefillBlocks(
        head_dim=spec.head_dim,
        group=group,
        page_size=spec.page_size_tokens,
        rows=rows,
        tile_tokens=rows // group,
        kv_tokens=kv_tokens,
        stages=4 if spec.head_dim == 64 else 2,
    )


def refuse(platform: str, device_kind: str, spec: PageSpec, num_q_heads: int, q_dtype: Any) -> str | None:
    """Why the Hopper kernels cannot serve this, or None if they can."""
    if platform not in ("gpu", "cuda"):
        return "it is for CUDA GPUs"
    if not HOPPER.search(device_kind):
        return f"it needs compute capability 9.0 (H100, H200, GH200), this is {device_kind or 'an unnamed device'}"
    if num_q_heads % spec.num_kv_heads:
        return f"{num_q_heads} query heads do not divide evenly among {spec.num_kv_heads} KV heads"
    group, most = num_q_heads // spec.num_kv_heads, min(MAX_COLUMNS, MAX_OUTPUT // spec.head_dim)
    checks = (
        (spec.head_dim in HEAD_DIMS, f"head_dim is {spec.head_dim}, it takes {_list(HEAD_DIMS)}"),
        (group <= most, f"{group} query heads of head_dim {spec.head_dim} share a KV head, it takes at most {most}"),
        (spec.page_size_tokens in PAGE_SIZES, f"pages of {spec.page_size_tokens}, it takes {_list(PAGE_SIZES)} tokens"),
        (str(spec.dtype) in DTYPES, f"pages are {spec.dtype}, it takes {_list(DTYPES)}"),
        (jnp.dtype(q_dtype) == spec.dtype, f"queries are {q_dtype} and pages {spec.dtype}, it takes one type for both"),
    )
    return next((reason for fits, reason in checks if not fits), None)


def local_sms() -> int:
    """Streaming multiprocessors of the first local GPU; an H200's where there is none."""
    try:
        return int(jax.local_devices(backend="gpu")[0].core_count)
    except (RuntimeError, AttributeError):
        return HOPPER_SMS


def _list(values: tuple[Any, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" and {values[-1]}"

"""Chooses the implementation of paged attention for a platform, and says why."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.paged_attention import gpu_blocks
from pallas_kernels.paged_attention.api import PagedAttention, PageSpec
from pallas_kernels.paged_attention.xla import XlaPagedAttention


@dataclass(frozen=True)
class Target:
    """What attention will be asked to do, as far as the choice depends on it."""

    platform: str  # as jax.Device.platform says: "cpu", "gpu", "tpu"
    spec: PageSpec
    num_q_heads: int
    q_dtype: Any
    device_kind: str = ""


@dataclass(frozen=True)
class Candidate:
    """An implementation, and what speaks against it: `refuse` returns a reason, or None if it fits."""

    name: str
    make: Callable[[Target], PagedAttention]
    refuse: Callable[[Target], str | None]


def refuse_xla(target: Target) -> str | None:
    """The XLA implementation runs on every platform; only these shapes and types are beyond it."""
    heads, kv_heads = target.num_q_heads, target.spec.num_kv_heads
    if heads % kv_heads:
        return f"{heads} query heads do not divide evenly among {kv_heads} KV heads"
    for what, dtype in (("queries", target.q_dtype), ("pages", target.spec.dtype)):
        if str(dtype) not in ("float32", "bfloat16", "float16"):
            return f"{what} are {dtype}; it takes float32, bfloat16 and float16"
    return None


def make_hopper(target: Target) -> PagedAttention:
    from pallas_kernels.paged_attention.gpu import GpuPagedAttention  # where Mosaic GPU is missing, nobody asks for it

    return GpuPagedAttention(target.num_q_heads // target.spec.num_kv_heads)


def refuse_hopper(target: Target) -> str | None:
    return gpu_blocks.refuse(target.platform, target.device_kind, target.spec, target.num_q_heads, target.q_dtype)


# The best first.
CANDIDATES: tuple[Candidate, ...] = (
    Candidate("hopper", make_hopper, refuse_hopper),
    Candidate("xla", lambda target: XlaPagedAttention(), refuse_xla),
)


class NoImplementationError(ValueError):
    """No implementation of paged attention fits; the message lists every reason."""


def choose(
    platform: str,
    spec: PageSpec,
    *,
    num_q_heads: int,
    q_dtype: Any,
    device_kind: str = "",
    candidates: tuple[Candidate, ...] = CANDIDATES,
) -> tuple[PagedAttention, str]:
    """The first candidate that does not refuse, and the reason for it in words fit for a log.

    Raises NoImplementationError, with every candidate's reason, if all refuse.
    """
    target = Target(platform, spec, num_q_heads, np.dtype(q_dtype), device_kind)
    refusals = []
    for candidate in candidates:
        refusal = candidate.refuse(target)
        if refusal is None:
            instead = "; ".join(refusals) or "no kernel is ahead of it for this platform"
            return candidate.make(target), f"{platform}: {candidate.name} ({instead})"
        refusals.append(f"{candidate.name}: {refusal}")
    raise NoImplementationError(
        f"no paged attention for {platform} {device_kind} with {num_q_heads} query heads of {target.q_dtype}, "
        f"{spec.num_kv_heads} KV heads of head_dim {spec.head_dim} and {spec.page_size_tokens}-token pages of "
        f"{spec.dtype}: " + "; ".join(refusals)
    )

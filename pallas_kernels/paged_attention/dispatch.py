"""Chooses the implementation of paged attention for a platform, and says why."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pallas_kernels.paged_attention import cpu, gpu_blocks
from pallas_kernels.paged_attention.api import PagedAttention, PageSpec
from pallas_kernels.paged_attention.tpu import TpuPagedAttention
from pallas_kernels.paged_attention.tpu_blocks import Shape, choose_blocks, device_of, refuse_layout, refuse_step
from pallas_kernels.paged_attention.tpu_layout import Layout
from pallas_kernels.paged_attention.xla import XlaPagedAttention


@dataclass(frozen=True)
class Target:
    """What attention will be asked to do, as far as the choice depends on it."""

    platform: str  # as jax.Device.platform says: "cpu", "gpu", "tpu"
    spec: PageSpec
    num_q_heads: int
    q_dtype: Any
    device_kind: str = ""
    num_devices: int = 1  # that share the KV heads
    num_seqs: int = 1  # in the largest step
    pages_per_seq: int = 1


@dataclass(frozen=True)
class Candidate:
    """An implementation, and what speaks against it: `refuse` returns a reason to pass it over, or None if it fits.

    `limit` returns what is too large for it, or None: that is for the user to change, never a reason to fall back
    to something slow. A candidate with a `platform` is for that one alone.
    """

    name: str
    make: Callable[[Target], PagedAttention]
    refuse: Callable[[Target], str | None]
    platform: str | None = None
    limit: Callable[[Target], str | None] = lambda target: None


def refuse_xla(target: Target) -> str | None:
    """The XLA implementation runs on every platform; only these shapes and types are beyond it."""
    heads, kv_heads = target.num_q_heads, target.spec.num_kv_heads
    if heads % kv_heads:
        return f"{heads} query heads do not divide evenly among {kv_heads} KV heads"
    for what, dtype in (("queries", target.q_dtype), ("pages", target.spec.dtype)):
        if str(dtype) not in ("float32", "bfloat16", "float16"):
            return f"{what} are {dtype}; it takes float32, bfloat16 and float16"
    return None


def refuse_tpu(target: Target) -> str | None:
    """The TPU kernels take the usual sizes, on a TPU whose memories this jax knows."""
    heads, kv_heads = target.num_q_heads, target.spec.num_kv_heads
    if heads % kv_heads:
        return f"{heads} query heads do not divide evenly among {kv_heads} KV heads"
    try:
        device_of(target.device_kind)
    except ValueError as error:
        return str(error)
    return refuse_layout(Layout.of(target.spec), target.q_dtype)


def limit_tpu(target: Target) -> str | None:
    """The page table must fit SMEM, and what is in flight VMEM."""
    kv_heads = target.spec.num_kv_heads // target.num_devices
    layout = replace(Layout.of(target.spec), num_kv_heads=kv_heads)
    shape = Shape(layout, target.num_q_heads // target.spec.num_kv_heads, target.q_dtype)
    device = device_of(target.device_kind)
    return refuse_step(device, shape, choose_blocks(device, shape), target.num_seqs, target.pages_per_seq)


def refuse_cpu(target: Target) -> str | None:
    """The native kernel is built where it is used, by that machine's compiler."""
    return cpu.refuse(target.spec, target.num_q_heads, target.q_dtype)


def make_hopper(target: Target) -> PagedAttention:
    from pallas_kernels.paged_attention.gpu import GpuPagedAttention  # where Mosaic GPU is missing, nobody asks for it

    return GpuPagedAttention(target.num_q_heads // target.spec.num_kv_heads)


def refuse_hopper(target: Target) -> str | None:
    return gpu_blocks.refuse(target.platform, target.device_kind, target.spec, target.num_q_heads, target.q_dtype)


# The best first.
CANDIDATES: tuple[Candidate, ...] = (
    Candidate("tpu kernels", lambda target: TpuPagedAttention(target.device_kind), refuse_tpu, "tpu", limit_tpu),
    Candidate("native", lambda target: cpu.CpuPagedAttention(), refuse_cpu, "cpu"),
    Candidate("hopper", make_hopper, refuse_hopper, "gpu"),
    Candidate("xla", lambda target: XlaPagedAttention(), refuse_xla),
)


class NoImplementationError(ValueError):
    """No implementation of paged attention fits; the message lists every reason."""


class StepTooLargeError(ValueError):
    """The best implementation cannot take steps this large; the message says what to change."""


def choose(
    platform: str,
    spec: PageSpec,
    *,
    num_q_heads: int,
    q_dtype: Any,
    device_kind: str = "",
    num_devices: int = 1,
    num_seqs: int = 1,
    pages_per_seq: int = 1,
    candidates: tuple[Candidate, ...] = CANDIDATES,
) -> tuple[PagedAttention, str]:
    """The first candidate that does not refuse, and the reason for it in words fit for a log.

    Raises NoImplementationError, with every candidate's reason, if all refuse; StepTooLargeError, with the numbers
    and the setting to change, if steps of `num_seqs` sequences of `pages_per_seq` pages do not fit the one chosen.
    """
    target = Target(platform, spec, num_q_heads, np.dtype(q_dtype), device_kind, num_devices, num_seqs, pages_per_seq)
    refusals = []
    for candidate in candidates:
        if candidate.platform not in (None, platform):
            continue
        refusal = candidate.refuse(target)
        if refusal is None:
            if problem := candidate.limit(target):
                raise StepTooLargeError(f"{candidate.name}: {problem}")
            instead = "; ".join(refusals) or "no kernel is ahead of it for this platform"
            return candidate.make(target), f"{platform}: {candidate.name} ({instead})"
        refusals.append(f"{candidate.name}: {refusal}")
    raise NoImplementationError(
        f"no paged attention for {platform} {device_kind} with {num_q_heads} query heads of {target.q_dtype}, "
        f"{spec.num_kv_heads} KV heads of head_dim {spec.head_dim} and {spec.page_size_tokens}-token pages of "
        f"{spec.dtype}: " + "; ".join(refusals)
    )

"""Prints what the TPU kernels move and multiply, counted from their plan, against the least that would do.

    python scripts/tpu_roofline.py          # the tables of docs/tpu_kernels.md

Arithmetic, not measurement: the times are bytes and operations divided by the data sheet's peaks.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.paged_attention.tpu_blocks import Shape, choose_blocks, device_of
from pallas_kernels.paged_attention.tpu_layout import Layout
from pallas_kernels.paged_attention.tpu_traffic import Traffic, count_traffic

MIB = 1 << 20
MAX_MODEL_LEN = 32768


@dataclass(frozen=True)
class Peak:
    """A TPU core's data sheet."""

    name: str
    device_kind: str
    bytes_per_second: float
    flops_per_second: float  # bfloat16


PEAKS = (
    Peak("v5e", "TPU v5 lite", 0.82e12, 197e12),
    Peak("v6e", "TPU v6 lite", 1.64e12, 920e12),
    Peak("TPU7x core", "TPU7x", 3.7e12, 1155e12),
)
BFLOAT16 = jnp.dtype("bfloat16")
DECODE_CONTEXTS = (100, 300, 1000, 4000, 16000)
CHUNKS = ((0, 512), (0, 2048), (2048, 2048), (8192, 2048), (30000, 2048))


def main() -> None:
    print("64 decode rows, one layer (32 query heads, 8 KV heads, head_dim 128, bfloat16):\n")
    columns = "| MiB moved | useful | MXU work useful | memory at peak | MXU at peak |"
    print("| device | context | copies, page 16 | page 128 " + columns + "\n" + "|---" * 9 + "|")
    for peak in PEAKS:
        for context in DECODE_CONTEXTS:
            small, large = (count(peak, page_size, [(context - 1, 1)] * 64, 64) for page_size in (16, 128))
            copies = f"{small.copies} | {large.copies}"
            print(f"| {peak.name} | {context} | {copies} | {describe(large, peak)} |")
    print("\nOne prompt chunk, one layer of the same:\n")
    print("| device | context + chunk | copies, page 128 " + columns + "\n" + "|---" * 8 + "|")
    for peak in PEAKS:
        for context, chunk in CHUNKS:
            traffic = count(peak, 128, [(context, chunk)], 0)
            print(f"| {peak.name} | {context} + {chunk} | {traffic.copies} | {describe(traffic, peak)} |")


def count(peak: Peak, page_size: int, sequences: list[tuple[int, int]], num_decode: int) -> Traffic:
    shape = Shape(Layout(8, 128, page_size, BFLOAT16), 4, BFLOAT16)
    return count_traffic(
        shape,
        choose_blocks(device_of(peak.device_kind), shape),
        sequences,
        num_seqs=num_decode,
        pages_per_seq=MAX_MODEL_LEN // page_size,
        num_decode=num_decode,
    )


def describe(traffic: Traffic, peak: Peak) -> str:
    return (
        f"{traffic.moved_bytes / MIB:.1f} | {traffic.useful_byte_share:.1%} | {traffic.useful_flop_share:.1%} | "
        f"{traffic.moved_bytes / peak.bytes_per_second * 1e6:.0f} µs | "
        f"{traffic.flops / peak.flops_per_second * 1e6:.0f} µs"
    )


if __name__ == "__main__":
    main()

"""Which implementation of paged attention is chosen, and what is said about it."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention.api import PageSpec
from pallas_kernels.paged_attention.dispatch import (
    CANDIDATES,
    Candidate,
    NoImplementationError,
    StepTooLargeError,
    choose,
)
from pallas_kernels.paged_attention.tpu import TpuPagedAttention
from pallas_kernels.paged_attention.tpu_blocks import Shape, choose_blocks, device_of, refuse_step
from pallas_kernels.paged_attention.tpu_layout import TILE_TOKENS, Layout
from pallas_kernels.paged_attention.xla import XlaPagedAttention

SPEC = PageSpec(num_layers=1, num_pages=4, page_size_tokens=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_xla_serves_where_there_is_no_kernel_and_says_why(platform: str) -> None:
    spec = replace(SPEC, dtype="float16")  # what the CPU's own kernel refuses
    attention, reason = choose(platform, spec, num_q_heads=4, q_dtype="bfloat16")
    assert isinstance(attention, XlaPagedAttention)
    assert reason.startswith(f"{platform}: xla")


def on_tpu(spec: PageSpec = SPEC, **options: Any):
    return choose("tpu", spec, **{"num_q_heads": 4, "q_dtype": "bfloat16", "device_kind": "TPU v5 lite", **options})


def test_the_tpu_has_kernels() -> None:
    attention, reason = on_tpu()
    assert isinstance(attention, TpuPagedAttention)
    assert reason.startswith("tpu: tpu kernels")


@pytest.mark.parametrize(
    "fields, device_kind, reason",
    [
        ({"page_size_tokens": 48}, "TPU v5 lite", "pages have 48 tokens; it takes 16, 32, 64, 128, 256; change page_"),
        ({"dtype": "float16"}, "TPU v5 lite", "pages are float16"),
        ({"head_dim": 512}, "TPU v5 lite", "head_dim is 512"),
        ({}, "TPU v99", "jax does not know the TPU 'TPU v99'"),
    ],
)
def test_what_the_tpu_kernels_do_not_take_goes_to_xla(fields: dict, device_kind: str, reason: str) -> None:
    attention, said = on_tpu(replace(SPEC, **fields), device_kind=device_kind)
    assert isinstance(attention, XlaPagedAttention)
    assert reason in said


def test_a_page_table_too_large_for_smem_is_refused_with_what_to_change() -> None:
    sizes: Any = {"num_seqs": 256, "pages_per_seq": 2048}
    with pytest.raises(
        StepTooLargeError, match=r"256 sequences x 2048 pages takes 2.01 MiB .* raise page_size \(16 now"
    ):
        on_tpu(**sizes)
    on_tpu(replace(SPEC, page_size_tokens=128), num_seqs=256, pages_per_seq=256)


def test_decode_rows_too_many_for_vmem_are_refused_with_what_to_change() -> None:
    spec = replace(SPEC, num_kv_heads=32, head_dim=128)
    sizes: Any = {"num_q_heads": 32, "num_seqs": 4096, "pages_per_seq": 1}
    with pytest.raises(StepTooLargeError, match=r"4096 decode rows alone take 640.0 MiB\); lower max_num_seqs"):
        on_tpu(spec, **sizes)
    on_tpu(spec, **sizes | {"num_seqs": 256})
    on_tpu(spec, **sizes | {"num_seqs": 512}, num_devices=4)


@pytest.mark.parametrize("device_kind", ["TPU v5 lite", "TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16])
def test_chosen_block_sizes_fit_and_divide_one_another(group: int, dtype: str, device_kind: str) -> None:
    device = device_of(device_kind)
    for num_kv_heads in (1, 2, 8, 32):
        for head_dim in (64, 128, 256):
            shape = Shape(Layout(num_kv_heads, head_dim, 128, jnp.dtype(dtype)), group, jnp.dtype(dtype))
            blocks = choose_blocks(device, shape)
            assert blocks.decode_kv % blocks.decode_product_kv == 0
            assert blocks.run_kv % blocks.run_product_kv == 0
            assert blocks.run_q % blocks.run_product_q == blocks.run_product_q % TILE_TOKENS == 0
            if num_kv_heads * group * head_dim <= 8192:  # more heads than any model has on one device
                assert refuse_step(device, shape, blocks, 64, 256) is None


def test_a_refusing_candidate_is_passed_over_with_its_reason() -> None:
    kernel = Candidate(
        "kernel", lambda target: XlaPagedAttention(), lambda target: f"head_dim {target.spec.head_dim} is not 128"
    )
    attention, reason = choose("gpu", SPEC, num_q_heads=4, q_dtype="bfloat16", candidates=(kernel, *CANDIDATES))
    assert isinstance(attention, XlaPagedAttention)
    assert reason.startswith("gpu: xla (kernel: head_dim 64 is not 128; hopper: it needs compute capability 9.0")


def test_the_first_that_fits_is_chosen() -> None:
    class Kernel(XlaPagedAttention):
        pass

    kernel = Candidate("kernel", lambda target: Kernel(), lambda target: None)
    attention, reason = choose("gpu", SPEC, num_q_heads=4, q_dtype="bfloat16", candidates=(kernel, *CANDIDATES))
    assert type(attention) is Kernel
    assert reason.startswith("gpu: kernel")


def test_an_error_lists_every_reason() -> None:
    kernel = Candidate("kernel", lambda target: XlaPagedAttention(), lambda target: "needs a warp")
    with pytest.raises(
        NoImplementationError, match=r"kernel: needs a warp; hopper: .*; xla: 3 query heads do not divide"
    ):
        choose("gpu", SPEC, num_q_heads=3, q_dtype="bfloat16", candidates=(kernel, *CANDIDATES))
    with pytest.raises(NoImplementationError, match="pages are int8"):
        choose("cpu", replace(SPEC, dtype="int8"), num_q_heads=4, q_dtype="bfloat16")


def test_a_page_spec_is_hashable_and_checks_its_sizes() -> None:
    assert hash(SPEC) == hash(replace(SPEC))
    assert replace(SPEC, dtype="bfloat16") == SPEC
    assert SPEC.page_bytes == 2 * 16 * 2 * 64 * 2
    assert SPEC.scratch_page == 4
    with pytest.raises(ValueError, match="num_pages is 0"):
        replace(SPEC, num_pages=0)

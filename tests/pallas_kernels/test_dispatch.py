"""Which implementation of paged attention is chosen, and what is said about it."""

from dataclasses import replace

import pytest

from pallas_kernels.paged_attention.api import PageSpec
from pallas_kernels.paged_attention.dispatch import CANDIDATES, Candidate, NoImplementationError, choose
from pallas_kernels.paged_attention.xla import XlaPagedAttention

SPEC = PageSpec(num_layers=1, num_pages=4, page_size_tokens=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_xla_serves_every_platform_and_says_why(platform: str) -> None:
    attention, reason = choose(platform, SPEC, num_q_heads=4, q_dtype="bfloat16")
    assert isinstance(attention, XlaPagedAttention)
    assert reason.startswith(f"{platform}: xla")


def test_a_refusing_candidate_is_passed_over_with_its_reason() -> None:
    kernel = Candidate(
        "kernel", lambda _: XlaPagedAttention(), lambda target: f"head_dim {target.spec.head_dim} is not 128"
    )
    attention, reason = choose("gpu", SPEC, num_q_heads=4, q_dtype="bfloat16", candidates=(kernel, *CANDIDATES))
    assert isinstance(attention, XlaPagedAttention)
    assert reason.startswith("gpu: xla (kernel: head_dim 64 is not 128; hopper: it needs compute capability 9.0")


def test_the_first_that_fits_is_chosen() -> None:
    class Kernel(XlaPagedAttention):
        pass

    kernel = Candidate("kernel", lambda _: Kernel(), lambda target: None)
    attention, reason = choose("gpu", SPEC, num_q_heads=4, q_dtype="bfloat16", candidates=(kernel, *CANDIDATES))
    assert type(attention) is Kernel
    assert reason.startswith("gpu: kernel")


def test_an_error_lists_every_reason() -> None:
    kernel = Candidate("kernel", lambda _: XlaPagedAttention(), lambda target: "needs a warp")
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

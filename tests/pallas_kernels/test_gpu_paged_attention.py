"""The Hopper kernels: a few cases in Pallas' GPU interpreter, how work is cut up, what is refused.

Every case runs in scripts/check_gpu_interpreter.py; scripts/check_cuda_compile.py compiles all kernels without a GPU.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.api import PageSpec
from pallas_kernels.paged_attention.case_runner import CaseRunner
from pallas_kernels.paged_attention.cases import EXACT, Case, build
from pallas_kernels.paged_attention.dispatch import choose
from pallas_kernels.paged_attention.gpu import GpuPagedAttention
from pallas_kernels.paged_attention.gpu_blocks import decode_blocks, prefill_blocks
from pallas_kernels.paged_attention.gpu_decode import plan_decode
from pallas_kernels.paged_attention.tiles import Tiles
from pallas_kernels.paged_attention.xla import XlaPagedAttention

SPEC = PageSpec(num_layers=2, num_pages=12, page_size_tokens=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")
SMALL: dict[str, Any] = {"dtype": "bfloat16", "head_dim": 64, "num_q_heads": 2, "num_kv_heads": 1, **EXACT}
PADDED: dict[str, Any] = {"padded_tokens": 20}
WIDE: dict[str, Any] = {"head_dim": 128, "page_size_tokens": 32}
CASES = (
    Case("every-class-sinks", ((150, 1), (0, 1), (20, 3), (3, 12)), sinks=True, **(SMALL | PADDED)),
    Case("prefill-on-context-window-soft-cap", ((130, 70),), window=40, soft_cap=5.0, **SMALL),
    Case("decode-head-dim-128-page-32", ((160, 1), (31, 1)), **(SMALL | WIDE)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_in_the_interpreter_matches_the_reference_without_races(case: Case) -> None:
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    attention = GpuPagedAttention(case.num_q_heads // case.num_kv_heads, num_sms=1, interpret=interpret)
    result = CaseRunner(lambda _: attention).run(case)
    assert result.close, result
    assert result.pages_equal
    assert not get_races().races_found


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("lengths", [[1], [300, 5, 128, 129], [5000, *range(1, 40)], []], ids=len)
def test_the_stream_of_blocks_is_cut_into_equal_runs(lengths: list[int], num_kv_heads: int, window: int | None) -> None:
    blocks = replace(decode_blocks(SPEC, 4, num_sms=7), num_ctas=7)
    padded = np.array([*lengths, 0, 0], np.int32)  # two tiles are not in use
    used = (padded > 0).astype(np.int32)
    tile = np.arange(len(padded), dtype=np.int32)
    tiles = Tiles(*map(jnp.asarray, (tile, tile, np.maximum(padded - 1, 0), used)))
    plan = jax.tree.map(np.asarray, plan_decode(tiles, num_kv_heads, blocks, window))

    seen: dict[tuple[int, int], list[int]] = {}
    numbers: set[int] = set()
    sizes = []
    for cta, (first_pair, pairs, begin, stop) in enumerate(plan.ctas):
        sizes.append(stop - begin)
        for pair in range(first_pair, first_pair + pairs):
            tile_index, head = divmod(pair, num_kv_heads)
            _, _, first_block, count, end, start = plan.tiles[tile_index]
            start += head * count
            low, high = max(begin - start, 0), min(stop - start, count)
            assert low < high and end == padded[tile_index]
            assert pair + cta not in numbers  # where its partial result goes
            numbers.add(pair + cta)
            # The merge finds it there: it counts from the CTA that holds the pair's first block.
            per_cta = int(plan.blocks_per_cta[0])
            assert start // per_cta <= cta <= (start + count - 1) // per_cta
            seen.setdefault((tile_index, head), []).extend(range(first_block + low, first_block + high))
    for index, length in enumerate(padded):
        first = 0 if window is None else max(0, length - window) // blocks.kv_tokens
        for head in range(num_kv_heads):
            assert seen.pop((index, head), []) == list(range(first, -(-length // blocks.kv_tokens)))
    assert not seen
    assert max(sizes) <= plan.blocks_per_cta[0]  # no CTA has more than its equal share
    assert max(numbers, default=0) < len(padded) * num_kv_heads + blocks.num_ctas


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_blocks_hold_whole_pages_or_parts_of_one(head_dim: int, group: int, page_size: int) -> None:
    spec = replace(SPEC, head_dim=head_dim, page_size_tokens=page_size)
    decode, prefill = decode_blocks(spec, group, 132), prefill_blocks(spec, group)
    for blocks in (decode, prefill):
        assert blocks.unit * blocks.units == blocks.kv_tokens and page_size % blocks.unit == 0
        assert blocks.stages >= 2 and blocks.tile_tokens >= 1
    assert decode.tile_tokens * group <= decode.columns
    assert prefill.tile_tokens * group <= prefill.rows


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"])
def test_hopper_is_chosen_for_compute_capability_9(kind: str) -> None:
    attention, reason = choose("gpu", SPEC, num_q_heads=6, q_dtype="bfloat16", device_kind=kind)
    assert isinstance(attention, GpuPagedAttention) and attention.group == 3
    assert reason.startswith("gpu: hopper")


@pytest.mark.parametrize(
    ("kind", "fields", "num_q_heads", "reason"),
    [
        ("NVIDIA A100-SXM4-80GB", {}, 2, "needs compute capability 9.0"),
        ("NVIDIA B200", {}, 2, "needs compute capability 9.0"),
        ("", {}, 2, "an unnamed device"),
        ("NVIDIA H200", {"dtype": "float32"}, 2, "pages are float32, it takes bfloat16 and float16"),
        ("NVIDIA H200", {"head_dim": 80}, 2, "head_dim is 80, it takes 64, 128 and 256"),
        ("NVIDIA H200", {"page_size_tokens": 8}, 2, "pages of 8"),
        ("NVIDIA H200", {}, 128, "64 query heads of head_dim 64 share a KV head, it takes at most 32"),
    ],
)
def test_xla_takes_what_the_kernels_refuse(kind: str, fields: dict[str, Any], num_q_heads: int, reason: str) -> None:
    spec = replace(SPEC, **fields)
    attention, said = choose("gpu", spec, num_q_heads=num_q_heads, q_dtype=spec.dtype, device_kind=kind)
    assert isinstance(attention, XlaPagedAttention)
    assert said.startswith("gpu: xla (hopper: ") and reason in said


def test_queries_of_another_type_are_refused() -> None:
    attention, said = choose("gpu", SPEC, num_q_heads=2, q_dtype="float16", device_kind="NVIDIA H200")
    assert isinstance(attention, XlaPagedAttention)
    assert "queries are float16 and pages bfloat16" in said


ATTENTION = GpuPagedAttention(2, num_sms=1)


def test_pages_are_packed_and_sharded_by_head() -> None:
    inputs = build(replace(CASES[0], num_kv_heads=2))
    pages = ATTENTION.pack_pages(inputs.pages_k, inputs.pages_v)
    assert jax.tree.map(jnp.shape, pages) == jax.tree.map(jnp.shape, ATTENTION.make_pages(inputs.spec))
    for got, plain in zip(ATTENTION.unpack_pages(pages, inputs.spec), (inputs.pages_k, inputs.pages_v), strict=True):
        np.testing.assert_array_equal(got.view(np.uint16), plain.view(np.uint16))
    split: Any = ATTENTION.page_sharding(inputs.spec, "model").k
    assert pages.k.shape[split.index("model")] == inputs.spec.num_kv_heads


def test_pages_are_copied_read_and_written() -> None:
    rng = np.random.default_rng(0)
    shape = (SPEC.num_layers, SPEC.num_pages + 1, SPEC.page_size_tokens, SPEC.num_kv_heads, SPEC.head_dim)
    plain = [rng.standard_normal(shape, np.float32).astype(SPEC.dtype) for _ in range(2)]
    pages = ATTENTION.copy_pages(ATTENTION.pack_pages(*plain), jnp.array([1, 2, 12]), jnp.array([2, 9, 12]))
    host = jax.device_get(ATTENTION.read_pages(pages, jnp.array([3, 7])))
    assert host.k.shape == (2, SPEC.num_layers, SPEC.num_kv_heads, SPEC.page_size_tokens, SPEC.head_dim)
    pages = ATTENTION.write_pages(pages, jnp.array([4, 0]), jax.tree.map(lambda leaf: leaf[::-1], host))
    for got, before in zip(ATTENTION.unpack_pages(pages, SPEC), plain, strict=True):
        expected = before.copy()
        expected[:, [2, 9, 4, 0]] = before[:, [1, 2, 7, 3]]
        np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))

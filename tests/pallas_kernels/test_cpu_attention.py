"""Native paged attention on the CPU against the reference, on every instruction set this machine runs."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.native import build as native
from pallas_kernels.paged_attention.api import PageSpec
from pallas_kernels.paged_attention.cases import CASES, Case, Inputs, build
from pallas_kernels.paged_attention.cpu import CpuPagedAttention
from pallas_kernels.paged_attention.dispatch import choose
from pallas_kernels.paged_attention.xla import XlaPagedAttention

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
CASE = {case.name: case for case in CASES}
SPEC = PageSpec(num_layers=2, num_pages=12, page_size_tokens=16, num_kv_heads=2, head_dim=16, dtype="float32")

try:
    native.find_compiler()
except native.BuildError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module", params=native.runnable_instruction_sets(), ids=lambda chosen: chosen.name)
def attention(request: pytest.FixtureRequest) -> CpuPagedAttention:
    return CpuPagedAttention(request.param)


@pytest.fixture(scope="module")
def best() -> CpuPagedAttention:
    return CpuPagedAttention()


def attend(attention: CpuPagedAttention, spec: PageSpec, options: dict, q, k, v, pages, batch, layer, sinks):
    work = attention.make_work(batch, q.shape[0], spec)
    return attention.attend(q, k, v, pages, work, layer=layer, **{**options, "sinks": sinks})


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=6)
def step(attention: CpuPagedAttention, spec: PageSpec, options: tuple, *arguments):
    return attend(attention, spec, dict(options), *arguments)


def run(attention: CpuPagedAttention, inputs: Inputs):
    pages = attention.pack_pages(inputs.pages_k, inputs.pages_v)
    static = tuple((name, value) for name, value in inputs.options.items() if name != "sinks")
    layer, sinks = jnp.int32(inputs.layer), inputs.options["sinks"]
    return step(attention, inputs.spec, static, inputs.q, inputs.k, inputs.v, pages, inputs.batch, layer, sinks)


def assert_close(got, expected, dtype) -> None:
    tolerance = TOLERANCE[str(jnp.dtype(dtype))]
    scale = np.abs(expected).max(initial=1e-3)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=tolerance, atol=tolerance * scale)


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


def assert_case(attention: CpuPagedAttention, case: Case) -> None:
    inputs = build(case)
    expected, expected_k, expected_v = inputs.expected()
    out, pages = run(attention, inputs)
    assert out.dtype == inputs.q.dtype
    assert_close(out, expected, case.dtype)
    used = int(inputs.batch.cu_q_lens[-1])
    assert not np.asarray(out[used:], np.float32).any()
    for got, wanted in zip(attention.unpack_pages(pages, inputs.spec), (expected_k, expected_v), strict=True):
        assert_same_bits(got, wanted)  # the scratch page too: padding tokens write nowhere


TAKEN = [case for case in CASES if not case.benchmark and case.dtype in TOLERANCE]
# What only some of the kernel's paths see: channels that fill no vector or half a tile, many heads, wide tiles.
SHAPES = [
    replace(CASE["mixed"], name=f"{dtype}-{q}x{kv}x{dim}", dtype=dtype, num_q_heads=q, num_kv_heads=kv, head_dim=dim)
    for dtype in ("float32", "bfloat16")
    for q, kv, dim in ((5, 1, 24), (2, 2, 80), (32, 2, 8), (60, 1, 16), (3, 3, 160))
]


@pytest.mark.parametrize("case", [*TAKEN, *SHAPES], ids=lambda case: case.name)
def test_case_matches_the_reference_and_writes_only_its_tokens(attention: CpuPagedAttention, case: Case) -> None:
    assert_case(attention, case)


def with_pages_of_their_own(case: Case, inputs: Inputs) -> Inputs:
    """The same tokens, with a copy of the shared pages for every sequence."""
    table, free = np.array(inputs.batch.page_table), set(range(inputs.spec.num_pages))
    used = [-(-sum(lengths) // case.page_size_tokens) for lengths in case.sequences]
    free -= {int(page) for sequence, count in enumerate(used) for page in table[sequence, :count]}
    pages_k, pages_v = inputs.pages_k.copy(), inputs.pages_v.copy()
    for sequence in range(1, case.shared[0][0]):
        for place in range(used[sequence]):
            page, copy = table[sequence, place], free.pop()
            pages_k[:, copy], pages_v[:, copy] = pages_k[:, page], pages_v[:, page]
            table[sequence, place] = copy
    batch = replace(inputs.batch, page_table=jnp.asarray(table))
    return replace(inputs, batch=batch, pages_k=pages_k, pages_v=pages_v)


@pytest.mark.parametrize("case", [case for case in TAKEN if case.shared], ids=lambda case: case.name)
def test_shared_pages_are_read_together_with_the_same_result_to_the_last_bit(
    attention: CpuPagedAttention, case
) -> None:
    case = replace(case, padded_pages=case.padded_pages + 1300)
    shared = build(case)
    out, _ = run(attention, shared)
    expected, _ = run(attention, with_pages_of_their_own(case, shared))
    assert_same_bits(np.asarray(out), np.asarray(expected))


def test_pages_of_another_dtype_than_the_queries(attention: CpuPagedAttention) -> None:
    inputs = build(CASE["mixed-bfloat16"])
    inputs = replace(inputs, q=inputs.q.astype(jnp.float32), k=inputs.k.astype(jnp.float32))
    expected, _, _ = inputs.expected()
    out, pages = run(attention, inputs)
    assert out.dtype == jnp.float32 and pages.dtype == jnp.bfloat16
    assert_close(out, expected, "float32")


def scan_layers(attention: CpuPagedAttention, inputs: Inputs, q, k, v, pages, batch):
    """Every layer attends with inputs of its own; the work is made once, outside."""
    work = attention.make_work(batch, q.shape[0], inputs.spec)

    def layer_step(pages, layer):
        scaled = (layer + 1).astype(k.dtype)
        out, pages = attention.attend(q, k * scaled, v * scaled, pages, work, layer=layer, **inputs.options)
        return pages, out

    return lax.scan(layer_step, pages, jnp.arange(inputs.spec.num_layers, dtype=jnp.int32))


def test_a_scan_over_layers_equals_layer_by_layer(best: CpuPagedAttention) -> None:
    inputs = build(replace(CASE["mixed"], num_layers=3))
    pages = best.pack_pages(inputs.pages_k, inputs.pages_v)
    scan = jax.jit(partial(scan_layers, best, inputs), donate_argnums=3)
    pages, outs = scan(inputs.q, inputs.k, inputs.v, pages, inputs.batch)
    pages_k, pages_v = inputs.pages_k, inputs.pages_v
    for layer in range(3):
        k, v = inputs.k * (layer + 1), inputs.v * (layer + 1)
        scaled = replace(inputs, k=k, v=v, pages_k=pages_k, pages_v=pages_v, layer=layer)
        expected, pages_k, pages_v = scaled.expected()
        assert_close(outs[layer], expected, "float32")
    got_k, got_v = best.unpack_pages(pages, inputs.spec)
    assert_same_bits(got_k, pages_k)
    assert_same_bits(got_v, pages_v)


def test_a_step_updates_the_pool_in_place(best: CpuPagedAttention) -> None:
    inputs = build(CASE["mixed"])
    spec = replace(inputs.spec, num_pages=20000, num_layers=4)
    pages = jax.eval_shape(partial(best.make_pages, spec))
    scan = jax.jit(partial(scan_layers, best, replace(inputs, spec=spec)), donate_argnums=3)
    memory = scan.lower(inputs.q, inputs.k, inputs.v, pages, inputs.batch).compile().memory_analysis()
    pool_bytes = pages.size * pages.dtype.itemsize
    assert memory is not None and memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 10


def test_shard_map_over_kv_heads(best: CpuPagedAttention) -> None:
    inputs = build(replace(CASE["mixed-sinks"], num_q_heads=8, num_kv_heads=4))
    expected, expected_k, expected_v = inputs.expected()
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    heads, whole = PartitionSpec(None, "model", None), PartitionSpec()
    pages_sharding = best.page_sharding(inputs.spec, "model")
    sharded = jax.shard_map(
        partial(attend, best, inputs.spec, inputs.options),
        mesh=mesh,
        in_specs=(heads, heads, heads, pages_sharding, whole, whole, PartitionSpec("model")),
        out_specs=(heads, pages_sharding),
        check_vma=False,
    )
    pages = best.pack_pages(inputs.pages_k, inputs.pages_v)
    arguments = (inputs.batch, jnp.int32(inputs.layer), inputs.options["sinks"])
    out, pages = jax.jit(sharded)(inputs.q, inputs.k, inputs.v, pages, *arguments)
    assert_close(out, expected, "float32")
    for got, wanted in zip(best.unpack_pages(pages, inputs.spec), (expected_k, expected_v), strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_move_whole_and_in_order(best: CpuPagedAttention, dtype: str) -> None:
    spec = replace(SPEC, dtype=dtype, page_size_tokens=32)
    shape = (spec.num_layers, spec.num_pages + 1, spec.page_size_tokens, spec.num_kv_heads, spec.head_dim)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    pages = best.copy_pages(best.pack_pages(k, v), jnp.array([1, 2, 4]), jnp.array([2, 1, 9]))
    host = jax.device_get(best.read_pages(pages, jnp.array([1, 2])))
    pages = best.write_pages(pages, jnp.array([7, 8]), host[::-1])
    for got, before in zip(best.unpack_pages(pages, spec), (k, v), strict=True):
        expected = before.copy()
        expected[:, [2, 1, 9, 7, 8]] = before[:, [1, 2, 4, 1, 2]]
        assert_same_bits(got, expected)


def test_make_pages_are_zero_and_of_the_size_the_spec_says(best: CpuPagedAttention) -> None:
    pages = best.make_pages(SPEC)
    assert pages.nbytes == SPEC.page_bytes * (SPEC.num_pages + 1)
    assert not np.asarray(pages).any()


def test_dispatch_chooses_it_on_the_cpu() -> None:
    attention, reason = choose("cpu", SPEC, num_q_heads=4, q_dtype="float32")
    assert isinstance(attention, CpuPagedAttention)
    assert reason.startswith("cpu: native")


@pytest.mark.parametrize(
    ("spec", "q_dtype", "reason"),
    [
        (replace(SPEC, dtype="float16"), "float32", "pages are float16; it takes float32 and bfloat16"),
        (SPEC, "float16", "queries are float16; it takes float32 and bfloat16"),
        (replace(SPEC, page_size_tokens=8), "float32", "pages of 8 tokens are not whole blocks of 16"),
        (replace(SPEC, head_dim=15, dtype="bfloat16"), "float32", "head_dim 15 is odd"),
    ],
)
def test_what_it_does_not_take_goes_to_xla(spec: PageSpec, q_dtype: str, reason: str) -> None:
    attention, words = choose("cpu", spec, num_q_heads=4, q_dtype=q_dtype)
    assert isinstance(attention, XlaPagedAttention)
    assert reason in words


def test_without_a_compiler_xla_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    native.build.cache_clear()
    attention, words = choose("cpu", SPEC, num_q_heads=4, q_dtype="float32")
    assert isinstance(attention, XlaPagedAttention)
    assert "native: no C++ compiler (g++, clang++ or c++) is installed" in words

"""Paged attention in XLA against the reference: every case, and how the engine will use it."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.paged_attention.api import AttentionBatch, PageSpec
from pallas_kernels.paged_attention.cases import CASES, Case, Inputs, build
from pallas_kernels.paged_attention.xla import XlaPagedAttention

TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
CASE = {case.name: case for case in CASES}
ATTENTION = XlaPagedAttention()


def attend(spec: PageSpec, options: dict, q, k, v, pages, batch, layer, sinks):
    work = ATTENTION.make_work(batch, q.shape[0], spec)
    return ATTENTION.attend(q, k, v, pages, work, layer=layer, **{**options, "sinks": sinks})


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)
def step(spec: PageSpec, options: tuple, *arguments):
    return attend(spec, dict(options), *arguments)


def run(inputs: Inputs):
    pages = ATTENTION.pack_pages(inputs.pages_k, inputs.pages_v)
    static = tuple((name, value) for name, value in inputs.options.items() if name != "sinks")
    layer, sinks = jnp.int32(inputs.layer), inputs.options["sinks"]
    return step(inputs.spec, static, inputs.q, inputs.k, inputs.v, pages, inputs.batch, layer, sinks)


def assert_close(got, expected, dtype) -> None:
    tolerance = TOLERANCE[str(jnp.dtype(dtype))]
    scale = np.abs(expected).max(initial=1e-3)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=tolerance, atol=tolerance * scale)


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


@pytest.mark.parametrize("case", [case for case in CASES if not case.benchmark], ids=lambda case: case.name)
def test_case_matches_the_reference_and_writes_only_its_tokens(case: Case) -> None:
    inputs = build(case)
    expected, expected_k, expected_v = inputs.expected()
    out, pages = run(inputs)
    assert out.dtype == inputs.q.dtype
    assert_close(out, expected, case.dtype)
    used = int(inputs.batch.cu_q_lens[-1])
    assert not np.asarray(out[used:], np.float32).any()
    for got, wanted in zip(ATTENTION.unpack_pages(pages, inputs.spec), (expected_k, expected_v), strict=True):
        scratch = inputs.spec.scratch_page
        assert_same_bits(got[:, :scratch], wanted[:, :scratch])
        # Padding tokens may only reach the scratch page of their own layer.
        others = np.arange(inputs.spec.num_layers) != inputs.layer
        assert_same_bits(got[others, scratch], wanted[others, scratch])


def test_case_names_are_unique() -> None:
    assert len(CASE) == len(CASES)


def test_pages_of_another_dtype_than_the_queries() -> None:
    inputs = build(CASE["mixed-bfloat16"])
    inputs = replace(inputs, q=inputs.q.astype(jnp.float32), k=inputs.k.astype(jnp.float32))
    expected, _, _ = inputs.expected()
    out, pages = run(inputs)
    assert out.dtype == jnp.float32 and pages.k.dtype == jnp.bfloat16
    assert_close(out, expected, "float32")


def scan_layers(inputs: Inputs, num_layers: int, q, k, v, pages, batch):
    """Every layer attends with the same inputs; the work is made once, outside."""
    work = ATTENTION.make_work(batch, q.shape[0], inputs.spec)

    def layer_step(pages, layer):
        scaled = (layer + 1).astype(k.dtype)
        out, pages = ATTENTION.attend(q, k * scaled, v * scaled, pages, work, layer=layer, **inputs.options)
        return pages, out

    return lax.scan(layer_step, pages, jnp.arange(num_layers, dtype=jnp.int32))


def test_scan_over_layers_with_donated_pages_equals_layer_by_layer() -> None:
    case = replace(CASE["mixed"], num_layers=3)
    inputs = build(case)
    pages = ATTENTION.pack_pages(inputs.pages_k, inputs.pages_v)
    scan = jax.jit(partial(scan_layers, inputs, 3), donate_argnums=3)
    pages, outs = scan(inputs.q, inputs.k, inputs.v, pages, inputs.batch)
    pages_k, pages_v = inputs.pages_k, inputs.pages_v
    for layer in range(3):
        scaled = replace(
            inputs,
            k=inputs.k * (layer + 1),
            v=inputs.v * (layer + 1),
            pages_k=pages_k,
            pages_v=pages_v,
            layer=layer,
        )
        expected, pages_k, pages_v = scaled.expected()
        assert_close(outs[layer], expected, case.dtype)
    got_k, got_v = ATTENTION.unpack_pages(pages, inputs.spec)
    assert_same_bits(got_k[:, :-1], pages_k[:, :-1])
    assert_same_bits(got_v[:, :-1], pages_v[:, :-1])


def assert_in_place(function, arguments: tuple, pages_at: int) -> None:
    """Donating the pages makes the function need no memory of the pool's size."""
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments[pages_at]))
    memory = jax.jit(function, donate_argnums=pages_at).lower(*arguments).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 10


@pytest.mark.parametrize("name", ["mixed", "one-token-no-padding"])
def test_a_step_updates_the_pool_in_place(name: str) -> None:
    inputs = build(CASE[name])
    spec = replace(inputs.spec, num_pages=20000, num_layers=4)
    pages = jax.eval_shape(partial(ATTENTION.make_pages, spec))
    scan = partial(scan_layers, replace(inputs, spec=spec), 4)
    assert_in_place(scan, (inputs.q, inputs.k, inputs.v, pages, inputs.batch), 3)


@pytest.mark.parametrize("num_ids", [1, 4])
def test_page_moves_update_the_pool_in_place(num_ids: int) -> None:
    pages = jax.eval_shape(partial(ATTENTION.make_pages, replace(SPEC, num_pages=2000)))
    ids = jax.ShapeDtypeStruct((num_ids,), jnp.int32)
    host = jax.eval_shape(ATTENTION.read_pages, pages, ids)
    assert_in_place(ATTENTION.copy_pages, (pages, ids, ids), 0)
    assert_in_place(ATTENTION.write_pages, (pages, ids, host), 0)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_kv_heads(check_vma: bool) -> None:
    case = replace(CASE["mixed-sinks"], num_q_heads=8, num_kv_heads=4)
    inputs = build(case)
    expected, expected_k, _ = inputs.expected()
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    heads, whole = PartitionSpec(None, "model", None), PartitionSpec()
    pages_sharding = ATTENTION.page_sharding(inputs.spec, "model")
    sharded = jax.shard_map(
        partial(attend, inputs.spec, inputs.options),
        mesh=mesh,
        in_specs=(heads, heads, heads, pages_sharding, whole, whole, PartitionSpec("model")),
        out_specs=(heads, pages_sharding),
        check_vma=check_vma,
    )
    pages = ATTENTION.pack_pages(inputs.pages_k, inputs.pages_v)
    arguments = (inputs.batch, jnp.int32(inputs.layer), inputs.options["sinks"])
    out, pages = jax.jit(sharded)(inputs.q, inputs.k, inputs.v, pages, *arguments)
    assert_close(out, expected, case.dtype)
    assert_same_bits(ATTENTION.unpack_pages(pages, inputs.spec)[0][:, :-1], expected_k[:, :-1])


SPEC = PageSpec(num_layers=2, num_pages=12, page_size_tokens=16, num_kv_heads=2, head_dim=16, dtype="float32")


def random_pages(spec: PageSpec, seed: int):
    shape = (spec.num_layers, spec.num_pages + 1, spec.page_size_tokens, spec.num_kv_heads, spec.head_dim)
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape, np.float32) for _ in range(2))


def test_copy_pages_reads_all_sources_before_writing() -> None:
    k, v = random_pages(SPEC, 0)
    scratch = SPEC.scratch_page
    source, target = [1, 2, 3, 4, scratch, scratch], [2, 3, 1, 9, scratch, scratch]
    copy = jax.jit(ATTENTION.copy_pages, donate_argnums=0)
    pages = copy(ATTENTION.pack_pages(k, v), jnp.array(source), jnp.array(target))
    for got, before in zip(ATTENTION.unpack_pages(pages, SPEC), (k, v), strict=True):
        expected = before.copy()
        expected[:, target] = before[:, source]
        assert_same_bits(got, expected)


def test_one_page_is_copied_and_written_too() -> None:
    k, v = random_pages(SPEC, 2)
    pages = ATTENTION.copy_pages(ATTENTION.pack_pages(k, v), jnp.array([4]), jnp.array([8]))
    pages = ATTENTION.write_pages(pages, jnp.array([1]), ATTENTION.read_pages(pages, jnp.array([8])))
    for got, before in zip(ATTENTION.unpack_pages(pages, SPEC), (k, v), strict=True):
        expected = before.copy()
        expected[:, [8, 1]] = before[:, [4, 4]]
        assert_same_bits(got, expected)


def test_pages_read_out_and_written_elsewhere_are_the_same() -> None:
    k, v = random_pages(SPEC, 1)
    pages = ATTENTION.pack_pages(k, v)
    host = jax.device_get(jax.jit(ATTENTION.read_pages)(pages, jnp.array([3, 7, 0])))
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(host))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(host)) == 3 * SPEC.page_bytes
    # A page of the host tier is one index of the leading axis, in whatever order it is put back.
    host = jax.tree.map(lambda leaf: leaf[[2, 0, 1]], host)
    write = jax.jit(ATTENTION.write_pages, donate_argnums=0)
    pages = write(pages, jnp.array([5, 6, 11]), host)
    for got, before in zip(ATTENTION.unpack_pages(pages, SPEC), (k, v), strict=True):
        expected = before.copy()
        expected[:, [5, 6, 11]] = before[:, [0, 3, 7]]
        assert_same_bits(got, expected)


def test_make_pages_are_zero_and_of_the_size_the_spec_says() -> None:
    pages = ATTENTION.make_pages(SPEC)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pages)) == SPEC.page_bytes * (SPEC.num_pages + 1)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(pages))
    assert jax.tree.structure(ATTENTION.page_sharding(SPEC, "model")) == jax.tree.structure(pages)


def test_chunks_and_decode_give_what_one_prefill_gives() -> None:
    spec = replace(SPEC, num_pages=16)
    length, num_q_heads, rows = 150, 4, 80
    rng = np.random.default_rng(3)
    q = rng.standard_normal((length, num_q_heads, spec.head_dim), np.float32)
    k = rng.standard_normal((length, spec.num_kv_heads, spec.head_dim), np.float32)
    v = rng.standard_normal((length, spec.num_kv_heads, spec.head_dim), np.float32)
    table = jnp.asarray(rng.permutation(spec.num_pages)[None].repeat(2, 0), jnp.int32)

    @partial(jax.jit, donate_argnums=3)
    def serve_span(q, k, v, pages, start, end):
        new = end - start
        batch = AttentionBatch(
            cu_q_lens=jnp.stack([0, new, new]).astype(jnp.int32),
            kv_lens=jnp.stack([end, 0]).astype(jnp.int32),
            page_table=table,
            num_decode=(new == 1).astype(jnp.int32),
            num_seqs=jnp.int32(1),
        )
        work = ATTENTION.make_work(batch, q.shape[0], spec)
        return ATTENTION.attend(q, k, v, pages, work, layer=1, scale=0.25)

    def serve(edges: list[int], rows: int) -> np.ndarray:
        pages, outs = ATTENTION.make_pages(spec), []
        for start, end in itertools.pairwise(edges):
            spare = ((0, rows - (end - start)), (0, 0), (0, 0))
            span_q, span_k, span_v = (np.pad(x[start:end], spare) for x in (q, k, v))
            out, pages = serve_span(span_q, span_k, span_v, pages, start, end)
            outs.append(np.asarray(out)[: end - start])
        return np.concatenate(outs)

    whole = serve([0, length], length)
    gradual = serve([0, 16, 49, 50, 52, 130, *range(131, length + 1)], rows)
    np.testing.assert_allclose(gradual, whole, rtol=1e-5, atol=1e-6)

"""Paged attention for TPU, run by the TPU interpreter with race detection, against the reference."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.paged_attention.api import PageSpec
from pallas_kernels.paged_attention.cases import CASES, EXACT, Case, Inputs, build
from pallas_kernels.paged_attention.tpu import TpuPagedAttention
from pallas_kernels.paged_attention.tpu_blocks import Blocks, Shape, choose_blocks, device_of
from pallas_kernels.paged_attention.tpu_layout import Layout
from pallas_kernels.paged_attention.tpu_traffic import count_traffic

# A race or a read out of bounds raises. By default all copies share one entry of the vector clock, which orders them:
# with many entries a race between two copies is seen.
INTERPRET = pltpu.InterpretParams(detect_races=True, vector_clock_size=64)
# Small, so that even short sequences take several blocks, products and passes.
BLOCKS = Blocks(decode_kv=128, decode_product_kv=64, run_kv=128, run_product_kv=64, run_q=64, run_product_q=32)
ATTENTION = TpuPagedAttention(blocks=BLOCKS, interpret=INTERPRET)
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
CASE = {case.name: case for case in CASES}

# What the kernels distinguish, in few and small sequences. The interpreter takes seconds to compile each: all but the
# first four, and every case of cases.py, are left to scripts/check_tpu_cases.sh.
SMALL = {
    "decode": Case("decode", ((20, 1), (0, 1), (15, 1), (130, 1)), **EXACT),
    "mixed": Case(
        "mixed",
        ((20, 1), (0, 40), (33, 5), (40, 70), (3, 1), (0, 1)),
        dtype="bfloat16",
        head_dim=128,
        padded_tokens=140,
        padded_sequences=8,
        padded_table=0,
        padded_pages=0,
    ),
    "one-and-a-half-heads": Case(
        "one-and-a-half-heads", ((70, 1), (0, 40), (33, 5)), num_q_heads=9, num_kv_heads=3, head_dim=64, **EXACT
    ),
    "everything": Case(
        "everything",
        ((150, 1), (20, 70), (200, 5)),
        dtype="bfloat16",
        window=100,
        soft_cap=5.0,
        sinks=True,
        page_size_tokens=128,
        **EXACT,
    ),
    "window": Case("window", ((150, 1), (100, 70), (30, 5), (7, 17)), dtype="bfloat16", window=20, **EXACT),
    "head-dim-256-page-32": Case(
        "head-dim-256-page-32", ((70, 1), (20, 70)), page_size_tokens=32, head_dim=256, num_kv_heads=1, **EXACT
    ),
    "page-64-head-dim-80": Case(
        "page-64-head-dim-80", ((63, 1), (64, 5)), dtype="bfloat16", page_size_tokens=64, head_dim=80, **EXACT
    ),
    "page-256": Case("page-256", ((300, 1), (250, 20)), dtype="bfloat16", page_size_tokens=256, **EXACT),
}


@pytest.fixture(autouse=True)
def forget_interpreter_state():
    yield
    pltpu.reset_tpu_interpret_mode_state()  # a raised error would leave the interpreter stuck


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)
def step(spec: PageSpec, options: tuple, q, k, v, pages, batch, layer, sinks):
    work = ATTENTION.make_work(batch, q.shape[0], spec)
    return ATTENTION.attend(q, k, v, pages, work, layer=layer, **dict(options), sinks=sinks)


def run(inputs: Inputs):
    pages = ATTENTION.pack_pages(inputs.pages_k, inputs.pages_v)
    static = tuple((name, value) for name, value in inputs.options.items() if name != "sinks")
    layer, sinks = jnp.int32(inputs.layer), inputs.options["sinks"]
    return step(inputs.spec, static, inputs.q, inputs.k, inputs.v, pages, inputs.batch, layer, sinks)


def assert_close(got: Any, expected: np.ndarray, dtype: Any) -> None:
    tolerance = TOLERANCE[str(jnp.dtype(dtype))]
    scale = np.abs(expected).max(initial=1e-3)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=tolerance, atol=tolerance * scale)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def assert_pages_are_right(inputs: Inputs, pages: Any) -> None:
    """Pages that the step does not write are unchanged bit for bit; in the others, every token's slot is right."""
    _, expected_k, expected_v = inputs.expected()
    batch, page_size = inputs.batch, inputs.spec.page_size_tokens
    expected_same = np.ones((*expected_k.shape[:2], page_size), bool)
    for sequence in range(int(batch.num_seqs)):
        length = int(batch.kv_lens[sequence])
        first_new = length - int(batch.cu_q_lens[sequence + 1] - batch.cu_q_lens[sequence])
        for slot in range(first_new // page_size, -(-length // page_size)):
            expected_same[inputs.layer, batch.page_table[sequence, slot], max(length - slot * page_size, 0) :] = False
    for got, expected in zip(ATTENTION.unpack_pages(pages, inputs.spec), (expected_k, expected_v), strict=True):
        np.testing.assert_array_equal(bits(got[expected_same]), bits(expected[expected_same]))
        # Slots after a sequence's end belong to nobody; the kernel leaves what was there, which is poison, or zeros.
        rest = got[~expected_same]
        assert (np.isnan(rest) | np.isinf(rest) | (rest == 0)).all()


def check(case: Case) -> None:
    inputs = build(case)
    expected, _, _ = inputs.expected()
    out, pages = run(inputs)
    assert out.dtype == inputs.q.dtype
    assert_close(out, expected, case.dtype)
    assert not np.asarray(out[int(inputs.batch.cu_q_lens[-1]) :], np.float32).any()
    assert_pages_are_right(inputs, pages)


@pytest.mark.parametrize("name", ["decode", "mixed", "one-and-a-half-heads", "everything"])
def test_small_case_matches_the_reference(name: str) -> None:
    check(SMALL[name])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", list(SMALL)[4:])
def test_further_small_case_matches_the_reference(name: str) -> None:
    check(SMALL[name])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("case", [case for case in CASES if not case.benchmark], ids=lambda case: case.name)
def test_case_matches_the_reference(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sizes_match_the_reference(dtype: str, head_dim: int, page_size: int) -> None:
    sequences = ((300, 1), (page_size - 1, 1), (page_size, 5), (page_size // 2, 2 * page_size + 3))
    check(Case("sizes", sequences, dtype=dtype, head_dim=head_dim, page_size_tokens=page_size, **EXACT))


@pytest.mark.slow
@pytest.mark.matrix
def test_the_chosen_block_sizes_match_the_reference() -> None:
    attention = TpuPagedAttention("TPU v5 lite", interpret=INTERPRET)
    inputs = build(SMALL["mixed"])
    pages = attention.pack_pages(inputs.pages_k, inputs.pages_v)
    work = attention.make_work(inputs.batch, len(inputs.q), inputs.spec)
    out, pages = jax.jit(partial(attention.attend, layer=inputs.layer, **inputs.options))(
        inputs.q, inputs.k, inputs.v, pages, work
    )
    assert_close(out, inputs.expected()[0], "bfloat16")
    assert_pages_are_right(inputs, pages)


@pytest.mark.slow
@pytest.mark.matrix
def test_pages_of_another_dtype_than_the_queries() -> None:
    inputs = build(SMALL["mixed"])
    inputs = replace(inputs, q=inputs.q.astype(jnp.float32), k=inputs.k.astype(jnp.float32))
    out, pages = run(inputs)
    assert out.dtype == jnp.float32 and pages.dtype == "bfloat16"
    assert_close(out, inputs.expected()[0], "float32")


def test_a_race_would_be_reported(caplog) -> None:
    """Two rows that claim the same page: one's write meets the other's read."""
    attention = TpuPagedAttention(blocks=BLOCKS, interpret=replace(INTERPRET, on_race="warn"))
    inputs = build(Case("two-rows", ((20, 1), (0, 1)), num_kv_heads=1, num_layers=1, **EXACT))
    table = np.array(inputs.batch.page_table)
    table[1, 0] = table[0, 1]
    work = attention.make_work(replace(inputs.batch, page_table=jnp.asarray(table)), len(inputs.q), inputs.spec)
    pages = attention.pack_pages(inputs.pages_k, inputs.pages_v)
    jax.block_until_ready(attention.attend(inputs.q, inputs.k, inputs.v, pages, work, layer=0, scale=1.0))
    assert "RACE DETECTED" in caplog.text


def test_scan_over_layers_equals_layer_by_layer() -> None:
    inputs = build(replace(SMALL["decode"], num_layers=2))
    work = ATTENTION.make_work(inputs.batch, len(inputs.q), inputs.spec)

    def layer_step(pages, layer):
        scaled = (layer + 1).astype(jnp.float32)
        out, pages = ATTENTION.attend(
            inputs.q, inputs.k * scaled, inputs.v * scaled, pages, work, layer=layer, **inputs.options
        )
        return pages, out

    pages = ATTENTION.pack_pages(inputs.pages_k, inputs.pages_v)
    _, outs = jax.jit(lambda pages: lax.scan(layer_step, pages, jnp.arange(2, dtype=jnp.int32)))(pages)
    for layer in range(2):
        scaled = replace(inputs, k=inputs.k * (layer + 1), v=inputs.v * (layer + 1), layer=layer)
        assert_close(outs[layer], scaled.expected()[0], "float32")


@pytest.mark.slow
@pytest.mark.matrix
def test_shard_map_over_kv_heads() -> None:
    case = replace(SMALL["everything"], num_q_heads=4, num_kv_heads=2)
    inputs = build(case)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    heads, whole = PartitionSpec(None, "model", None), PartitionSpec()
    pages_sharding = ATTENTION.page_sharding(inputs.spec, "model")

    def attend(q, k, v, pages, work, sinks):
        options = {**inputs.options, "sinks": sinks}
        return ATTENTION.attend(q, k, v, pages, work, layer=inputs.layer, **options)

    sharded = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(heads, heads, heads, pages_sharding, whole, PartitionSpec("model")),
        out_specs=(heads, pages_sharding),
        check_vma=False,
    )
    pages = ATTENTION.pack_pages(inputs.pages_k, inputs.pages_v)
    work = ATTENTION.make_work(inputs.batch, len(inputs.q), inputs.spec)
    out, pages = jax.jit(sharded)(inputs.q, inputs.k, inputs.v, pages, work, inputs.options["sinks"])
    assert_close(out, inputs.expected()[0], case.dtype)
    assert_pages_are_right(inputs, pages)


SPEC = PageSpec(num_layers=2, num_pages=12, page_size_tokens=32, num_kv_heads=3, head_dim=64, dtype="bfloat16")


def random_pages(spec: PageSpec, seed: int):
    shape = (spec.num_layers, spec.num_pages + 1, spec.page_size_tokens, spec.num_kv_heads, spec.head_dim)
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape, np.float32).astype(spec.dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_packed_pages_come_back(dtype: str, head_dim: int) -> None:
    spec = replace(SPEC, dtype=dtype, head_dim=head_dim)
    k, v = random_pages(spec, 0)
    for got, expected in zip(ATTENTION.unpack_pages(ATTENTION.pack_pages(k, v), spec), (k, v), strict=True):
        np.testing.assert_array_equal(bits(got), bits(expected))


def test_a_pool_has_no_padding_for_the_usual_head_dims() -> None:
    for head_dim in (64, 128, 256):
        for num_kv_heads in (1, 3, 8):
            spec = replace(SPEC, head_dim=head_dim, num_kv_heads=num_kv_heads)
            pages = ATTENTION.make_pages(spec)
            assert pages.slabs.nbytes == spec.page_bytes * (spec.num_pages + 1)
            assert not np.asarray(pages.slabs).any()


def test_copy_pages_reads_all_sources_before_writing() -> None:
    k, v = random_pages(SPEC, 0)
    scratch = SPEC.scratch_page
    source, target = [1, 2, 3, 4, scratch, scratch], [2, 3, 1, 9, scratch, scratch]
    copy = jax.jit(ATTENTION.copy_pages, donate_argnums=0)
    pages = copy(ATTENTION.pack_pages(k, v), jnp.array(source), jnp.array(target))
    for got, before in zip(ATTENTION.unpack_pages(pages, SPEC), (k, v), strict=True):
        expected = before.copy()
        expected[:, target] = before[:, source]
        np.testing.assert_array_equal(bits(got), bits(expected))


def test_pages_read_out_and_written_elsewhere_are_the_same() -> None:
    k, v = random_pages(SPEC, 1)
    host = jax.device_get(jax.jit(ATTENTION.read_pages)(ATTENTION.pack_pages(k, v), jnp.array([3, 7, 0])))
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(host))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(host)) == 3 * SPEC.page_bytes
    host = jax.tree.map(lambda leaf: leaf[[2, 0, 1]], host)
    write = jax.jit(ATTENTION.write_pages, donate_argnums=0)
    pages = write(ATTENTION.pack_pages(k, v), jnp.array([5, 6, 11]), host)
    for got, before in zip(ATTENTION.unpack_pages(pages, SPEC), (k, v), strict=True):
        expected = before.copy()
        expected[:, [5, 6, 11]] = before[:, [0, 3, 7]]
        np.testing.assert_array_equal(bits(got), bits(expected))


def test_page_moves_update_the_pool_in_place() -> None:
    pages = jax.eval_shape(partial(ATTENTION.make_pages, replace(SPEC, num_pages=2000)))
    ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    host = jax.eval_shape(ATTENTION.read_pages, pages, ids)
    pool_bytes = pages.slabs.size * 4
    for function, arguments in ((ATTENTION.copy_pages, (pages, ids, ids)), (ATTENTION.write_pages, (pages, ids, host))):
        memory = jax.jit(function, donate_argnums=0).lower(*arguments).compile().memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes >= pool_bytes
        assert memory.temp_size_in_bytes < pool_bytes / 10


@pytest.mark.parametrize("name", ["decode", "mixed", "everything"])
def test_the_traffic_that_is_counted_is_what_the_interpreter_copies(name: str, monkeypatch) -> None:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    copied: list[int] = []
    write = interpret_pallas_call.DMA.execute_write

    def count(dma) -> None:
        if dma.data is not None:
            copied.append(dma.data.nbytes)
        write(dma)

    monkeypatch.setattr(interpret_pallas_call.DMA, "execute_write", count)
    case = SMALL[name]
    inputs = build(case)
    jax.block_until_ready(run(inputs))
    layout = Layout.of(inputs.spec)
    num_seqs, pages_per_seq = inputs.batch.page_table.shape
    traffic = count_traffic(
        Shape(layout, case.num_q_heads // case.num_kv_heads, inputs.q.dtype),
        BLOCKS,
        case.sequences,
        num_seqs=num_seqs,
        pages_per_seq=pages_per_seq,
        num_decode=case.num_decode,
        window=case.window,
    )
    assert (traffic.copies, traffic.copied_bytes) == (len(copied), sum(copied))


@pytest.mark.parametrize("page_size", [16, 128])
def test_decode_moves_hardly_anything_useless(page_size: int) -> None:
    shape = Shape(Layout(8, 128, page_size, jnp.dtype("bfloat16")), 4, jnp.dtype("bfloat16"))
    blocks = choose_blocks(device_of("TPU v5 lite"), shape)
    traffic = count_traffic(shape, blocks, [(999, 1)] * 64, num_seqs=64, pages_per_seq=4096 // page_size, num_decode=64)
    assert traffic.useful_byte_share > 0.95

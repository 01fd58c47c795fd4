"""Native products with one layer of packed weights, on every instruction set this machine runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jpaged.layers.mlp import ACTIVATION_FUNCTIONS
from pallas_kernels.matmul.cpu import CpuMatmul, RowNorm, unpack_outputs
from pallas_kernels.native import build as native

try:
    native.find_compiler()
except native.BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

# Rows, outputs, inputs: less than a vector, ragged, whole tiles, more than one panel, more than one unit of work.
SHAPES = [(1, 7, 6), (1, 64, 64), (3, 50, 40), (8, 33, 96), (9, 49, 67), (16, 64, 576), (70, 100, 64), (300, 48, 40)]
SHAPES += [(300, 960, 128)]


@pytest.fixture(scope="module", params=native.runnable_instruction_sets(), ids=lambda chosen: chosen.name)
def matmul(request: pytest.FixtureRequest) -> CpuMatmul:
    return CpuMatmul.make(request.param)


def random_rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def inputs(shape: tuple[int, int, int], dtype: str) -> tuple[np.ndarray, jax.Array]:
    rows, num_outputs, num_inputs = shape
    return random_rows(rows, rows, num_inputs), jnp.asarray(random_rows(1, 3, num_outputs, num_inputs)).astype(dtype)


def expected(x: np.ndarray, weights: jax.Array, layer: int) -> np.ndarray:
    rounded = np.asarray(jnp.asarray(x).astype(weights.dtype), np.float32)
    return rounded @ np.asarray(weights[layer], np.float32).T


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_with_one_layer(matmul: CpuMatmul, shape: tuple[int, int, int], dtype: str) -> None:
    x, weights = inputs(shape, dtype)
    assert matmul.takes(dtype)
    got = jax.jit(matmul, static_argnums=3)(x, matmul.pack(weights, 3), jnp.int32(1), shape[1])
    wanted = expected(x, weights, 1)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def normalised(x: np.ndarray, weights: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 130, 64), (2, 160, 40), (9, 49, 67), (16, 64, 576), (40, 96, 64)], ids=str)
def test_a_norm_before_and_a_residual_after(matmul: CpuMatmul, shape: tuple[int, int, int], dtype: str) -> None:
    x, weights = inputs(shape, dtype)
    norm_weights, residual, eps = random_rows(4, 3, shape[2]), random_rows(5, *shape[:2]), 0.5
    norm = RowNorm(jnp.asarray(norm_weights), eps)
    got = matmul(jnp.asarray(x), matmul.pack(weights, 3), 1, shape[1], norm=norm, residual=jnp.asarray(residual))
    wanted = residual + expected(normalised(x, norm_weights[1], eps), weights, 1)
    # A last bit of the norm may tip how a number is rounded to bfloat16.
    limit = (1e-5 if dtype == "float32" else 2e-3) * np.abs(wanted).max()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=limit)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(5, 70, 33), (1, 16, 64)], ids=str)
def test_packed_weights_come_back_as_they_were(matmul: CpuMatmul, shape: tuple[int, int, int], dtype: str) -> None:
    weights = inputs(shape, dtype)[1][:1]
    packed = matmul.pack(weights)
    described = matmul.pack(jax.ShapeDtypeStruct(weights.shape, weights.dtype))
    assert (packed.shape, packed.dtype) == (described.shape, described.dtype)
    ids = jnp.array([0, shape[1] - 1, 15, 3])
    np.testing.assert_array_equal(unpack_outputs(packed, ids, shape[2]), weights[0][ids])


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "features", "group"), [(1, 48, 16), (7, 96, 48), (33, 128, 32), (100, 48, 48)])
def test_a_gated_block(matmul: CpuMatmul, rows: int, features: int, group: int, dtype: str, activation: str) -> None:
    width = 40
    x = random_rows(rows, rows, width)
    x[0] *= 100  # whose activations are as good as zero or one
    gate_up = jnp.asarray(random_rows(2, 3, 2 * features, width) / width**0.5).astype(dtype)
    down = jnp.asarray(random_rows(3, 3, width, features) / features**0.5).astype(dtype)
    assert matmul.gates(group, activation)
    got = matmul.feed_forward(
        jnp.asarray(x), matmul.pack(gate_up, 3), matmul.pack(down, 3), 2, group=group, activation=activation
    )
    parts = expected(x, gate_up, 2).reshape(rows, features // group, 2, group)
    gates, ups = (parts[:, :, i].reshape(rows, features) for i in range(2))
    wanted = expected(np.asarray(ACTIVATION_FUNCTIONS[activation](gates) * ups), down, 2)
    limits = (1e-5 if dtype == "float32" else 1e-2) * np.abs(wanted).max(axis=1, keepdims=True)
    assert (np.abs(got - wanted) <= limits).all()


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_gated_block_with_norm_and_residual(matmul: CpuMatmul, rows: int) -> None:
    width, features, eps = 40, 64, 0.5
    x, norm_weights = random_rows(rows, rows, width), random_rows(4, 3, width)
    gate_up, down = jnp.asarray(random_rows(2, 3, 2 * features, width)), jnp.asarray(random_rows(3, 3, width, features))
    packed = matmul.pack(gate_up, 3), matmul.pack(down, 3)
    keywords = {"group": features, "activation": "silu"}
    norm = RowNorm(jnp.asarray(norm_weights), eps)
    got = matmul.feed_forward(jnp.asarray(x), *packed, 2, **keywords, norm=norm, residual=jnp.asarray(x))
    wanted = x + matmul.feed_forward(jnp.asarray(normalised(x, norm_weights[2], eps)), *packed, 2, **keywords)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_what_no_gated_block_can_be_made_of() -> None:
    matmul = CpuMatmul.make()
    assert not matmul.gates(24, "silu")
    assert not matmul.gates(16, "relu")
    assert not matmul.takes("float16")


def test_a_scan_reads_each_layer_where_it_lies(matmul: CpuMatmul) -> None:
    x, weights = inputs((4, 96, 64), "bfloat16")
    packed = matmul.pack(weights, 3)

    def all_layers(x, packed):
        return lax.scan(lambda _, layer: (None, matmul(x, packed, layer, 96)), None, jnp.arange(3))[1]

    compiled = jax.jit(all_layers).lower(x, packed).compile()
    for layer, got in enumerate(compiled(x, packed)):
        np.testing.assert_allclose(got, expected(x, weights, layer), rtol=1e-5, atol=1e-4)
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < weights[0].nbytes


def test_nan_stays_in_its_row(matmul: CpuMatmul) -> None:
    x, weights = inputs((5, 32, 64), "bfloat16")
    x[2, 3] = np.nan
    got = np.asarray(matmul(jnp.asarray(x), matmul.pack(weights, 3), 0, 32))
    assert np.isnan(got).all(axis=1).tolist() == [False, False, True, False, False]
    assert not np.isnan(np.delete(got, 2, axis=0)).any()

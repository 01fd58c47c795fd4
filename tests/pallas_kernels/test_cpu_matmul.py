"""Native products with one layer of stacked weights, on every instruction set this machine runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.matmul.cpu import CpuMatmul
from pallas_kernels.native import build as native

try:
    native.find_compiler()
except native.BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

# Rows, outputs, inputs: less than a vector, ragged, whole tiles, more than one panel, more than one unit of work.
SHAPES = [(1, 7, 6), (1, 64, 64), (3, 50, 40), (8, 33, 96), (9, 49, 66), (16, 64, 576), (70, 100, 64), (33, 960, 128)]


@pytest.fixture(scope="module", params=native.runnable_instruction_sets(), ids=lambda chosen: chosen.name)
def matmul(request: pytest.FixtureRequest) -> CpuMatmul:
    return CpuMatmul.make(request.param)


def inputs(shape: tuple[int, int, int], dtype: str) -> tuple[np.ndarray, jax.Array]:
    rows, num_outputs, num_inputs = shape
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, num_inputs), np.float32)
    weights = jnp.asarray(rng.standard_normal((3, num_outputs, num_inputs), np.float32)).astype(dtype)
    return x, weights


def expected(x: np.ndarray, weights: jax.Array, layer: int) -> np.ndarray:
    rounded = np.asarray(jnp.asarray(x).astype(weights.dtype), np.float32)
    return rounded @ np.asarray(weights[layer], np.float32).T


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_with_one_layer(matmul: CpuMatmul, shape: tuple[int, int, int], dtype: str) -> None:
    x, weights = inputs(shape, dtype)
    assert matmul.takes(weights)
    got = jax.jit(matmul)(x, weights, jnp.int32(1))
    wanted = expected(x, weights, 1)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_a_scan_reads_each_layer_where_it_lies(matmul: CpuMatmul) -> None:
    x, weights = inputs((4, 96, 64), "bfloat16")

    def all_layers(x, weights):
        return lax.scan(lambda _, layer: (None, matmul(x, weights, layer)), None, jnp.arange(3))[1]

    compiled = jax.jit(all_layers).lower(x, weights).compile()
    for layer, got in enumerate(compiled(x, weights)):
        np.testing.assert_allclose(got, expected(x, weights, layer), rtol=1e-5, atol=1e-4)
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < weights[0].nbytes


def test_nan_stays_in_its_row(matmul: CpuMatmul) -> None:
    x, weights = inputs((5, 32, 64), "bfloat16")
    x[2, 3] = np.nan
    got = np.asarray(jax.jit(matmul)(x, weights, 0))
    assert np.isnan(got).all(axis=1).tolist() == [False, False, True, False, False]
    assert not np.isnan(np.delete(got, 2, axis=0)).any()


def test_pairs_must_fill_words() -> None:
    assert not CpuMatmul.make().takes(jnp.zeros((1, 4, 5), jnp.bfloat16))
    assert CpuMatmul.make().takes(jnp.zeros((1, 4, 5), jnp.float32))
    assert not CpuMatmul.make().takes(jnp.zeros((1, 4, 4), jnp.float16))

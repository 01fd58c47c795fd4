"""Stacks of weights that stay whole give what layers cut out of them give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.layers.linear import Embedding, Linear, WholeStack, use_matmul
from jpaged.layers.mlp import GatedMLP
from jpaged.layers.norm import RMSNorm
from jpaged.layers.stack import scan_layers
from jpaged.models.spec import spec_from_config
from pallas_kernels.matmul.cpu import CpuMatmul
from pallas_kernels.native.build import BuildError
from tests.fakes.tiny_models import TINY_LLAMA

LAYERS, FEATURES = 3, 32


class Block(nnx.Module):
    def __init__(self, bias: bool):
        self.linear = Linear(FEATURES, (2, FEATURES // 2), jnp.float32, bias=bias, stack=(LAYERS,))

    def __call__(self, x):
        y = self.linear(x)
        assert y.shape == (x.shape[0], 2, FEATURES // 2)
        return jnp.tanh(y.reshape(x.shape))


def filled[M: nnx.Module](module: M, seed: int) -> M:
    rng = np.random.default_rng(seed)
    for _, parameter in nnx.iter_graph(module):
        if isinstance(parameter, nnx.Param):
            abstract = parameter.get_value()
            parameter.set_value(jnp.asarray(rng.standard_normal(abstract.shape, np.float32)))
    return module


@pytest.fixture(scope="module")
def matmul() -> CpuMatmul:
    try:
        return CpuMatmul.make()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_scan_over_whole_stacks(matmul: CpuMatmul, bias: bool, rows: int) -> None:
    x = np.random.default_rng(1).standard_normal((rows, FEATURES), np.float32)

    def run(block, x):
        return scan_layers(block, LAYERS, lambda layer, x, pages, index: (x + layer(x), pages), x, ())[0]

    block = filled(Block(bias), 0)
    expected = run(block, x)
    use_matmul(block, matmul)
    program = jax.jit(lambda x: run(block, x)).lower(x).as_text()
    assert f"jpaged_project_{matmul.name}" in program
    np.testing.assert_allclose(run(block, x), expected, rtol=1e-4, atol=1e-4)


class NormedBlock(nnx.Module):
    def __init__(self, bias: bool):
        self.norm = RMSNorm(FEATURES, 1e-5, stack=(LAYERS,))
        self.linear = Linear(FEATURES, (FEATURES,), jnp.float32, bias=bias, stack=(LAYERS,))

    def __call__(self, x):
        return self.linear(x, norm=self.norm, residual=x)


@pytest.mark.parametrize("bias", [False, True])
def test_norms_and_residuals_go_with_products(matmul: CpuMatmul, bias: bool) -> None:
    x = np.random.default_rng(1).standard_normal((5, FEATURES), np.float32)

    def run(block, x):
        return scan_layers(block, LAYERS, lambda layer, x, pages, index: (layer(x), pages), x, ())[0]

    block = filled(NormedBlock(bias), 0)
    expected = run(block, x)
    by_hand = np.asarray(x)
    for layer in range(LAYERS):
        normed = by_hand / np.sqrt((by_hand**2).mean(axis=1, keepdims=True) + 1e-5) * block.norm.weight[...][layer]
        product = normed @ np.asarray(block.linear.weight[...][layer]).T
        by_hand = by_hand + product + (0 if block.linear.bias is None else block.linear.bias[...][layer])
    np.testing.assert_allclose(expected, by_hand, rtol=1e-3, atol=1e-3)
    use_matmul(block, matmul)
    np.testing.assert_allclose(run(block, x), expected, rtol=1e-4, atol=1e-3)
    # What XLA is left with is the loop: no root is taken outside the product.
    assert "rsqrt" not in jax.jit(lambda x: run(block, x)).lower(x).as_text()


def test_a_whole_stack_of_norms_still_normalises() -> None:
    norm = filled(RMSNorm(FEATURES, 1e-5, stack=(LAYERS,)), 0)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, FEATURES), np.float32))

    def run():
        return scan_layers(norm, LAYERS, lambda layer, x, pages, index: (layer(x), pages), x, ())[0]

    expected = run()
    norm.weight = WholeStack(norm.weight[...])
    np.testing.assert_array_equal(run(), expected)


def test_the_head(matmul: CpuMatmul) -> None:
    head = filled(Embedding(50, FEATURES, jnp.float32), 2)
    x = np.random.default_rng(3).standard_normal((4, FEATURES), np.float32)
    ids = jnp.array([0, 17, 49, 16, 15, 49])
    expected, embedded = head.logits(jnp.asarray(x)), head(ids)
    use_matmul(head, matmul)
    np.testing.assert_allclose(head.logits(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(head(ids), embedded)


def test_shapes_are_packed_like_weights(matmul: CpuMatmul) -> None:
    abstract, loaded = Block(bias=True), filled(Block(bias=True), 0)
    use_matmul(abstract, matmul)
    use_matmul(loaded, matmul)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(block)) for block in (abstract, loaded)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("activation", "blocks"), [("silu", 2), ("gelu_pytorch_tanh", 1), ("gelu", 1)])
def test_a_gated_block(matmul: CpuMatmul, activation: str, blocks: int, bias: bool) -> None:
    config = TINY_LLAMA | {"hidden_act": activation, "num_key_value_heads": blocks, "mlp_bias": bias}
    spec = spec_from_config(config)
    mlp = filled(GatedMLP(spec, jnp.float32, ()), 4)
    x = np.random.default_rng(5).standard_normal((40, spec.hidden_size), np.float32) / 8
    norm = filled(RMSNorm(spec.hidden_size, 1e-5), 6)
    expected = mlp(jnp.asarray(x)), mlp(jnp.asarray(x), norm=norm, residual=jnp.asarray(x))
    np.testing.assert_allclose(expected[1], x + mlp(norm(jnp.asarray(x))), rtol=1e-5, atol=1e-4)
    use_matmul(mlp, matmul)
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected[0], rtol=1e-4, atol=1e-3)
    got = mlp(jnp.asarray(x), norm=norm, residual=jnp.asarray(x))
    np.testing.assert_allclose(got, expected[1], rtol=1e-4, atol=1e-5 * np.abs(expected[1]).max())

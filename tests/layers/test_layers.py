"""Each layer against its formula written out in numpy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.layers.linear import Embedding, Linear
from jpaged.layers.mlp import MLP, GatedMLP
from jpaged.layers.norm import LayerNorm, RMSNorm
from jpaged.layers.rotary import inverse_frequencies, rotary_tables, rotate
from jpaged.models.spec import RopeSpec, spec_from_config
from tests.fakes.tiny_models import TINY_LLAMA, TINY_OPT

X = np.random.RandomState(0).standard_normal((5, 64)).astype(np.float32)
J = jnp.asarray(X)


def _fill(parameter, seed=1):
    shape = parameter.get_value().shape
    values = np.random.RandomState(seed).standard_normal(shape).astype(np.float32)
    parameter.set_value(jnp.asarray(values, parameter.get_value().dtype))
    return np.asarray(parameter.get_value(), np.float64)


def test_linear_with_bias_and_several_output_axes():
    layer = Linear(64, (3, 4), jnp.float32, bias=True)
    weight, bias = _fill(layer.weight), _fill(layer.bias, 2)
    np.testing.assert_allclose(layer(J), np.einsum("tk,abk->tab", X, weight) + bias, atol=1e-4)


def test_bfloat16_products_are_summed_and_returned_in_float32():
    layer = Linear(64, (7,), jnp.bfloat16)
    weight = _fill(layer.weight)
    y = layer(J)
    assert y.dtype == jnp.float32
    # With operands rounded once, the products are exact in float32: only the order of the sum is left.
    rounded = np.asarray(J.astype(jnp.bfloat16), np.float64)
    np.testing.assert_allclose(y, rounded @ weight.T, atol=1e-4)


def test_embedding_clips_and_is_its_own_head():
    table = Embedding(10, 64, jnp.bfloat16)
    weight = _fill(table.weight)
    looked_up = table(jnp.asarray([0, 9, 10, -3]))
    assert looked_up.dtype == jnp.float32
    np.testing.assert_array_equal(looked_up, weight[[0, 9, 9, 0]])
    assert table.logits(J).shape == (5, 10)


def test_rms_norm():
    norm = RMSNorm(64, 1e-5)
    weight = _fill(norm.weight)
    expected = X / np.sqrt((X.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(norm(J), expected, atol=1e-5)


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(affine):
    norm = LayerNorm(64, 1e-5, affine=affine)
    x = X.astype(np.float64) + 30  # a mean far from 0 must not cost precision
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    if affine:
        expected = expected * _fill(norm.weight) + _fill(norm.bias, 2)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, atol=1e-4)


def test_rotation_turns_pairs_and_keeps_lengths():
    rope = RopeSpec("default", 100.0)
    positions = np.asarray([0, 1, 500])
    x = np.random.RandomState(3).standard_normal((3, 2, 8)).astype(np.float32)
    turned = np.asarray(rotate(jnp.asarray(x), rotary_tables(jnp.asarray(positions), rope, 8)))
    np.testing.assert_array_equal(turned[0], x[0])
    as_complex = x[..., :4].astype(np.complex128) + 1j * x[..., 4:]
    angles = positions[:, None, None] * 100.0 ** (-np.arange(4) / 4)
    expected = as_complex * np.exp(1j * angles)
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], -1), atol=1e-4)


def test_linear_scaling_divides_the_frequencies():
    plain, factor = inverse_frequencies(RopeSpec("default", 1e4), 16)
    scaled, scaled_factor = inverse_frequencies(RopeSpec("linear", 1e4, factor=4.0), 16)
    np.testing.assert_allclose(scaled, plain / 4)
    assert (factor, scaled_factor) == (1.0, 1.0)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    plain, _ = inverse_frequencies(RopeSpec("default", 1e4), 64)
    scaled, _ = inverse_frequencies(RopeSpec("llama3", 1e4, 8.0, 512, 1.0, 4.0), 64)
    ratio = plain / scaled
    wavelengths = 2 * np.pi / plain
    np.testing.assert_allclose(ratio[wavelengths < 128], 1)
    np.testing.assert_allclose(ratio[wavelengths > 512], 8)
    between = ratio[(wavelengths > 128) & (wavelengths < 512)]
    assert len(between) > 2
    assert (np.diff(between) > 0).all() and between[0] > 1 and between[-1] < 8


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 0.1 * np.log(8) + 1),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * np.log(8) + 1) / (0.05 * np.log(8) + 1)),
    ],
)
def test_yarn_interpolates_slow_dimensions_and_scales_attention(changes, factor):
    rope = RopeSpec("yarn", 1e4, factor=8.0, original_max_position=512, **changes)
    plain, _ = inverse_frequencies(RopeSpec("default", 1e4), 64)
    scaled, attention_factor = inverse_frequencies(rope, 64)
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(plain[0] / scaled[0], 1)
    np.testing.assert_allclose(plain[-1] / scaled[-1], 8, rtol=1e-6)
    assert attention_factor == pytest.approx(factor)
    cos, _ = rotary_tables(jnp.asarray([0]), rope, 64)
    np.testing.assert_allclose(cos, factor, rtol=1e-6)


def test_unknown_rope_kind_is_a_bug_not_a_default():
    with pytest.raises(ValueError, match="made_up"):
        inverse_frequencies(RopeSpec("made_up", 1e4), 16)


def test_gated_mlp_blocks_hold_gate_and_up_rows():
    mlp = GatedMLP(spec_from_config(TINY_LLAMA), jnp.float32, ())
    fused, down = _fill(mlp.gate_up.weight) / 8, _fill(mlp.down.weight, 2)
    mlp.gate_up.weight.set_value(jnp.asarray(fused, jnp.float32))
    gate, up = np.moveaxis(fused.reshape(4, 2, 24, 64), 1, 0).reshape(2, 96, 64)
    a = X @ gate.T
    expected = (a / (1 + np.exp(-a)) * (X @ up.T)) @ down.T
    np.testing.assert_allclose(mlp(J), expected, atol=2e-4)


def test_mlp():
    mlp = MLP(spec_from_config(TINY_OPT), jnp.float32, ())
    up, up_bias = _fill(mlp.up.weight) / 8, _fill(mlp.up.bias, 3)
    mlp.up.weight.set_value(jnp.asarray(up, jnp.float32))
    down, down_bias = _fill(mlp.down.weight, 2), _fill(mlp.down.bias, 4)
    expected = np.maximum(X @ up.T + up_bias, 0) @ down.T + down_bias
    np.testing.assert_allclose(mlp(J), expected, atol=2e-4)

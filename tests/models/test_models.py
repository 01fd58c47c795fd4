"""The networks' contract with the step: abstract until filled, one traced body, attend called as promised."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer

from jpaged.errors import ModelError
from jpaged.models.registry import build_model
from jpaged.models.spec import spec_from_config
from jpaged.parallel.mesh import make_mesh
from jpaged.parallel.sharding import parameter_paths
from jpaged.weights.random import random_weights
from tests.fakes.dense_attention import dense_attend, dense_logits
from tests.fakes.tiny_models import TINY_LLAMA, TINY_MISTRAL, TINY_OPT

CONFIGS = {"llama": TINY_LLAMA, "mistral": TINY_MISTRAL, "opt": TINY_OPT}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_built_model_holds_shapes_only(name):
    model = build_model(spec_from_config(CONFIGS[name]), jnp.bfloat16)
    leaves = jax.tree.leaves(nnx.state(model))
    assert leaves
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def test_fused_layouts():
    model = build_model(spec_from_config(TINY_LLAMA), jnp.bfloat16)
    parameters = {path: parameter.get_value() for path, parameter in parameter_paths(model).items()}
    assert parameters["layers.attention.qkv.weight"].shape == (2, 4, (2 + 2) * 8, 64)
    assert parameters["layers.mlp.gate_up.weight"].shape == (2, 4, 2 * 96 // 4, 64)
    assert parameters["layers.mlp.down.weight"].dtype == jnp.bfloat16
    assert parameters["norm.weight"].dtype == jnp.float32
    assert "head.weight" not in parameters


def test_refusals():
    spec = spec_from_config(TINY_LLAMA)
    with pytest.raises(ModelError, match=r"int8.*bfloat16"):
        build_model(spec, jnp.int8)
    with pytest.raises(ModelError, match=r"Unknown.*LlamaForCausalLM"):
        build_model(dataclasses.replace(spec, architecture="Unknown"), jnp.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_attend_is_called_as_promised(name):
    spec = spec_from_config(CONFIGS[name])
    graph, weights = nnx.split(random_weights(spec, jnp.bfloat16, 0, make_mesh(1)))
    calls = []

    def attend(q, k, v, pages, *, layer, scale, window, soft_cap, sinks):
        calls.append((q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, layer.dtype, scale, window))
        assert isinstance(layer, Tracer)
        out, _ = dense_attend(q, k, v, (), layer=layer, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
        return out, pages.at[layer].add(1)

    @jax.jit
    def step(weights, ids):
        return nnx.merge(graph, weights)(ids, jnp.arange(6), jnp.zeros(spec.num_layers, jnp.int32), attend)

    hidden, pages = step(weights, jnp.arange(6))
    heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    bf16 = jnp.dtype(jnp.bfloat16)
    shapes = ((6, heads, head_dim), (6, kv_heads, head_dim), (6, kv_heads, head_dim))
    assert set(calls) == {(*shapes, bf16, bf16, bf16, jnp.dtype(jnp.int32), head_dim**-0.5, spec.sliding_window)}
    assert len(calls) == 1  # one traced body, whatever the depth
    assert pages.tolist() == [1] * spec.num_layers  # every layer ran once, in its own place
    assert (hidden.shape, hidden.dtype) == ((6, 64), jnp.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_program_does_not_grow_with_depth(name):
    def program_lines(num_layers):
        spec = spec_from_config(CONFIGS[name] | {"num_hidden_layers": num_layers})
        graph, weights = nnx.split(build_model(spec, jnp.float32))

        def step(weights, ids):
            return nnx.merge(graph, weights)(ids, ids, (), dense_attend)

        return len(jax.jit(step).lower(weights, jax.ShapeDtypeStruct((8,), jnp.int32)).as_text().splitlines())

    assert program_lines(2) == program_lines(40)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_ids_out_of_range_leave_the_batch_finite(name):
    spec = spec_from_config(CONFIGS[name])
    model = random_weights(spec, jnp.float32, 0, make_mesh(1))
    clean = np.asarray(dense_logits(model, [5, 6, 7, 0]))
    dirty = np.asarray(dense_logits(model, [5, 6, 7, 2**30]))
    assert np.isfinite(dirty).all()
    np.testing.assert_array_equal(clean[:3], dirty[:3])

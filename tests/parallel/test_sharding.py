"""Where parameters lie, and that splitting them changes no logit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jpaged.models.registry import build_model
from jpaged.models.spec import spec_from_config
from jpaged.parallel.mesh import make_mesh
from jpaged.parallel.sharding import parameter_paths, partition_spec, weight_shardings
from jpaged.weights.random import random_weights
from tests.fakes.dense_attention import dense_attend, dense_logits
from tests.fakes.tiny_models import TINY_LLAMA, TINY_OPT

BIASED = TINY_LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
PROJECTED_OPT = TINY_OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False, "tie_word_embeddings": False}
CONFIGS = {"llama": TINY_LLAMA, "llama_biased": BIASED, "opt": TINY_OPT, "opt_projected": PROJECTED_OPT}


def _specs(config, size):
    mesh = make_mesh(size)
    model = build_model(spec_from_config(config), jnp.float32)
    return {
        path: partition_spec(path, parameter.get_value().shape, mesh)
        for path, parameter in parameter_paths(model).items()
    }


def test_llama_placement():
    assert _specs(BIASED, 2) == {
        "embedding.weight": P("tensor", None),
        "head.weight": P("tensor", None),
        "layers.attention.qkv.weight": P(None, "tensor", None, None),
        "layers.attention.qkv.bias": P(None, "tensor", None),
        "layers.attention.output.weight": P(None, None, "tensor"),
        "layers.attention.output.bias": P(),
        "layers.attention_norm.weight": P(),
        "layers.mlp.gate_up.weight": P(None, "tensor", None, None),
        "layers.mlp.gate_up.bias": P(None, "tensor", None),
        "layers.mlp.down.weight": P(None, None, "tensor"),
        "layers.mlp.down.bias": P(),
        "layers.mlp_norm.weight": P(),
        "norm.weight": P(),
    }


def test_opt_placement():
    specs = _specs(TINY_OPT, 4)
    assert specs["layers.mlp.up.weight"] == P(None, "tensor", None)
    assert specs["layers.mlp.up.bias"] == P(None, "tensor")
    assert specs["layers.mlp.down.weight"] == P(None, None, "tensor")
    assert specs["positions.weight"] == P()


def test_an_odd_vocabulary_is_replicated():
    assert _specs(TINY_LLAMA | {"vocab_size": 127}, 2)["embedding.weight"] == P()


def test_one_device_splits_nothing():
    assert set(_specs(BIASED, 1).values()) == {P()}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_lie_where_their_shardings_say(name):
    spec, mesh = spec_from_config(CONFIGS[name]), make_mesh(4)
    weights = nnx.state(random_weights(spec, jnp.bfloat16, 0, mesh))
    shardings = weight_shardings(weights, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(weights)
    for leaf, sharding in zip(jax.tree.leaves(weights), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding == sharding


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_logits_on_1_2_and_4_devices(name):
    spec = spec_from_config(CONFIGS[name])
    ids = np.random.RandomState(0).randint(3, spec.vocab_size, 20)
    logits = {
        size: np.asarray(dense_logits(random_weights(spec, jnp.float32, 0, make_mesh(size, spec=spec)), ids))
        for size in (1, 2, 4)
    }
    assert logits[1].std() > 1
    for size in (2, 4):
        np.testing.assert_allclose(logits[size], logits[1], atol=2e-5, rtol=0)


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_OPT], ids=["llama", "opt"])
def test_a_layer_moves_no_weights_between_devices(config):
    """Megatron's placement needs two all-reduces a layer and nothing else; a gathered weight would show here."""
    spec, mesh = spec_from_config(config), make_mesh(4)
    graph, weights = nnx.split(random_weights(spec, jnp.float32, 0, mesh))

    def step(weights, ids):
        return nnx.merge(graph, weights)(ids, ids, (), dense_attend)[0]

    text = jax.jit(step).lower(weights, jnp.arange(8)).compile().as_text()
    assert text is not None
    assert text.count(" all-reduce(") == 3  # two in the scanned layer, one for the embedding's rows
    assert " all-gather(" not in text
    assert " all-to-all(" not in text

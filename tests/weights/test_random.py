"""Random models: reproducible, independent of dtype and mesh, and lively enough to test with."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.spec import spec_from_config
from jpaged.parallel.mesh import make_mesh
from jpaged.parallel.sharding import parameter_paths
from jpaged.weights.random import random_weights
from tests.fakes.dense_attention import dense_logits
from tests.fakes.tiny_models import TINY_LLAMA, TINY_OPT


def _arrays(spec, dtype=jnp.float32, seed=0, size=1):
    model = random_weights(spec, dtype, seed, make_mesh(size))
    return {path: np.asarray(parameter.get_value()) for path, parameter in parameter_paths(model).items()}


def test_the_seed_alone_decides():
    spec = spec_from_config(TINY_LLAMA)
    base, again, split = _arrays(spec), _arrays(spec), _arrays(spec, size=2)
    narrow, other = _arrays(spec, jnp.bfloat16), _arrays(spec, seed=1)
    for path, array in base.items():
        np.testing.assert_array_equal(array, again[path])
        np.testing.assert_array_equal(array, split[path])
        np.testing.assert_array_equal(array.astype(narrow[path].dtype), narrow[path])
        assert not np.array_equal(array, other[path])


@pytest.mark.parametrize("num_layers", [2, 12])
@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_OPT], ids=["llama", "opt"])
def test_greedy_text_is_lively(config, num_layers):
    spec = spec_from_config(config | {"num_hidden_layers": num_layers})
    model = random_weights(spec, jnp.float32, 0, make_mesh(1))
    ids = np.asarray([5, 9, 23, 77] + [0] * 44)
    for position in range(4, len(ids)):
        logits = np.asarray(dense_logits(model, ids))[position - 1]
        assert 1 < logits.std() < 6
        ids[position] = logits.argmax()
    assert len(set(ids[4:].tolist())) >= 5

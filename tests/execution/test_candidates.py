"""The largest values, found through groups, against lax.top_k and numpy: order, places and equal values alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jpaged.execution.candidates import argmax, best_groups, top_k

top = jax.jit(top_k, static_argnums=1)
first_best = jax.jit(argmax)


def values(vocabulary: int, distinct: int | None = None) -> np.ndarray:
    generator = np.random.default_rng(vocabulary)
    if distinct is None:
        return generator.normal(size=(6, vocabulary)).astype(np.float32)
    return generator.integers(0, distinct, (6, vocabulary)).astype(np.float32)


@pytest.mark.parametrize("vocabulary", [7, 1000, 4099])
@pytest.mark.parametrize("distinct", [None, 1, 3, 200])
def test_top_k_and_argmax_take_the_lowest_places_among_equals(vocabulary, distinct):
    given = jnp.asarray(values(vocabulary, distinct))
    count = min(20, vocabulary)
    best, places = top(given, count)
    expected, expected_places = lax.top_k(given, count)
    assert best.tolist() == expected.tolist()
    assert places.tolist() == expected_places.tolist()
    assert first_best(given).tolist() == np.argmax(given, axis=1).tolist()


@pytest.mark.parametrize("distinct", [None, 40])
def test_no_value_beyond_the_bound_is_left_out(distinct):
    given = values(4099, distinct)
    found = jax.tree.map(np.asarray, best_groups(jnp.asarray(given), 10))
    for row in range(len(given)):
        inside = found.token_ids[row] < 4099
        assert (given[row, found.token_ids[row][inside]] == found.values[row][inside]).all()
        assert (found.values[row][~inside] == -np.inf).all()
        others = np.delete(given[row], found.token_ids[row][inside])
        assert others.max() <= found.bound[row]
        assert (found.values[row] >= found.bound[row]).sum() >= 10


def test_rows_without_any_number_give_an_index():
    given = jnp.stack([jnp.full(300, jnp.nan), jnp.full(300, -jnp.inf)])
    assert ((argmax(given) >= 0) & (argmax(given) < 300)).all()
    assert argmax(given)[1] == 0

"""The largest of many values, without sorting them: they are looked at in groups, by each group's largest.

Letters: S rows, V values of a row, N groups of G neighbours, K groups that are kept, C = K x G candidates.

Sorting, or `lax.top_k` with more than a few entries, costs many passes over a vocabulary. One pass for the groups'
maxima is little more than a plain maximum, and what follows works on a few thousand values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

_GROUP = 16  # of best_groups: fewer, larger groups are chosen faster, but bring more values that are not wanted
_WIDE_GROUP = 128  # of argmax, which wants a single group


class Candidates(NamedTuple):
    """Some of a row's values, all of those above `bound` among them.

    Attributes:
        values: float32 [S, C].
        token_ids: int32 [S, C], where each stood in its row; of padding, which is -inf, it may be V or more.
        bound: float32 [S], the value that no other one exceeds; -inf where the others are all -inf.
    """

    values: Array
    token_ids: Array
    bound: Array


def best_groups(values: Array, num_groups: int) -> Candidates:
    """Return the values of the K groups with the largest maxima, float32 [S, V]: at least the K largest values."""
    grouped = _grouped(values, _GROUP)
    num_rows, all_groups, _ = grouped.shape
    if num_groups >= all_groups:
        token_ids = lax.broadcasted_iota(jnp.int32, values.shape, 1)
        return Candidates(values, token_ids, jnp.full(num_rows, -jnp.inf))
    maxima, groups = lax.top_k(grouped.max(axis=2), num_groups)
    chosen = take(grouped, groups)
    token_ids = groups[:, :, None] * _GROUP + jnp.arange(_GROUP, dtype=jnp.int32)
    return Candidates(chosen.reshape(num_rows, -1), token_ids.reshape(num_rows, -1), maxima[:, -1])


def top_k(values: Array, count: int) -> tuple[Array, Array]:
    """`lax.top_k`: each row's `count` largest values and where they stand, the lowest place first among equals.

    The largest values lie in the `count` groups of largest maxima. Among equal values those of the lowest places do
    too, as the groups are runs of neighbours, and of equal groups the first are chosen.
    """
    found = best_groups(values, count)
    # Equal candidates must stand in the order of their places.
    token_ids, ordered = lax.sort((found.token_ids, found.values), dimension=1, num_keys=1)
    best, where = lax.top_k(ordered, count)
    return best, take(token_ids, where)


def argmax(values: Array) -> Array:
    """Index of the largest value of each row, the lowest among equals; [S, V] -> int32 [S].

    XLA's own argmax reduces pairs, which is slow on a CPU; plain maxima are not. A row of NaN gives some index.
    """
    grouped = _grouped(values, _WIDE_GROUP)
    maxima = grouped.max(axis=2)
    largest = maxima.max(axis=1, keepdims=True)
    group = _first(maxima == largest)
    members = take(grouped, group[:, None])[:, 0]
    return jnp.minimum(group * _WIDE_GROUP + _first(members == largest), values.shape[1] - 1)


def take(values: Array, indices: Array) -> Array:
    """values[row, indices[row, i], ...] for valid indices, int32 [S, I]: [S, N, ...] -> [S, I, ...].

    jnp.take_along_axis does it too, but its checks take longer to compile than all the rest here.
    """
    return jax.vmap(lambda row, places: row.at[places].get(mode="promise_in_bounds"))(values, indices)


def _first(marks: Array) -> Array:
    """Index of each row's first mark, bool [S, N] -> int32 [S]; the last index if there is none."""
    indices = lax.broadcasted_iota(jnp.int32, marks.shape, 1)
    return jnp.where(marks, indices, marks.shape[1] - 1).min(axis=1)


def _grouped(values: Array, size: int) -> Array:
    """[S, V] -> [S, N, size], padded with -inf."""
    padding = -values.shape[1] % size
    if padding:
        values = jnp.pad(values, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return values.reshape(values.shape[0], -1, size)

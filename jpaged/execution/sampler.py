"""Draws one token for each row from its logits, in float32; work that no row asks for is skipped at run time.

Letters: S rows, V vocabulary entries.

Order: greedy rows take the most likely token; the others divide by the temperature, keep the tokens that min_p, then
top_k, then top_p allow, and draw by the Gumbel-max trick: argmax(logits + Gumbel noise) is a draw from softmax(logits).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from jpaged.execution.batch import RowParameters
from jpaged.execution.noise import draw_keys, gumbel

_NEGATIVE = -jnp.inf


def sample(logits: Array, parameters: RowParameters, positions: Array) -> Array:
    """Draw a token for each row.

    Args:
        logits: float32 [S, V].
        parameters: entries [S].
        positions: int32 [S], the position that the drawn token will have.

    Returns:
        token ids, int32 [S].
    """
    random = parameters.temperature > 0
    return lax.cond(
        jnp.any(random),
        lambda: jnp.where(random, _draw(logits, parameters, positions), argmax(logits)),
        lambda: argmax(logits),
    )


def best_candidates(logits: Array, parameters: RowParameters, count: int) -> tuple[Array, Array]:
    """Return each row's `count` most likely tokens and their logprobs, best first: int32 and float32 [S, count].

    Logprobs are those of softmax(logits / temperature); a temperature of 0 leaves the logits as they are.
    """
    temperature = jnp.where(parameters.temperature > 0, parameters.temperature, 1.0)
    logprobs = jax.nn.log_softmax(logits / temperature[:, None], axis=1)
    best, token_ids = lax.top_k(logprobs, count)
    return token_ids, best


def argmax(values: Array) -> Array:
    """Index of the largest value of each row, the lowest among equals; [S, V] -> int32 [S].

    XLA's own argmax reduces pairs, which is slow on a CPU; plain reductions are not. Blocks of the vocabulary are
    compared first: a single pass over the values, then a few of them once more.
    """
    rows, size = values.shape
    blocks = values.reshape(rows, -1, math.gcd(size, 128))
    block = _first_largest(blocks.max(axis=2))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * blocks.shape[2] + _first_largest(inside)


def _first_largest(values: Array) -> Array:
    indices = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    size = values.shape[1]
    best = jnp.where(values == values.max(axis=1, keepdims=True), indices, size).min(axis=1)
    return jnp.minimum(best, size - 1)  # logits that are all NaN still give a token


def _draw(logits: Array, parameters: RowParameters, positions: Array) -> Array:
    temperature = jnp.where(parameters.temperature > 0, parameters.temperature, 1.0)
    scaled = (logits - logits.max(axis=1, keepdims=True)) / temperature[
        :, None
    ]  # the largest is 0: exp cannot overflow
    size = logits.shape[1]
    top_k = jnp.where((parameters.top_k <= 0) | (parameters.top_k > size), size, parameters.top_k)
    kept = lax.cond(jnp.any(parameters.min_p > 0), lambda: _keep_min_p(scaled, parameters.min_p), lambda: scaled)
    kept = lax.cond(jnp.any(top_k < size), lambda: _keep_top_k(kept, top_k), lambda: kept)
    kept = lax.cond(jnp.any(parameters.top_p < 1), lambda: _keep_top_p(kept, parameters.top_p), lambda: kept)
    keys = draw_keys(parameters.seed_low, parameters.seed_high, parameters.sample_index, positions)
    return argmax(kept + gumbel(keys, size))


def _keep_min_p(scaled: Array, min_p: Array) -> Array:
    """Drop tokens less likely than `min_p` times the most likely one, whose scaled logit is 0."""
    return jnp.where(scaled >= jnp.log(min_p)[:, None], scaled, _NEGATIVE)


def _keep_top_k(scaled: Array, top_k: Array) -> Array:
    """Keep the k largest; tokens equal to the k-th are all kept, as transformers does."""
    threshold = _largest_key_where(scaled, lambda chosen: chosen.sum(axis=1, dtype=jnp.int32) >= top_k)
    return jnp.where(_ordered_key(scaled) >= threshold[:, None], scaled, _NEGATIVE)


def _keep_top_p(scaled: Array, top_p: Array) -> Array:
    """Keep the fewest tokens, largest first, whose probabilities sum to at least `top_p`; equal ones stay together."""
    weights = jnp.exp(scaled)
    # Below the clamp the product could round to zero, which no token at all would satisfy.
    wanted = jnp.maximum(top_p, 1e-30) * weights.sum(axis=1)
    enough = lambda chosen: jnp.where(chosen, weights, 0).sum(axis=1) >= wanted  # noqa: E731
    threshold = _largest_key_where(scaled, enough)
    threshold = jnp.where(top_p < 1, threshold, 0)  # rounding must not drop the least likely tokens of other rows
    return jnp.where(_ordered_key(scaled) >= threshold[:, None], scaled, _NEGATIVE)


def _largest_key_where(values: Array, holds: Callable[[Array], Array]) -> Array:
    """Return for each row the largest uint32 key t with holds(key(values) >= t), for a condition that t only loosens.

    Bisection over the 32 bits of the order-preserving key: exact, without sorting the vocabulary.
    """
    keys = _ordered_key(values)

    def body(index, threshold):
        candidate = threshold | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        return jnp.where(holds(keys >= candidate[:, None]), candidate, threshold)

    return lax.fori_loop(0, 32, body, jnp.zeros(values.shape[0], jnp.uint32))


def _ordered_key(values: Array) -> Array:
    """Map float32 to uint32 so that the order is kept: flip all bits of negatives, the sign bit of the others."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))

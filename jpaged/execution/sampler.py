"""Draws one token for each row from its logits, in float32; work that no row asks for is skipped at run time.

Letters: S rows, V vocabulary entries, C candidates.

Order: greedy rows take the most likely token; the others divide by the temperature, keep the tokens that min_p, then
top_k, then top_p allow, and draw by the Gumbel-max trick: argmax(logits + Gumbel noise) is a draw from softmax(logits).

What the filters keep is mostly few, so they look at the best tokens only. That is exact where they keep none but those,
and then nothing changes, as noise belongs to a token and not to its place. The rows for which it is not, and those that
filter nothing, look at the whole vocabulary, a few rows at a time. Which of the two a row takes depends on it alone.

This is XLA's form, which defines what is drawn; `native_draw` has the same in C++ for one CPU.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jpaged.execution.batch import RowParameters
from jpaged.execution.candidates import argmax, best_groups
from jpaged.execution.noise import draw_keys, gumbel

# Groups of the best tokens that filtered rows look at first, and rows that then look at everything at once: they stay
# in a CPU's cache, and a single one does not pay for 64.
FILTERED_GROUPS = 128
ROWS_AT_ONCE = 8


class _Draws(NamedTuple):
    """What rows draw by, entries [S].

    Attributes:
        largest: each row's largest logit: with it subtracted, exp cannot overflow.
        temperature, min_p, top_p: as in RowParameters; the temperature is positive.
        top_k: V for all.
        filters: whether one of the three filters has any effect.
        keys: the noise's keys.
    """

    largest: Array
    temperature: Array
    min_p: Array
    top_p: Array
    top_k: Array
    filters: Array
    keys: tuple[Array, Array]

    def scale(self, logits: Array) -> Array:
        """[S, C] -> [S, C]; the largest becomes 0."""
        return (logits - self.largest[:, None]) / self.temperature[:, None]


def sample(logits: Array, parameters: RowParameters, positions: Array, filtered_groups: int = FILTERED_GROUPS) -> Array:
    """Draw a token for each row; one whose logits are all -inf gets any.

    Args:
        logits: float32 [S, V].
        parameters: entries [S].
        positions: int32 [S], the position that the drawn token will have.
        filtered_groups: how many groups of tokens filtered rows look at first.

    Returns:
        token ids, int32 [S].
    """
    random = parameters.temperature > 0
    best = argmax(logits)
    return lax.cond(
        jnp.any(random),
        lambda: jnp.where(random, _draw(logits, _draws(logits, parameters, positions), random, filtered_groups), best),
        lambda: best,
    )


def _draws(logits: Array, parameters: RowParameters, positions: Array) -> _Draws:
    size = logits.shape[1]
    largest = logits.max(axis=1)
    top_k = jnp.where((parameters.top_k <= 0) | (parameters.top_k > size), size, parameters.top_k)
    return _Draws(
        largest=jnp.where(largest == -jnp.inf, 0.0, largest),  # where nothing may be drawn: no NaN
        temperature=jnp.where(parameters.temperature > 0, parameters.temperature, 1.0),
        min_p=parameters.min_p,
        top_p=parameters.top_p,
        top_k=top_k,
        filters=(parameters.min_p > 0) | (top_k < size) | (parameters.top_p < 1),
        keys=draw_keys(parameters.seed_low, parameters.seed_high, parameters.sample_index, positions),
    )


def _draw(logits: Array, draws: _Draws, random: Array, filtered_groups: int) -> Array:
    num_rows = len(logits)
    tokens, done = lax.cond(
        jnp.any(random & draws.filters),
        lambda: _draw_from_best(logits, draws, filtered_groups),
        lambda: (jnp.zeros(num_rows, jnp.int32), jnp.zeros(num_rows, bool)),
    )
    left = random & ~done
    order = jnp.argsort(~left)  # the rows that are left come first
    rows_at_once = min(ROWS_AT_ONCE, num_rows)

    def draw_some(index: Array, tokens: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(order, index * rows_at_once, rows_at_once)
        drawn = _draw_from_all(logits[rows], jax.tree.map(lambda values: values[rows], draws))
        return tokens.at[rows].set(jnp.where(left[rows], drawn, tokens[rows]))

    return lax.fori_loop(0, -(-left.sum() // rows_at_once), draw_some, tokens)


def _draw_from_best(logits: Array, draws: _Draws, num_groups: int) -> tuple[Array, Array]:
    """Draw from the best tokens; return token ids, int32 [S], and for which rows no other token could be drawn."""
    size = logits.shape[1]
    found = best_groups(logits, num_groups)
    bound = jnp.where(found.bound == -jnp.inf, 0, _ordered_key(draws.scale(found.bound[:, None])[:, 0]))
    # What top_k leaves sums to is known only where it leaves candidates alone.
    mass = lax.cond(
        jnp.any((draws.top_p < 1) & (draws.top_k == size)),
        lambda: _mass_above_min_p(logits, draws),
        lambda: jnp.zeros(len(logits)),
    )
    scaled = draws.scale(found.values)
    keys = _ordered_key(scaled)
    threshold, holds_mass = _lowest_kept_key(scaled, keys, draws, size, bound, mass)
    done = (threshold > bound) & (holds_mass | (draws.top_k == size) | (draws.top_p >= 1))
    return _pick(scaled, keys >= threshold[:, None], found.token_ids, draws, size), done


def _draw_from_all(logits: Array, draws: _Draws) -> Array:
    """Draw from the whole vocabulary, float32 [S, V]; return token ids, int32 [S]."""
    size = logits.shape[1]
    scaled = draws.scale(logits)
    keys = _ordered_key(scaled)
    nothing = jnp.zeros(len(logits), jnp.uint32)
    threshold, _ = _lowest_kept_key(scaled, keys, draws, size, nothing, nothing.astype(jnp.float32))
    token_ids = lax.broadcasted_iota(jnp.int32, (1, size), 1)
    return _pick(scaled, keys >= threshold[:, None], token_ids, draws, size)


def _pick(scaled: Array, kept: Array, token_ids: Array, draws: _Draws, size: int) -> Array:
    """argmax(scaled + noise) over kept tokens, [S, C]: token ids, int32 [S]; the lowest among equals."""
    noisy = jnp.where(kept, scaled + gumbel(draws.keys, token_ids), -jnp.inf)
    return jnp.where(noisy == noisy.max(axis=1, keepdims=True), token_ids, size - 1).min(axis=1)


def _lowest_kept_key(
    scaled: Array, keys: Array, draws: _Draws, size: int, bound: Array, mass: Array
) -> tuple[Array, Array]:
    """Apply min_p, top_k and top_p to some tokens.

    Args:
        scaled, keys: float32 and uint32 [S, C].
        size: V.
        bound: uint32 [S], the key that no other token's exceeds; 0 if there is no other.
        mass: float32 [S], what exp(scaled) sums to over all tokens that min_p leaves: needed where those are not all
            here and nothing but top_p filters further.

    Returns:
        the lowest key that is kept, uint32 [S]; whether all tokens that top_p chooses from are here, bool [S],
        meaningful for rows with a top_p.
    """
    floor = _ordered_key(jnp.log(draws.min_p))

    def narrow(turn: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        """top_k, then top_p: the fewest tokens, largest first, that weigh enough. Equal ones stay together."""
        floor, _ = state
        holds_mass = floor > bound
        is_top_p = turn == 1
        weights = jnp.where(keys >= floor[:, None], jnp.where(is_top_p, jnp.exp(scaled), 1.0), 0.0)
        share = jnp.where(holds_mass, weights.sum(axis=1), mass)
        # Below the clamp the product could round to zero, which no token at all would satisfy.
        wanted = jnp.where(is_top_p, jnp.maximum(draws.top_p, 1e-30) * share, draws.top_k.astype(jnp.float32))
        lowest = _largest_key_with(keys, weights, wanted)
        # Rounding must not drop the least likely tokens of rows that keep all.
        filters = jnp.where(is_top_p, draws.top_p < 1, draws.top_k < size)
        return jnp.where(filters, jnp.maximum(floor, lowest), floor), holds_mass

    has_top_k, has_top_p = jnp.any(draws.top_k < size), jnp.any(draws.top_p < 1)
    first, stop = 1 - has_top_k.astype(jnp.int32), 1 + has_top_p.astype(jnp.int32)
    return lax.fori_loop(first, stop, narrow, (floor, floor > bound))


def _mass_above_min_p(logits: Array, draws: _Draws) -> Array:
    """What exp(scaled logits) sums to over the whole vocabulary, but for tokens that min_p drops; float32 [S]."""
    scaled = draws.scale(logits)
    return jnp.where(scaled >= jnp.log(draws.min_p)[:, None], jnp.exp(scaled), 0).sum(axis=1)


def _largest_key_with(keys: Array, weights: Array, wanted: Array) -> Array:
    """Return for each row the largest uint32 key t for which the weights of keys >= t sum to at least `wanted`.

    Bisection over the 32 bits of the order-preserving key: exact, without sorting.
    """

    def body(index, threshold):
        candidate = threshold | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        enough = jnp.where(keys >= candidate[:, None], weights, 0).sum(axis=1) >= wanted
        return jnp.where(enough, candidate, threshold)

    return lax.fori_loop(0, 32, body, jnp.zeros(keys.shape[0], jnp.uint32))


def _ordered_key(values: Array) -> Array:
    """Map float32 to uint32 so that the order is kept: flip all bits of negatives, the sign bit of the others."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))

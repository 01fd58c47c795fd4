"""Random numbers that depend on who asks, never on the company: an integer hash instead of a batch generator.

The noise of a token is a function of (request seed, sample index, position, token id) alone, so a seeded request draws
the same tokens alone or in a full batch, before and after preemption, and on every platform.
"""

import jax.numpy as jnp
from jax import Array

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio, the usual odd constant that spreads consecutive integers


def mix(x: Array) -> Array:
    """Scramble uint32 words: Chris Wellons' `lowbias32`, two rounds of multiply and xor-shift, a bijection."""
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def draw_keys(seed_low: Array, seed_high: Array, sample_index: Array, positions: Array) -> tuple[Array, Array]:
    """Return two uint32 [S] key words for each row's draw at its position; all arguments are int32 [S]."""
    words = [value.astype(jnp.uint32) for value in (seed_low, seed_high, sample_index, positions)]
    first, second = jnp.uint32(_GOLDEN), jnp.uint32(0x85EBCA6B)
    for word in words:
        first = mix(first ^ word) + jnp.uint32(_GOLDEN)
        second = mix(second + word) ^ first
    return first, second


def gumbel(keys: tuple[Array, Array], token_ids: Array) -> Array:
    """Return standard Gumbel noise, float32 [S, N], for each row and token; `token_ids` is int32 [S, N] or [1, N].

    -log(-log(u)) with u = 1 - v, and v uniform in (0, 1): log1p(-v) keeps the digits of the large values, which are the
    ones that decide a draw.
    """
    first, second = (key[:, None] for key in keys)
    bits = mix(mix(token_ids.astype(jnp.uint32) * jnp.uint32(_GOLDEN) ^ first) + second)
    # The 24 highest bits and half a step stay exact in float32 and inside (0, 1); the low byte refines small values.
    fine = (bits >> 8).astype(jnp.float32) + ((bits & 0xFF).astype(jnp.float32) + 0.5) / 256
    v = jnp.minimum(fine / 2**24, 1 - 2**-24)
    return -jnp.log(-jnp.log1p(-v))

"""Rotary positions (Su et al. 2021) with the scalings that checkpoints use. Letters: T tokens, H heads, D head size,
R = D / 2 pairs.

The formulas and their float32 rounding follow transformers' `modeling_rope_utils`, because that is what checkpoints
are compared with: one bit of an inverse frequency is worth 0.0005 rad at position 8192.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[np.ndarray, float]:
    """Returns (inverse frequencies [R] float32 in radians per token, factor on cos and sin)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths_over_2pi = np.float32(rope.theta) ** exponents
    plain = np.float32(1.0) / wavelengths_over_2pi
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(wavelengths_over_2pi, rope, head_dim), _yarn_attention_factor(rope)
    raise ValueError(f"rope kind {rope.kind!r} has no formula")


def _llama3(plain: np.ndarray, rope: RopeSpec) -> np.ndarray:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    wavelengths = np.float32(2 * math.pi) / plain
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    scaled = np.where(wavelengths > low_wavelength, plain / np.float32(rope.factor), plain)
    smooth = (np.float32(rope.original_max_position) / wavelengths - np.float32(rope.low_freq_factor)) / np.float32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * scaled / np.float32(rope.factor) + smooth * scaled
    is_between = (wavelengths >= high_wavelength) & (wavelengths <= low_wavelength)
    return np.where(is_between, between, scaled).astype(np.float32)


def _yarn(wavelengths_over_2pi: np.ndarray, rope: RopeSpec, head_dim: int) -> np.ndarray:
    """Dimensions that turn often are kept, those that turn seldom are interpolated (Peng et al. 2023, eq. 17-20)."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
    kept = 1 - ramp
    interpolated = np.float32(1.0) / (np.float32(rope.factor) * wavelengths_over_2pi)
    return (interpolated * (1 - kept) + (np.float32(1.0) / wavelengths_over_2pi) * kept).astype(np.float32)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rotary_tables(
    positions: Int[Array, " T"], rope: RopeSpec, head_dim: int
) -> tuple[Float[Array, "T R"], Float[Array, "T R"]]:
    """cos and sin for every token, float32; computed once a step, shared by all layers."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "T *H D"], tables: tuple[Float[Array, "T R"], Float[Array, "T R"]]
) -> Float[Array, "T *H D"]:
    """Turns each pair (i, i + D/2) of the last axis by its token's angle. x may have several head axes."""
    cos, sin = (table.reshape(table.shape[0], *(1,) * (x.ndim - 2), -1) for table in tables)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

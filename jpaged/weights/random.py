"""Seeded random weights: models of any shape without a download, for tests and benchmarks."""

import zlib

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.models.registry import Model
from jpaged.models.spec import ModelSpec
from jpaged.weights.placement import fill_model


def random_weights(spec: ModelSpec, dtype: jax.typing.DTypeLike, seed: int, mesh: Mesh) -> Model:
    """A model with random parameters, the same for a seed whatever the dtype (up to rounding) and the mesh.

    Greedy text from it is neither constant nor a repetition of its last token, whatever the width and depth: see
    _mean_and_deviation.
    """

    def produce(path: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return _random_parameter(path, shape, dtype, seed)

    return fill_model(spec, dtype, mesh, produce)


def _random_parameter(path: str, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    generator = np.random.default_rng([seed, zlib.crc32(path.encode())])
    mean, deviation = _mean_and_deviation(path, shape)
    out = np.empty(shape, dtype)
    # Row by row of the leading axis: float32 temporaries stay small beside a bfloat16 model. Uniform numbers are
    # four times cheaper than normal ones; their width sqrt(12) * deviation gives the same deviation.
    rows = out if len(shape) > 2 else out[None]
    for row in rows:
        row[...] = (generator.random(row.shape, np.float32) - 0.5) * np.float32(12**0.5 * deviation) + mean
    return out


def _mean_and_deviation(path: str, shape: tuple[int, ...]) -> tuple[float, float]:
    module = path.split(".")[-2]
    if path == "norm.weight":
        # Signs at random: with all of them positive, a tied head scores highest the very token that was read.
        return 0.0, 1.0
    if module.endswith("norm"):
        return (1.0 if path.endswith("weight") else 0.0), 0.1
    if path.endswith("bias"):
        return 0.0, 0.1
    if module in ("embedding", "head"):
        return 0.0, 3.0 / shape[-1] ** 0.5  # logits spread by 3: neither flat nor one-hot
    if module in ("output", "down"):
        # All layers together add as much as one would: what a token is must not drown in what all tokens share.
        return 0.0, 1.0 / (shape[-1] * 2 * shape[0]) ** 0.5
    return 0.0, 1.0 / shape[-1] ** 0.5  # keeps the size of its input

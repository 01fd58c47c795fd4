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

    Matrices keep the size of their input (standard deviation 1 / sqrt(inputs)), so hidden states stay near 1 and
    logits spread by about 3: neither flat nor one-hot, whatever the width and depth.
    """

    def produce(path: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return _random_parameter(path, shape, dtype, seed)

    return fill_model(spec, dtype, mesh, produce)


def _random_parameter(path: str, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    generator = np.random.default_rng([seed, zlib.crc32(path.encode())])
    kind = path.split(".")[-2]
    if kind == "norm" or kind.endswith("_norm"):
        mean, deviation = (1.0 if path.endswith("weight") else 0.0), 0.1
    elif path.endswith("bias"):
        mean, deviation = 0.0, 0.1
    elif kind in ("embedding", "head"):
        mean, deviation = 0.0, 3.0 / shape[-1] ** 0.5
    else:
        mean, deviation = 0.0, 1.0 / shape[-1] ** 0.5
    out = np.empty(shape, dtype)
    # Row by row of the leading axis: float32 temporaries stay small beside a bfloat16 model. Uniform numbers are
    # four times cheaper than normal ones; their width sqrt(12) * deviation gives the same deviation.
    rows = out if len(shape) > 2 else out[None]
    for row in rows:
        row[...] = (generator.random(row.shape, np.float32) - 0.5) * np.float32(12**0.5 * deviation) + mean
    return out

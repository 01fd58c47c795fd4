"""Checkpoint tensors made from their names: the golden files then need hold no weights.

numpy alone, because both the tests (jax, no torch) and scripts/make_golden.py (torch, no jax) use it. RandomState is
the one numpy generator whose stream is promised never to change.
"""

import zlib

import numpy as np


def seeded_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """float32 numbers that make lively models: logits spread by about 3, and greedy text does not repeat itself.

    The final norm has random signs: else a tied head scores highest the very token that was read.
    """
    state = np.random.RandomState(zlib.crc32(f"{seed}/{name}".encode()))
    unit = (state.random_sample(shape) - 0.5) * 12**0.5  # mean 0, deviation 1
    if name in ("model.norm.weight", "model.decoder.final_layer_norm.weight"):
        values = unit
    elif "norm" in name:
        values = 0.2 * unit + (1.0 if name.endswith("weight") else 0.0)
    elif name.endswith("bias"):
        values = 0.3 * unit
    elif "embed_tokens" in name or "lm_head" in name:
        values = unit * 3.0 / shape[-1] ** 0.5
    elif any(part in name for part in ("o_proj", "out_proj", "down_proj", "fc2")):
        values = unit * 0.5 / shape[-1] ** 0.5
    else:
        values = unit * 1.5 / shape[-1] ** 0.5
    return values.astype(np.float32)

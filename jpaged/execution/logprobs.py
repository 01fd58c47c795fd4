"""Logprobs of tokens, from the model's own logits in float32, and their packed form. Letters: S rows, V vocabulary."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from jpaged.execution.candidates import top_k
from jpaged.step_plan import MAX_CANDIDATES, Logprobs
from pallas_kernels.sampling.cpu import CpuSampling

LOGPROB_WORDS = 2 + 2 * MAX_CANDIDATES


def describe_tokens(
    logits: Array, token_ids: Array, temperature: Array | None = None, native: CpuSampling | None = None
) -> Array:
    """Return what Logprobs holds of a token of each row, int32 [S, LOGPROB_WORDS]: the token's logprob (its bits), its
    rank, and the best tokens' ids and logprobs.

    Args:
        logits: float32 [S, V].
        token_ids: int32 [S].
        temperature: float32 [S], divides the logits; `None` leaves them as they are.
        native: does it instead of XLA.
    """
    if native is not None:
        divisor = jnp.ones(len(logits)) if temperature is None else temperature
        return native.describe(logits, token_ids, divisor, MAX_CANDIDATES)
    divide = lambda values: values if temperature is None else values / temperature[:, None]  # noqa: E731
    own = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    # Counted in float32, which is exact for any vocabulary and twice as fast as integers on a CPU.
    ranks = (logits >= own).astype(jnp.float32).sum(axis=1).astype(jnp.int32)
    count = min(MAX_CANDIDATES, logits.shape[1])
    best, best_ids = top_k(logits, count)
    largest = best[:, :1]
    log_mass = jnp.log(jnp.exp(divide(logits - largest)).sum(axis=1, keepdims=True))
    logprobs = divide(jnp.concatenate([own, best], axis=1) - largest) - log_mass
    padding = ((0, 0), (0, MAX_CANDIDATES - count))  # of a vocabulary that is smaller: never the best
    logprobs = jnp.pad(logprobs, padding, constant_values=-jnp.inf)
    bits = lax.bitcast_convert_type(logprobs, jnp.int32)
    return jnp.concatenate([bits[:, :1], ranks[:, None], jnp.pad(best_ids, padding), bits[:, 1:]], axis=1)


def unpack_logprobs(words: NDArray[np.int32]) -> Logprobs:
    """What `describe_tokens` packed, int32 [S, LOGPROB_WORDS]."""
    ids, bits = words[:, 2 : 2 + MAX_CANDIDATES], words[:, 2 + MAX_CANDIDATES :]
    return Logprobs(words[:, 0].view(np.float32), words[:, 1], ids, bits.view(np.float32))

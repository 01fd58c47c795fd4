"""Logprobs beyond what a step packs: of prompt tokens, and of the whole vocabulary, from the step's hidden states.

Each is one compiled call over a fixed number of tokens, whatever the step's bucket was; longer lists take several.
Letters: E hidden features, V vocabulary entries, N tokens of a call.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jpaged.execution.logprobs import describe_tokens, unpack_logprobs
from jpaged.execution.programs import Programs
from jpaged.execution.step import StepParts, head_logits, replicated
from jpaged.step_plan import Logprobs, ScoredToken

# Tokens per call. A call computes their logits, so that a prompt's chunk should fill it and one token not wait long.
SCORED_TOKENS = 64
WIDE_TOKENS = 8


class PendingScores:
    """Dispatched calls; each method waits for its own."""

    __slots__ = ("_num_scored", "_num_wide", "_scored", "_wide")

    def __init__(self, scored: list[Array], num_scored: int, wide: list[Array], num_wide: int) -> None:
        for part in scored + wide:
            part.copy_to_host_async()
        self._scored, self._num_scored = scored, num_scored
        self._wide, self._num_wide = wide, num_wide

    def scored(self) -> Logprobs | None:
        """Of all scored tokens, in the plan's order."""
        return unpack_logprobs(_join(self._scored)[: self._num_scored]) if self._scored else None

    def wide(self) -> NDArray[np.float32] | None:
        """float32 [number of wide tokens, V], in the plan's order."""
        return _join(self._wide)[: self._num_wide] if self._wide else None


class Scorer:
    """The two compiled functions."""

    def __init__(self, programs: Programs, parts: StepParts, weights: Any, hidden: Any) -> None:
        sharding = replicated(parts.mesh)

        def logits_at(weights: Any, hidden: Array, indices: Array) -> Array:
            return head_logits(parts, weights, hidden[indices])

        def score(weights: Any, hidden: Array, words: Array) -> Array:
            indices, token_ids = words
            return describe_tokens(logits_at(weights, hidden, indices), token_ids, native=parts.sampling)

        def score_wide(weights: Any, hidden: Array, indices: Array) -> Array:
            return jax.nn.log_softmax(logits_at(weights, hidden, indices), axis=1)

        words = jax.ShapeDtypeStruct((2, SCORED_TOKENS), jnp.int32, sharding=sharding)
        self._score = programs.add("score", score, weights, hidden, words, out_shardings=sharding)
        indices = jax.ShapeDtypeStruct((WIDE_TOKENS,), jnp.int32, sharding=sharding)
        self._score_wide = programs.add("score_wide", score_wide, weights, hidden, indices, out_shardings=sharding)

    def start(self, weights: Any, hidden: Array, scored: list[ScoredToken], wide: list[ScoredToken]) -> PendingScores:
        """Dispatch what a plan wants of its step's hidden states, before the next step replaces them."""
        scored_parts = []
        for part in _parts(scored, SCORED_TOKENS):
            words = np.zeros((2, SCORED_TOKENS), np.int32)
            words[:, : len(part)] = np.array([(token.index, token.token_id) for token in part], np.int32).T
            scored_parts.append(self._score(weights, hidden, words))
        wide_parts = []
        for part in _parts(wide, WIDE_TOKENS):
            indices = np.zeros(WIDE_TOKENS, np.int32)
            indices[: len(part)] = [token.index for token in part]
            wide_parts.append(self._score_wide(weights, hidden, indices))
        return PendingScores(scored_parts, len(scored), wide_parts, len(wide))


def _parts(tokens: list[ScoredToken], size: int) -> list[list[ScoredToken]]:
    return [tokens[first : first + size] for first in range(0, len(tokens), size)]


def _join(parts: list[Array]) -> np.ndarray:
    return np.concatenate([np.asarray(part) for part in parts])

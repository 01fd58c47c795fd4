"""What rows may draw beyond numbers, kept on the device: it goes over once, when a row is taken.

Letters: R rows and one scratch row; V vocabulary entries; W = ceil(V / 32) words of allowed bits.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from jpaged.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS
from jpaged.step_plan import RowConstraints

MAX_BAD_TOKEN_SEQUENCES = 2 * MAX_BAD_WORDS  # a word is tokenised with and without a space before it
MAX_LATE_TOKEN_IDS = MAX_STOP_TOKEN_IDS + 32  # the model's own ends of sequence come to the request's
NO_TOKEN = -1  # pads every list of token ids


class Constraints(NamedTuple):
    """As in RowConstraints; what a row does not have is not cleared, its flags say that it does not count.

    Attributes:
        allowed_bits: uint32 [R + 1, W].
        bias_ids, bias_values: int32 and float32 [R + 1, MAX_LOGIT_BIASES].
        bad_words: int32 [R + 1, MAX_BAD_TOKEN_SEQUENCES, MAX_BAD_WORD_TOKENS], each word padded in front.
        late_ids: int32 [R + 1, MAX_LATE_TOKEN_IDS].
    """

    allowed_bits: Array
    bias_ids: Array
    bias_values: Array
    bad_words: Array
    late_ids: Array


def make_constraints(num_rows: int, vocabulary_size: int) -> Constraints:
    def empty(*shape: int) -> Array:
        return jnp.full((num_rows + 1, *shape), NO_TOKEN, jnp.int32)

    return Constraints(
        allowed_bits=jnp.zeros((num_rows + 1, num_words(vocabulary_size)), jnp.uint32),
        bias_ids=empty(MAX_LOGIT_BIASES),
        bias_values=jnp.zeros((num_rows + 1, MAX_LOGIT_BIASES), jnp.float32),
        bad_words=empty(MAX_BAD_TOKEN_SEQUENCES, MAX_BAD_WORD_TOKENS),
        late_ids=empty(MAX_LATE_TOKEN_IDS),
    )


def num_words(vocabulary_size: int) -> int:
    """uint32 words that hold one bit for each token."""
    return -(-vocabulary_size // 32)


@dataclass(frozen=True)
class ConstraintsLayout:
    """Where one row's constraints lie in a run of int32 words."""

    vocabulary_size: int

    @cached_property
    def _slices(self) -> dict[str, slice]:
        sizes = {
            "allowed_bits": num_words(self.vocabulary_size),
            "bias_ids": MAX_LOGIT_BIASES,
            "bias_values": MAX_LOGIT_BIASES,
            "bad_words": MAX_BAD_TOKEN_SEQUENCES * MAX_BAD_WORD_TOKENS,
            "late_ids": MAX_LATE_TOKEN_IDS,
        }
        ends = np.cumsum([1, *sizes.values()]).tolist()
        return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends[1:], strict=True)}

    @property
    def num_words(self) -> int:
        return self._slices["late_ids"].stop

    def pack(self, row: int, constraints: RowConstraints) -> NDArray[np.int32]:
        """Return int32 [num_words]: the row, then its constraints."""
        words = np.full(self.num_words, NO_TOKEN, np.int32)
        view = {name: words[where] for name, where in self._slices.items()}
        words[0] = row
        if constraints.allowed_bits is not None:
            view["allowed_bits"][:] = constraints.allowed_bits.view(np.int32)
        if constraints.logit_bias:
            ids, values = zip(*constraints.logit_bias, strict=True)
            view["bias_ids"][: len(ids)] = ids
            view["bias_values"][: len(ids)] = np.array(values, np.float32).view(np.int32)
        assert len(constraints.bad_words) <= MAX_BAD_TOKEN_SEQUENCES
        bad_words = view["bad_words"].reshape(-1, MAX_BAD_WORD_TOKENS)
        for index, word in enumerate(constraints.bad_words):
            bad_words[index, -len(word) :] = word
        view["late_ids"][: len(constraints.late_token_ids)] = constraints.late_token_ids
        return words

    def enter(self, constraints: Constraints, words: Array) -> Constraints:
        """Put a packed row's constraints into its place; called under jit."""
        row = words[0]
        changed = {}
        for name, where in self._slices.items():
            kept = getattr(constraints, name)
            new = lax.bitcast_convert_type(words[where], kept.dtype).reshape(kept.shape[1:])
            changed[name] = kept.at[row].set(new)
        return Constraints(**changed)

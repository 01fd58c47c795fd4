"""Drawing tokens and describing them in C++ for the CPU; cpu_sampling.cc says how.

Letters in shapes: S places, V vocabulary entries, R rows, M tokens of the longest history, N biases of a row, B tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.native.build import InstructionSet, build, choose_instruction_set

SOURCE = Path(__file__).with_name("cpu_sampling.cc")


class DrawFields(NamedTuple):
    """What places draw by, entries [S], as cpu_sampling.cc numbers them: float32, then int32.

    Attributes:
        temperature: not positive for the most likely token.
        top_p, log_min_p: 1 and -inf for no effect.
        presence, frequency, repetition: penalties.
        top_k: not positive for no effect.
        first_key, second_key: the noise's keys.
        row_id: where the histories and biases of the place are.
        prompt_length: tokens of the history that were not generated.
        history_length: tokens of the history, 0 without penalties.
        has_bias: whether the row's biases count.
    """

    temperature: Array
    top_p: Array
    log_min_p: Array
    presence: Array
    frequency: Array
    repetition: Array
    top_k: Array
    first_key: Array
    second_key: Array
    row_id: Array
    prompt_length: Array
    history_length: Array
    has_bias: Array


_NUM_FLOATS = DrawFields._fields.index("top_k")


@dataclass(frozen=True)
class CpuSampling:
    """One device only: XLA does not know how to split it."""

    instruction_set: str

    @staticmethod
    def make(instruction_set: InstructionSet | None = None) -> "CpuSampling":
        """Builds it if need be. Raises BuildError."""
        instruction_set = instruction_set or choose_instruction_set()
        library = build(SOURCE, instruction_set)
        for name in ("jpaged_draw", "jpaged_describe"):
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(f"{name}_{instruction_set.name}", handler, platform="cpu")
        return CpuSampling(instruction_set.name)

    def draw(
        self,
        logits: Array,
        fields: DrawFields,
        histories: Array,
        blocked: Array,
        bias_ids: Array,
        bias_values: Array,
    ) -> Array:
        """Draw a token for each place, int32 [S].

        Args:
            logits: float32 [S, V].
            histories: int32 [R, M].
            blocked: int32 [S, B], tokens that a place must not draw; what is no token pads.
            bias_ids, bias_values: int32 and float32 [R, N], padded likewise.
        """
        numbers, words = pack_fields(fields)
        call = jax.ffi.ffi_call(
            f"jpaged_draw_{self.instruction_set}", jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32)
        )
        return call(logits, numbers, words, histories, blocked, bias_ids, bias_values)

    def describe(self, logits: Array, token_ids: Array, temperature: Array, num_best: int) -> Array:
        """How likely tokens are, int32 [S, 2 + 2 * num_best]: the token's logprob (its bits), its rank, the ids of the
        best tokens and their logprobs; ids 0 and -inf beyond the vocabulary.

        Args:
            logits: float32 [S, V].
            token_ids: int32 [S].
            temperature: float32 [S], divides the logits.
        """
        result = jax.ShapeDtypeStruct((len(logits), 2 + 2 * num_best), jnp.int32)
        call = jax.ffi.ffi_call(f"jpaged_describe_{self.instruction_set}", result)
        return call(logits, token_ids, temperature)


def pack_fields(fields: DrawFields) -> tuple[Array, Array]:
    """Fields as the kernel takes them: float32 and int32, [number of fields, S]."""
    words = [_as_int32(values) for values in fields[_NUM_FLOATS:]]
    return jnp.stack(fields[:_NUM_FLOATS]), jnp.stack(words)


def _as_int32(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.int32) if values.dtype == jnp.uint32 else values.astype(jnp.int32)

"""Products of a step's rows with one layer of stacked weights, in C++ for the CPU; cpu_matmul.cc says how.

Letters in shapes: T rows, K inputs, N outputs, L layers; of packed weights B = ceil(N / 16) blocks of 16 outputs, and
W words of P numbers for each output: P is 2 for bfloat16, 1 for float32.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native.build import InstructionSet, build, choose_instruction_set

SOURCE = Path(__file__).with_name("cpu_matmul.cc")
_BLOCK_OUTPUTS = 16
_ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1}
_BLOCK_WORDS = 16  # of bfloat16, the words of an output are a multiple of this: a tile is as wide
_NOTHING = np.zeros(0, np.float32)  # where a norm's weights or a residual would be


class RowNorm(NamedTuple):
    """Rows are divided by sqrt(mean(x^2) + eps) and multiplied with the layer's weights, float32 [L, K], beforehand."""

    weights: jax.Array | np.ndarray
    eps: float


@dataclass(frozen=True)
class CpuMatmul:
    """Callable: x float32 [T, K] times the transpose of layer `layer` of packed weights [L, B, W, 16, P], of which the
    first `num_outputs` outputs count -> float32 [T, N].

    XLA would copy the layer out of the stack first, pads few rows, and is slower with many. bfloat16 weights meet x
    rounded to bfloat16, sums are float32. `layer` may be traced. One device only: XLA does not know how to split it.

    What comes before and after takes XLA longer than the few numbers of a decode step are worth: a `norm` of x, and a
    `residual` [T, N] that the result is added to.
    """

    name: str  # of the instruction set

    @staticmethod
    def make(instruction_set: InstructionSet | None = None) -> "CpuMatmul":
        """Builds it if need be. Raises BuildError."""
        instruction_set = instruction_set or choose_instruction_set()
        library = build(SOURCE, instruction_set)
        for function in ("project", "feed_forward", "pack_weights"):
            capsule = jax.ffi.pycapsule(getattr(library, f"jpaged_{function}"))
            jax.ffi.register_ffi_target(f"jpaged_{function}_{instruction_set.name}", capsule, platform="cpu")
        return CpuMatmul(instruction_set.name)

    def takes(self, dtype: jax.typing.DTypeLike) -> bool:
        """Whether weights of this dtype can be packed."""
        return jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16)

    def pack[W: (jax.Array, jax.ShapeDtypeStruct)](self, weights: W, num_layers: int = 1) -> W:
        """Weights [L, ..., K], whose middle axes are N outputs -> packed. Of a shape, the packed one's shape."""
        num_inputs = weights.shape[-1]
        num_outputs = prod(weights.shape) // num_layers // num_inputs
        is_pair = weights.dtype == jnp.bfloat16
        num_words = -(-num_inputs // (2 * _BLOCK_WORDS)) * _BLOCK_WORDS if is_pair else num_inputs
        num_blocks = -(-num_outputs // _BLOCK_OUTPUTS)
        shape = (num_layers, num_blocks, num_words, _BLOCK_OUTPUTS, 2 if is_pair else 1)
        if isinstance(weights, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, weights.dtype)
        return _packer(self.name, (num_layers, num_outputs, num_inputs), shape, weights.dtype)(weights)

    def __call__(
        self,
        x: jax.Array,
        packed: jax.Array,
        layer: jax.Array | int,
        num_outputs: int,
        *,
        norm: RowNorm | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        result = jax.ShapeDtypeStruct((x.shape[0], num_outputs), jnp.float32)
        call = jax.ffi.ffi_call(f"jpaged_project_{self.name}", result)
        norm = norm or RowNorm(_NOTHING, 0.0)
        return call(
            x.astype(jnp.float32),
            packed,
            jnp.asarray(layer, jnp.int32),
            norm.weights,
            _NOTHING if residual is None else residual,
            eps=np.float32(norm.eps),
        )

    def gates(self, group: int, activation: str) -> bool:
        """Whether `feed_forward` can be used for this activation and so many features in a row."""
        return activation in _ACTIVATIONS and group % _BLOCK_OUTPUTS == 0

    def feed_forward(
        self,
        x: jax.Array,
        gate_up: jax.Array,
        down: jax.Array,
        layer: jax.Array | int,
        *,
        group: int,
        activation: str,
        norm: RowNorm | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """down(activation(gate(x)) * up(x)) for float32 [T, E]; outputs of gate_up are `group` gates, then as many ups,
        in turns. What lies between is rounded to the weights' dtype."""
        call = jax.ffi.ffi_call(f"jpaged_feed_forward_{self.name}", jax.ShapeDtypeStruct(x.shape, jnp.float32))
        norm = norm or RowNorm(_NOTHING, 0.0)
        return call(
            x.astype(jnp.float32),
            gate_up,
            down,
            jnp.asarray(layer, jnp.int32),
            norm.weights,
            _NOTHING if residual is None else residual,
            group=np.int64(group // _BLOCK_OUTPUTS),
            activation=np.int64(_ACTIVATIONS[activation]),
            eps=np.float32(norm.eps),
        )


@functools.cache
def _packer(name: str, shape: tuple[int, ...], packed_shape: tuple[int, ...], dtype: np.dtype) -> Callable:
    """Compiled once in a process, so that other weights of the same shapes compile nothing."""
    call = jax.ffi.ffi_call(f"jpaged_pack_weights_{name}", jax.ShapeDtypeStruct(packed_shape, dtype))
    return jax.jit(lambda weights: call(weights.reshape(shape)))


def unpack_outputs(packed: jax.Array, outputs: jax.Array, num_inputs: int) -> jax.Array:
    """The weights of some outputs of the only layer, int32 [T] -> [T, K]; ids beyond the last get any."""
    words = packed.at[0, outputs // _BLOCK_OUTPUTS, :, outputs % _BLOCK_OUTPUTS].get(mode="clip")
    return words.reshape(outputs.shape[0], -1)[:, :num_inputs]

"""Products of a step's rows with one layer of stacked weights, in C++ for the CPU; cpu_matmul.cc says how.

Letters in shapes: T rows, K inputs, N outputs, L layers.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.native.build import InstructionSet, build, choose_instruction_set

MAX_ROWS, TILES_MAX_ROWS = 16, 256
SOURCE = Path(__file__).with_name("cpu_matmul.cc")


@dataclass(frozen=True)
class CpuMatmul:
    """Callable: x float32 [T, K] times the transpose of layer `layer` of weights [L, N, K] -> float32 [T, N].

    XLA would copy the layer out of the stack first, and pads few rows. bfloat16 weights meet x rounded to bfloat16
    where the instruction set has products for it, sums are float32. `layer` may be traced. One device only: XLA does
    not know how to split it.
    """

    target: str
    max_rows: int  # with more of them XLA is as fast or faster

    @staticmethod
    def make(instruction_set: InstructionSet | None = None) -> "CpuMatmul":
        """Builds it if need be. Raises BuildError."""
        instruction_set = instruction_set or choose_instruction_set()
        library = build(SOURCE, instruction_set)
        target = f"jpaged_project_{instruction_set.name}"
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(library.jpaged_project), platform="cpu")
        return CpuMatmul(target, TILES_MAX_ROWS if "amx_tile" in instruction_set.features else MAX_ROWS)

    def takes(self, weights: jax.Array) -> bool:
        """Whether weights of this shape and dtype can be used: bfloat16 lies in pairs."""
        return weights.dtype == jnp.float32 or (weights.dtype == jnp.bfloat16 and weights.shape[-1] % 2 == 0)

    def __call__(self, x: jax.Array, weights: jax.Array, layer: jax.Array | int) -> jax.Array:
        result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), jnp.float32)
        return jax.ffi.ffi_call(self.target, result)(x.astype(jnp.float32), weights, jnp.asarray(layer, jnp.int32))

"""Linear layers and embeddings. Letters: T tokens, K input features, N output features, V vocabulary."""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.matmul.cpu import CpuMatmul, unpack_outputs


class WholeStack(nnx.Param):
    """A stack of weights that no layer is cut out of: each layer reads its own where it lies."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerOfStack:
    """What a `WholeStack` holds inside a layer."""

    stack: Float[Array, "L ..."]
    layer: Int[Array, ""]


def abstract_parameter(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> nnx.Param:
    """A parameter of known shape and no storage; the numbers are put in by jpaged.weights."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


def dot_precision(dtype: jax.typing.DTypeLike) -> lax.Precision:
    """Float32 models are for exact comparison: without HIGHEST, TPUs and GPUs round float32 operands first."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else lax.Precision.DEFAULT


def project(x: Float[Array, "T K"], weight: Float[Array, "N K"]) -> Float[Array, "T N"]:
    """x times the transpose of weight, operands in the weight's dtype, result in float32.

    Weights lie as [N, K] and the result stays float32: both measured as the fastest form on CPU, and the residual
    stream is float32 anyway.
    """
    return lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((1,), (1,)), ((), ())),
        precision=dot_precision(weight.dtype),
        preferred_element_type=jnp.float32,
    )


class Linear(nnx.Module):
    """A linear layer: weight [*stack, *outputs, inputs] in the model's dtype, optional bias [*stack, *outputs] in
    float32. `outputs` may have several axes, so that a fused layer can be sharded along the first."""

    def __init__(
        self,
        inputs: int,
        outputs: tuple[int, ...],
        dtype: jax.typing.DTypeLike,
        *,
        bias: bool = False,
        stack: tuple[int, ...] = (),
    ):
        self.weight = abstract_parameter((*stack, *outputs, inputs), dtype)
        self.bias = abstract_parameter((*stack, *outputs), jnp.float32) if bias else None
        self.inputs, self.outputs, self.num_layers = inputs, outputs, prod(stack)
        self.matmul: CpuMatmul | None = None

    def use_matmul(self, matmul: CpuMatmul) -> None:
        """Leaves products to `matmul`: the weights are packed for it, and a stack of them stays whole."""
        self.matmul = matmul
        self.weight = WholeStack(matmul.pack(self.weight.get_value(), self.num_layers))

    def packed(self) -> tuple[Array, Array | int]:
        """The packed weights, and which layer of them counts; for a module with a `matmul`."""
        weight = self.weight.get_value()
        return (weight.stack, weight.layer) if isinstance(weight, LayerOfStack) else (weight, 0)

    @jax.named_scope("matmul")
    def __call__(self, x: Float[Array, "T K"]) -> Float[Array, "T ..."]:
        if self.matmul is not None:
            y = self.matmul(x, *self.packed(), prod(self.outputs))
        else:
            # Flat, because XLA transposes (copies) a right-hand side with more than two axes at every step. Joining the
            # output axes keeps a split of the first of them.
            weight = self.weight.get_value()
            y = project(x, weight.reshape(-1, weight.shape[-1]))
        y = y.reshape(x.shape[0], *self.outputs)
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """A table [rows, width] in the model's dtype, looked up in float32; also the output head when tied."""

    def __init__(self, rows: int, width: int, dtype: jax.typing.DTypeLike):
        self.weight = abstract_parameter((rows, width), dtype)
        self.rows, self.width = rows, width
        self.matmul: CpuMatmul | None = None

    def use_matmul(self, matmul: CpuMatmul) -> None:
        """Leaves the product with the table to `matmul`, for which it is packed."""
        self.matmul = matmul
        self.weight = nnx.Param(matmul.pack(self.weight.get_value()))

    def __call__(self, ids: Int[Array, " T"]) -> Float[Array, "T K"]:
        # Padding rows carry arbitrary ids: clip, so that they cannot bring NaN into the batch.
        if self.matmul is not None:
            return unpack_outputs(self.weight[...], ids, self.width).astype(jnp.float32)
        return jnp.take(self.weight[...], ids, axis=0, mode="clip").astype(jnp.float32)

    def logits(self, hidden: Float[Array, "T K"]) -> Float[Array, "T V"]:
        """hidden times the transposed table."""
        if self.matmul is not None:
            return self.matmul(hidden, self.weight[...], 0, self.rows)
        return project(hidden, self.weight[...])


def use_matmul(model: nnx.Module, matmul: CpuMatmul) -> None:
    """Leaves all products of a model on one device to `matmul`, and packs its weights, or the shapes in their place."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear | Embedding) and matmul.takes(module.weight.get_value().dtype):
            module.use_matmul(matmul)

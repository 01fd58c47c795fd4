"""Linear layers and embeddings. Letters: T tokens, K input features, N output features, V vocabulary."""

from dataclasses import dataclass
from math import prod
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.matmul.cpu import CpuMatmul, RowNorm, unpack_outputs


class WholeStack(nnx.Param):
    """A stack of weights that no layer is cut out of: each layer reads its own where it lies."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerOfStack:
    """What a `WholeStack` holds inside a layer."""

    stack: Float[Array, "L ..."]
    layer: Int[Array, ""]


class Norm(Protocol):
    """What a layer normalises its input with."""

    def __call__(self, x: Float[Array, "T K"]) -> Float[Array, "T K"]: ...

    def for_product(self) -> RowNorm | None:
        """The same for a native product of the same layer to do; `None` if it cannot."""
        ...


class MatmulUser(nnx.Module):
    """A module that leaves work to native products where there are any."""

    def use_matmul(self, matmul: CpuMatmul) -> None:
        """Hold weights as `matmul` wants them from now on; shapes in their place, too."""
        raise NotImplementedError


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


class Linear(MatmulUser):
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
        if not matmul.takes(self.weight.get_value().dtype):
            return
        self.matmul = matmul
        self.weight = WholeStack(matmul.pack(self.weight.get_value(), self.num_layers))

    def packed(self) -> tuple[Array, Array | int]:
        """The packed weights, and which layer of them counts; for a module with a `matmul`."""
        weight = self.weight.get_value()
        return (weight.stack, weight.layer) if isinstance(weight, LayerOfStack) else (weight, 0)

    def __call__(
        self, x: Float[Array, "T K"], *, norm: Norm | None = None, residual: Float[Array, "T N"] | None = None
    ) -> Float[Array, "T ..."]:
        """norm(x) times the transposed weight, plus bias, plus residual, as far as there are any."""
        if self.matmul is None:
            x = x if norm is None else norm(x)
            # Flat, because XLA transposes (copies) a right-hand side with more than two axes at every step. Joining the
            # output axes keeps a split of the first of them.
            weight = self.weight.get_value()
            with jax.named_scope("matmul"):
                return self.add(project(x, weight.reshape(-1, weight.shape[-1])), residual)
        x, row_norm = normalise_or_leave(norm, x)
        fused, rest = (residual, None) if self.bias is None else (None, residual)
        with jax.named_scope("matmul"):
            return self.add(
                self.matmul(x, *self.packed(), prod(self.outputs), norm=row_norm, residual=fused),
                rest,
            )

    def add(self, y: Float[Array, "T N"], residual: Float[Array, "T N"] | None) -> Float[Array, "T ..."]:
        """Bias and residual, as far as there are any, to what a product gave."""
        y = y.reshape(y.shape[0], *self.outputs)
        y = y if self.bias is None else y + self.bias[...]
        return y if residual is None else residual + y


def normalise_or_leave(norm: Norm | None, x: Float[Array, "T K"]) -> tuple[Float[Array, "T K"], RowNorm | None]:
    """x and what a native product has to do with it first; that is nothing if it cannot, and is done here then."""
    if norm is None:
        return x, None
    row_norm = norm.for_product()
    return (norm(x), None) if row_norm is None else (x, row_norm)


class Embedding(MatmulUser):
    """A table [rows, width] in the model's dtype, looked up in float32; also the output head when tied."""

    def __init__(self, rows: int, width: int, dtype: jax.typing.DTypeLike):
        self.weight = abstract_parameter((rows, width), dtype)
        self.rows, self.width = rows, width
        self.matmul: CpuMatmul | None = None

    def use_matmul(self, matmul: CpuMatmul) -> None:
        """Leaves the product with the table to `matmul`, for which it is packed."""
        if not matmul.takes(self.weight.get_value().dtype):
            return
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
        if isinstance(module, MatmulUser):
            module.use_matmul(matmul)

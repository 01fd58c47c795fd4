"""Normalisation, in float32 throughout. Letters: T tokens, E hidden features."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jpaged.layers.linear import LayerOfStack, MatmulUser, WholeStack, abstract_parameter
from pallas_kernels.matmul.cpu import CpuMatmul, RowNorm


class RMSNorm(MatmulUser):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, *, stack: tuple[int, ...] = ()):
        self.weight = abstract_parameter((*stack, size), jnp.float32)
        self.eps = eps

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        weight = self.weight.get_value()
        if isinstance(weight, LayerOfStack):
            weight = weight.stack[weight.layer]
        return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * weight

    def use_matmul(self, matmul: CpuMatmul) -> None:
        """Have the product that follows read the weights: those of a stack stay whole."""
        if self.weight.get_value().ndim > 1:
            self.weight = WholeStack(self.weight.get_value())

    def for_product(self) -> RowNorm | None:
        weight = self.weight.get_value()
        return RowNorm(weight.stack, self.eps) if isinstance(weight, LayerOfStack) else None


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps), then weight and bias if `affine` (Ba et al. 2016)."""

    def __init__(self, size: int, eps: float, *, affine: bool = True, stack: tuple[int, ...] = ()):
        self.weight = abstract_parameter((*stack, size), jnp.float32) if affine else None
        self.bias = abstract_parameter((*stack, size), jnp.float32) if affine else None
        self.eps = eps

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        y = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        if self.weight is None or self.bias is None:
            return y
        return y * self.weight[...] + self.bias[...]

"""Feed-forward blocks. Letters: T tokens, E hidden features, F intermediate features."""

import functools
import math

import jax
from flax import nnx
from jaxtyping import Array, Float

from jpaged.layers.linear import Linear, Norm, normalise_or_leave
from jpaged.models.spec import ModelSpec

# Every name of jpaged.models.spec.ACTIVATIONS; transformers' "gelu" is the exact one.
ACTIVATION_FUNCTIONS = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def gate_up_blocks(spec: ModelSpec) -> int:
    """Blocks that the fused gate and up rows are interleaved by: the most that any tensor-parallel split needs,
    which must divide both the KV heads and the intermediate features."""
    return math.gcd(spec.num_kv_heads, spec.intermediate_size)


class GatedMLP(nnx.Module):
    """down(activation(gate(norm(x))) * up(norm(x))), plus residual, where those are given (Shazeer 2020).

    `gate_up` lies as [B, 2 * F / B, E], each of B blocks holding F / B gate rows and then their up rows: one product
    computes both, and splitting axis B splits both among devices.
    """

    def __init__(self, spec: ModelSpec, dtype: jax.typing.DTypeLike, stack: tuple[int, ...]):
        self.blocks = gate_up_blocks(spec)
        block_rows = 2 * spec.intermediate_size // self.blocks
        self.gate_up = Linear(spec.hidden_size, (self.blocks, block_rows), dtype, bias=spec.mlp_bias, stack=stack)
        self.down = Linear(spec.intermediate_size, (spec.hidden_size,), dtype, bias=spec.mlp_bias, stack=stack)
        self.activation = spec.activation

    def __call__(
        self, x: Float[Array, "T E"], *, norm: Norm | None = None, residual: Float[Array, "T E"] | None = None
    ) -> Float[Array, "T E"]:
        matmul, group = self.gate_up.matmul, self.down.inputs // self.blocks
        if matmul is not None and self.gate_up.bias is None and matmul.gates(group, self.activation):
            x, row_norm = normalise_or_leave(norm, x)
            fused, rest = (residual, None) if self.down.bias is None else (None, residual)
            (gate_up, layer), (down, _) = self.gate_up.packed(), self.down.packed()
            with jax.named_scope("matmul"):
                y = matmul.feed_forward(
                    *(x, gate_up, down, layer),
                    group=group,
                    activation=self.activation,
                    norm=row_norm,
                    residual=fused,
                )
                return self.down.add(y, rest)
        gates_and_ups = self.gate_up(x, norm=norm).reshape(x.shape[0], self.blocks, 2, -1)
        gated = ACTIVATION_FUNCTIONS[self.activation](gates_and_ups[:, :, 0]) * gates_and_ups[:, :, 1]
        return self.down(gated.reshape(x.shape[0], -1), residual=residual)


class MLP(nnx.Module):
    """down(activation(up(x)))."""

    def __init__(self, spec: ModelSpec, dtype: jax.typing.DTypeLike, stack: tuple[int, ...]):
        self.up = Linear(spec.hidden_size, (spec.intermediate_size,), dtype, bias=spec.mlp_bias, stack=stack)
        self.down = Linear(spec.intermediate_size, (spec.hidden_size,), dtype, bias=spec.mlp_bias, stack=stack)
        self.activation = spec.activation

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        return self.down(ACTIVATION_FUNCTIONS[self.activation](self.up(x)))

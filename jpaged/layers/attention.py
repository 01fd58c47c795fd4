"""The attention block around the paged kernel. Letters: T tokens, E hidden features, H KV heads, G query heads per
KV head, D head size, R = D / 2 pairs."""

from typing import Any, Protocol

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jpaged.layers.linear import Linear, Norm
from jpaged.layers.rotary import rotate
from jpaged.models.spec import ModelSpec


class Attend(Protocol):
    """Writes k and v into the pages of `layer`, attends over each sequence's pages, returns (out, pages).

    The step makes it, closing over the batch's page tables and lengths; q and out are [T, H * G, D], k and v
    [T, H, D], with query head h * G + g reading KV head h. `layer` is traced, the other keywords are static.
    """

    def __call__(
        self,
        q: Float[Array, "T HG D"],
        k: Float[Array, "T H D"],
        v: Float[Array, "T H D"],
        pages: Any,
        *,
        layer: Int[Array, ""],
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Float[Array, " HG"] | None,
    ) -> tuple[Float[Array, "T HG D"], Any]: ...


class Attention(nnx.Module):
    """The norm of x, if given; fused q, k, v; rotary positions if given; the paged kernel; the output projection, and
    what is to be added to it.

    `qkv` lies as [H, (G + 2) * D, E]: each KV head's query heads, then its key, then its value, so that splitting
    axis H splits whole heads among devices.
    """

    def __init__(self, spec: ModelSpec, dtype: jax.typing.DTypeLike, stack: tuple[int, ...]):
        self.spec = spec
        self.dtype = dtype
        head_rows = (spec.queries_per_kv + 2) * spec.head_dim
        self.qkv = Linear(
            spec.hidden_size, (spec.num_kv_heads, head_rows), dtype, bias=spec.attention_bias, stack=stack
        )
        self.output = Linear(
            spec.num_heads * spec.head_dim, (spec.hidden_size,), dtype, bias=spec.attention_bias, stack=stack
        )

    def __call__(
        self,
        x: Float[Array, "T E"],
        pages: Any,
        attend: Attend,
        *,
        layer: Int[Array, ""],
        rotary: tuple[Float[Array, "T R"], Float[Array, "T R"]] | None = None,
        norm: Norm | None = None,
        residual: Float[Array, "T E"] | None = None,
    ) -> tuple[Float[Array, "T E"], Any]:
        spec, tokens, group = self.spec, x.shape[0], self.spec.queries_per_kv
        fused = self.qkv(x, norm=norm).reshape(tokens, spec.num_kv_heads, group + 2, spec.head_dim)
        qk, v = fused[:, :, : group + 1], fused[:, :, group + 1]
        if rotary is not None:
            qk = rotate(qk, rotary)
        q = qk[:, :, :group].reshape(tokens, spec.num_heads, spec.head_dim)
        out, pages = attend(
            q.astype(self.dtype),
            qk[:, :, group].astype(self.dtype),
            v.astype(self.dtype),
            pages,
            layer=layer,
            scale=spec.attention_scale,
            window=spec.sliding_window,
            soft_cap=None,
            sinks=None,
        )
        return self.output(out.reshape(tokens, spec.num_heads * spec.head_dim), residual=residual), pages

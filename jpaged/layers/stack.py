"""Runs a stack of equal layers with one traced body, so that compile time does not grow with depth."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jpaged.layers.linear import LayerOfStack, WholeStack


def scan_layers[Layer: nnx.Module](
    layers: Layer,
    num_layers: int,
    body: Callable[[Layer, Float[Array, "T E"], Any, Array], tuple[Float[Array, "T E"], Any]],
    hidden: Float[Array, "T E"],
    pages: Any,
) -> tuple[Float[Array, "T E"], Any]:
    """Applies `body(layer, hidden, pages, index)` for every layer in turn; returns (hidden, pages).

    `layers` is one module whose every parameter has a leading axis of `num_layers`. Pages are carried, never scanned
    over: scanning over them would copy the pool at every layer; so are stacks that stay whole.
    """
    graph, whole, weights = nnx.split(layers, WholeStack, ...)

    def step(carry, scanned):
        hidden, pages = carry
        layer_weights, index = scanned
        stacks = jax.tree.map(lambda stack: LayerOfStack(stack, index), whole)
        return body(nnx.merge(graph, stacks, layer_weights), hidden, pages, index), None

    carry, _ = lax.scan(step, (hidden, pages), (weights, jnp.arange(num_layers, dtype=jnp.int32)))
    return carry

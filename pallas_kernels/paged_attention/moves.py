"""Page moves for pools whose arrays lead with layers and pages: [num_layers, num_pages + 1, ...]."""

from typing import Any

import jax
import jax.numpy as jnp


def at_least_two(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The updates of a scatter, said twice if there is only one: XLA's rewriting of such a scatter copies the pool."""
    return arrays if len(arrays[0]) > 1 else tuple(jnp.concatenate([x, x]) for x in arrays)


class LayerMajorMoves:
    """`PagedAttention`'s page moves. As host pages the arrays have axes [N, num_layers, ...]."""

    def copy_pages(self, pages: Any, source_ids: jax.Array, target_ids: jax.Array) -> Any:
        source_ids, target_ids = at_least_two(source_ids, target_ids)
        return jax.tree.map(lambda x: x.at[:, target_ids].set(x[:, source_ids]), pages)

    def read_pages(self, pages: Any, ids: jax.Array) -> Any:
        return jax.tree.map(lambda x: x[:, ids].swapaxes(0, 1), pages)

    def write_pages(self, pages: Any, ids: jax.Array, host_pages: Any) -> Any:
        def write(pool: jax.Array, new: jax.Array) -> jax.Array:
            where, content = at_least_two(ids, new)
            return pool.at[:, where].set(content.swapaxes(0, 1))

        return jax.tree.map(write, pages, host_pages)

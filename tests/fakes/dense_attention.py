"""Plain causal attention over one sequence, as the `attend` closure that models call: no pages, no kernel."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx


def dense_attend(q, k, v, pages, *, layer, scale, window, soft_cap, sinks):
    """q [T, HG, D] over k, v [T, H, D] of the same tokens, in float32; a window of W sees W tokens with itself."""
    assert soft_cap is None and sinks is None
    tokens, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    queries = q.reshape(tokens, -1, group, head_dim).astype(jnp.float32)
    scores = jnp.einsum("thgd,shd->hgts", queries, k.astype(jnp.float32), precision="highest") * scale
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)[None, :]
    visible = (distance >= 0) & (distance < (window or tokens))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("hgts,shd->thgd", weights, v.astype(jnp.float32), precision="highest")
    return out.reshape(q.shape).astype(q.dtype), pages


def dense_logits(model, token_ids):
    """[T] ids -> [T, V] logits of one sequence, jitted."""
    graph, weights = nnx.split(model)
    return _dense_logits(graph, weights, jnp.asarray(token_ids))


@functools.partial(jax.jit, static_argnums=0)
def _dense_logits(graph, weights, ids):
    model = nnx.merge(graph, weights)
    hidden, _ = model(ids, jnp.arange(ids.shape[0]), (), dense_attend)
    return model.logits(hidden)

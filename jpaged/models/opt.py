"""OPT. Letters: T tokens, S rows, E hidden features, V vocabulary."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jpaged.layers.attention import Attend, Attention
from jpaged.layers.linear import Embedding, Linear
from jpaged.layers.mlp import MLP
from jpaged.layers.norm import LayerNorm
from jpaged.layers.stack import scan_layers
from jpaged.models.spec import ModelSpec

# Checkpoint name -> (parameter, part of a fused parameter). {layer} is the index on the parameter's leading axis.
CHECKPOINT_NAMES = {
    "model.decoder.embed_tokens.weight": ("embedding.weight", None),
    "model.decoder.embed_positions.weight": ("positions.weight", None),
    "model.decoder.project_in.weight": ("project_in.weight", None),
    "model.decoder.project_out.weight": ("project_out.weight", None),
    "model.decoder.layers.{layer}.self_attn_layer_norm.weight": ("layers.attention_norm.weight", None),
    "model.decoder.layers.{layer}.self_attn_layer_norm.bias": ("layers.attention_norm.bias", None),
    "model.decoder.layers.{layer}.self_attn.q_proj.weight": ("layers.attention.qkv.weight", "q"),
    "model.decoder.layers.{layer}.self_attn.k_proj.weight": ("layers.attention.qkv.weight", "k"),
    "model.decoder.layers.{layer}.self_attn.v_proj.weight": ("layers.attention.qkv.weight", "v"),
    "model.decoder.layers.{layer}.self_attn.out_proj.weight": ("layers.attention.output.weight", None),
    "model.decoder.layers.{layer}.self_attn.q_proj.bias": ("layers.attention.qkv.bias", "q"),
    "model.decoder.layers.{layer}.self_attn.k_proj.bias": ("layers.attention.qkv.bias", "k"),
    "model.decoder.layers.{layer}.self_attn.v_proj.bias": ("layers.attention.qkv.bias", "v"),
    "model.decoder.layers.{layer}.self_attn.out_proj.bias": ("layers.attention.output.bias", None),
    "model.decoder.layers.{layer}.final_layer_norm.weight": ("layers.mlp_norm.weight", None),
    "model.decoder.layers.{layer}.final_layer_norm.bias": ("layers.mlp_norm.bias", None),
    "model.decoder.layers.{layer}.fc1.weight": ("layers.mlp.up.weight", None),
    "model.decoder.layers.{layer}.fc1.bias": ("layers.mlp.up.bias", None),
    "model.decoder.layers.{layer}.fc2.weight": ("layers.mlp.down.weight", None),
    "model.decoder.layers.{layer}.fc2.bias": ("layers.mlp.down.bias", None),
    "model.decoder.final_layer_norm.weight": ("norm.weight", None),
    "model.decoder.final_layer_norm.bias": ("norm.bias", None),
    "lm_head.weight": ("head.weight", None),
}


class OPTLayer(nnx.Module):
    """One block, or with a non-empty `stack` a stack of them; opt-350m alone normalises after each half."""

    def __init__(self, spec: ModelSpec, dtype: jax.typing.DTypeLike, stack: tuple[int, ...] = ()):
        self.norm_before = spec.norm_before
        self.attention_norm = LayerNorm(spec.hidden_size, spec.norm_eps, affine=spec.norm_affine, stack=stack)
        self.attention = Attention(spec, dtype, stack)
        self.mlp_norm = LayerNorm(spec.hidden_size, spec.norm_eps, affine=spec.norm_affine, stack=stack)
        self.mlp = MLP(spec, dtype, stack)

    def __call__(self, hidden: Float[Array, "T E"], pages: Any, attend: Attend, layer):
        x = self.attention_norm(hidden) if self.norm_before else hidden
        attended, pages = self.attention(x, pages, attend, layer=layer)
        hidden = hidden + attended
        if self.norm_before:
            return hidden + self.mlp(self.mlp_norm(hidden)), pages
        hidden = self.attention_norm(hidden)
        return self.mlp_norm(hidden + self.mlp(hidden)), pages


class OPT(nnx.Module):
    """Parameters are in `dtype` (norms and biases in float32), activations between layers in float32."""

    def __init__(self, spec: ModelSpec, dtype: jax.typing.DTypeLike):
        self.spec = spec
        width, hidden = spec.embedding_width, spec.hidden_size
        self.embedding = Embedding(spec.vocab_size, width, dtype)
        self.positions = Embedding(spec.max_position + spec.position_offset, hidden, dtype)
        self.project_in = None if width == hidden else Linear(width, (hidden,), dtype)
        self.layers = OPTLayer(spec, dtype, stack=(spec.num_layers,))
        self.norm = LayerNorm(hidden, spec.norm_eps, affine=spec.norm_affine) if spec.final_norm else None
        self.project_out = None if width == hidden else Linear(hidden, (width,), dtype)
        self.head = None if spec.tied_embeddings else Embedding(spec.vocab_size, width, dtype)

    def __call__(
        self, token_ids: Int[Array, " T"], positions: Int[Array, " T"], pages: Any, attend: Attend
    ) -> tuple[Float[Array, "T E"], Any]:
        """Returns (hidden states after the final norm, float32; pages with this step's keys and values)."""
        hidden = self.embedding(token_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        hidden = hidden + self.positions(positions + self.spec.position_offset)

        def body(layer: OPTLayer, hidden, pages, index):
            return layer(hidden, pages, attend, index)

        hidden, pages = scan_layers(self.layers, self.spec.num_layers, body, hidden, pages)
        return hidden if self.norm is None else self.norm(hidden), pages

    def logits(self, hidden: Float[Array, "S E"]) -> Float[Array, "S V"]:
        """Scores of every token of the vocabulary, float32."""
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        return (self.embedding if self.head is None else self.head).logits(hidden)

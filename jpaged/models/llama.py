"""Llama 1 to 3, Mistral and the models that share their network. Letters: T tokens, S rows, E hidden features,
V vocabulary."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jpaged.layers.attention import Attend, Attention
from jpaged.layers.linear import Embedding
from jpaged.layers.mlp import GatedMLP
from jpaged.layers.norm import RMSNorm
from jpaged.layers.rotary import rotary_tables
from jpaged.layers.stack import scan_layers
from jpaged.models.spec import ModelSpec

# Checkpoint name -> (parameter, part of a fused parameter). {layer} is the index on the parameter's leading axis.
CHECKPOINT_NAMES = {
    "model.embed_tokens.weight": ("embedding.weight", None),
    "model.layers.{layer}.input_layernorm.weight": ("layers.attention_norm.weight", None),
    "model.layers.{layer}.self_attn.q_proj.weight": ("layers.attention.qkv.weight", "q"),
    "model.layers.{layer}.self_attn.k_proj.weight": ("layers.attention.qkv.weight", "k"),
    "model.layers.{layer}.self_attn.v_proj.weight": ("layers.attention.qkv.weight", "v"),
    "model.layers.{layer}.self_attn.o_proj.weight": ("layers.attention.output.weight", None),
    "model.layers.{layer}.self_attn.q_proj.bias": ("layers.attention.qkv.bias", "q"),
    "model.layers.{layer}.self_attn.k_proj.bias": ("layers.attention.qkv.bias", "k"),
    "model.layers.{layer}.self_attn.v_proj.bias": ("layers.attention.qkv.bias", "v"),
    "model.layers.{layer}.self_attn.o_proj.bias": ("layers.attention.output.bias", None),
    "model.layers.{layer}.post_attention_layernorm.weight": ("layers.mlp_norm.weight", None),
    "model.layers.{layer}.mlp.gate_proj.weight": ("layers.mlp.gate_up.weight", "gate"),
    "model.layers.{layer}.mlp.up_proj.weight": ("layers.mlp.gate_up.weight", "up"),
    "model.layers.{layer}.mlp.down_proj.weight": ("layers.mlp.down.weight", None),
    "model.layers.{layer}.mlp.gate_proj.bias": ("layers.mlp.gate_up.bias", "gate"),
    "model.layers.{layer}.mlp.up_proj.bias": ("layers.mlp.gate_up.bias", "up"),
    "model.layers.{layer}.mlp.down_proj.bias": ("layers.mlp.down.bias", None),
    "model.norm.weight": ("norm.weight", None),
    "lm_head.weight": ("head.weight", None),
}


class LlamaLayer(nnx.Module):
    """One block, or with a non-empty `stack` a stack of them that share one module."""

    def __init__(self, spec: ModelSpec, dtype: jax.typing.DTypeLike, stack: tuple[int, ...] = ()):
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps, stack=stack)
        self.attention = Attention(spec, dtype, stack)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps, stack=stack)
        self.mlp = GatedMLP(spec, dtype, stack)

    def __call__(self, hidden: Float[Array, "T E"], pages: Any, attend: Attend, layer, rotary):
        # Each half takes its norm and its residual with it: a native product does them on the way.
        hidden, pages = self.attention(
            hidden, pages, attend, layer=layer, rotary=rotary, norm=self.attention_norm, residual=hidden
        )
        return self.mlp(hidden, norm=self.mlp_norm, residual=hidden), pages


class Llama(nnx.Module):
    """Parameters are in `dtype` (norms and biases in float32), activations between layers in float32."""

    def __init__(self, spec: ModelSpec, dtype: jax.typing.DTypeLike):
        self.spec = spec
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size, dtype)
        self.layers = LlamaLayer(spec, dtype, stack=(spec.num_layers,))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.head = None if spec.tied_embeddings else Embedding(spec.vocab_size, spec.hidden_size, dtype)

    def __call__(
        self, token_ids: Int[Array, " T"], positions: Int[Array, " T"], pages: Any, attend: Attend
    ) -> tuple[Float[Array, "T E"], Any]:
        """Returns (hidden states after the final norm, float32; pages with this step's keys and values)."""
        assert self.spec.rope is not None
        rotary = rotary_tables(positions, self.spec.rope, self.spec.head_dim)

        def body(layer: LlamaLayer, hidden, pages, index):
            return layer(hidden, pages, attend, index, rotary)

        hidden, pages = scan_layers(self.layers, self.spec.num_layers, body, self.embedding(token_ids), pages)
        return self.norm(hidden), pages

    def logits(self, hidden: Float[Array, "S E"]) -> Float[Array, "S V"]:
        """Scores of every token of the vocabulary, float32."""
        return (self.embedding if self.head is None else self.head).logits(hidden)

"""Tiny models in the layout of Hugging Face directories: every architecture, loadable in milliseconds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jpaged.models.spec import spec_from_config
from jpaged.weights.names import checkpoint_slots
from pallas_kernels.native.build import BuildError, find_compiler
from tests.parity.seeded import seeded_tensor

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_MISTRAL: dict[str, Any] = TINY_LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "tie_word_embeddings": False,
    "sliding_window": 8,
}
TINY_OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 128,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 2,
}


# Of an engine on one of them: exact, with few buckets, and pages that are soon full.
TINY_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "num_pages": 400,
}


def tiny_buckets() -> int:
    """How many shapes an engine with such options compiles: two, and where products are native one for a row alone."""
    try:
        find_compiler()
    except BuildError:
        return 2
    return 3


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Checkpoint name -> float32 tensor, for every tensor of the model."""
    slots = checkpoint_slots(spec_from_config(config))
    return {name: seeded_tensor(name, slot.shape, seed) for name, slot in slots.items()}


def write_checkpoint(config: dict[str, Any], tensors: dict[str, np.ndarray], target_dir: Path) -> Path:
    """Writes config.json and model.safetensors; returns the directory."""
    target_dir.mkdir(parents=True, exist_ok=True)
    (target_dir / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, target_dir / "model.safetensors", metadata={"format": "pt"})
    return target_dir


def write_random_checkpoint(config: dict[str, Any], target_dir: Path, seed: int = 0) -> Path:
    """A checkpoint directory (without tokenizer) whose float32 weights depend on the seed alone."""
    return write_checkpoint(config, random_tensors(config, seed), target_dir)

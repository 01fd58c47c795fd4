"""Tiny GGUF files for tests: a Llama of two layers with random weights, and vocabularies of both kinds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, dequantize, quantize
from tokenizers import pre_tokenizers

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2

LAYER_SHAPES = {
    "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
    "attn_q": (HEADS * HEAD_DIM, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
}  # fmt: skip


def interleave_rotary(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: a head's two rotary halves become neighbouring pairs."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@dataclass
class TinyGguf:
    """What to write. Names are GGUF's; `weights` holds the values as a checkpoint has them: not interleaved."""

    tied: bool = True
    biased: bool = False
    storage: GGMLQuantizationType = GGMLQuantizationType.F32
    architecture: str = "llama"
    metadata: dict[str, Any] = field(default_factory=dict)  # None removes a key
    vocab_size: int = 40
    seed: int = 0

    def weights(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        shapes = {"token_embd.weight": (self.vocab_size, HIDDEN), "output_norm.weight": (HIDDEN,)}
        if not self.tied:
            shapes["output.weight"] = (self.vocab_size, HIDDEN)
        for layer in range(LAYERS):
            for module, shape in LAYER_SHAPES.items():
                shapes[f"blk.{layer}.{module}.weight"] = shape
                if self.biased and module.startswith("attn_") and module != "attn_norm":
                    shapes[f"blk.{layer}.{module}.bias"] = shape[:1]
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    def write(self, path: Path, drop: tuple[str, ...] = (), extra: Mapping[str, np.ndarray] | None = None) -> Path:
        """Writes the file without the tensors in `drop` and with those in `extra`, and returns its path."""
        writer = gguf.GGUFWriter(path, self.architecture)
        keys = {
            "llama.block_count": LAYERS,
            "llama.context_length": 128,
            "llama.embedding_length": HIDDEN,
            "llama.feed_forward_length": INNER,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KV_HEADS,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 10000.0,
            "llama.rope.dimension_count": HEAD_DIM,
            **gpt2_vocabulary(self.vocab_size),
            **self.metadata,
        }
        for key, value in keys.items():
            _add(writer, key, value)
        for name, weight in {**self.weights(), **(extra or {})}.items():
            if name in drop:
                continue
            module = name.split(".")[-2]
            if module in ("attn_q", "attn_k"):
                weight = interleave_rotary(weight, HEADS if module == "attn_q" else KV_HEADS)
            if weight.ndim == 2 and self.storage != GGMLQuantizationType.F32:
                writer.add_tensor(name, quantize(weight, self.storage), raw_dtype=self.storage)
            else:
                writer.add_tensor(name, np.ascontiguousarray(weight))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def stored(self, weight: np.ndarray) -> np.ndarray:
        """`weight` after quantisation and back: what a reader can recover."""
        if weight.ndim != 2 or self.storage == GGMLQuantizationType.F32:
            return weight
        return dequantize(quantize(weight, self.storage), self.storage)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    adders: dict[type, Any] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array,
    }  # fmt: skip
    adders[type(value)](key, value)


def byte_letters() -> list[str]:
    """The 256 letters of byte-level BPE, in the order of the bytes: those below U+0100 stand for themselves."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter([letter for letter in letters if ord(letter) >= 256])
    return [chr(byte) if chr(byte) in letters else next(others) for byte in range(256)]


def gpt2_vocabulary(size: int) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary of `size` tokens: three special ones, then letters, no merges."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_letters()[33:]][:size]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }

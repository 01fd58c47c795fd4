"""GGUF to Hugging Face: the configuration, the tensor names, their shapes and the order of their rows.

The tables are data: a further architecture is a further entry of ARCHITECTURES.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.errors import ModelError
from jpaged.weights.gguf_reader import GgufFile, GgufTensor
from jpaged.weights.safetensors_reader import SINGLE_FILE

DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
SAFETENSORS_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ATTENTION_MODULES = ("attn_q", "attn_k", "attn_v", "attn_output")
MLP_MODULES = ("ffn_gate", "ffn_up", "ffn_down")
ROPE_FACTORS = "rope_freqs.weight"  # a function of the configuration, not a weight

# Keys that change the mathematics in ways the Hugging Face class has no field for.
UNSUPPORTED_KEYS = ("expert_count", "attention.scale", "attention.clamp_kqv", "logit_scale", "residual_scale",
                    "embedding_scale", "attn_logit_softcapping", "final_logit_softcapping")  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """How one `general.architecture` maps: its class, and which projections store rotary pairs side by side."""

    hf_class: str
    model_type: str
    interleaved_rope: bool


ARCHITECTURES = {"llama": Architecture("LlamaForCausalLM", "llama", interleaved_rope=True)}


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the checkpoint: where it comes from and, when rows move, the stored row of each of its rows."""

    name: str
    source: GgufTensor
    row_order: np.ndarray | None


class _Metadata:
    """The metadata of one architecture, remembering which required keys were missing so that all are reported."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str):
        self._metadata, self._prefix = metadata, prefix
        self.missing: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            return value[0]  # a per-layer list of equal values is a scalar
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            self.missing.append(f"{self._prefix}.{key}")
            return 1
        if isinstance(value, list):
            raise ModelError(f"{self._prefix}.{key} differs between layers ({value}); such models are not supported")
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{self._prefix}.{key} is {value!r}, expected a positive integer; the file is damaged")
        return value


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for the 9.999999747378752e-06 that is stored."""
    return float(str(np.float32(value)))


def architecture_of(gguf: GgufFile) -> Architecture:
    """The architecture's entry. Raises ModelError naming it and the known ones."""
    name = gguf.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(f"{gguf.path} holds architecture {name!r}; known GGUF architectures: {sorted(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def checkpoint_config(gguf: GgufFile, dtype: str) -> dict[str, Any]:
    """The config.json of the checkpoint, as a dict. `dtype` is the name of the dtype its weights will have.

    Raises ModelError for an unknown architecture, missing metadata (all keys at once), or metadata that the Hugging
    Face class cannot express.
    """
    architecture = architecture_of(gguf)
    prefix = gguf.metadata["general.architecture"]
    metadata = _Metadata(gguf.metadata, prefix)
    unsupported = [f"{prefix}.{key}" for key in UNSUPPORTED_KEYS if metadata.get(key)]
    if unsupported:
        raise ModelError(f"{gguf.path} sets {', '.join(unsupported)}, which {architecture.hf_class} has no field for")

    hidden_size = metadata.integer("embedding_length")
    num_heads = metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", hidden_size // num_heads)
    config = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": _shortest(metadata.get("attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_theta": _shortest(metadata.get("rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if metadata.missing:
        raise ModelError(f"{gguf.path} lacks the metadata {', '.join(metadata.missing)}; convert the model again")
    rotated = metadata.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(
            f"{gguf.path} rotates {rotated} of the {head_dim} dimensions of a head; partial rotation is not supported"
        )
    if "token_embd.weight" in gguf.tensors:
        config["vocab_size"] = gguf.tensors["token_embd.weight"].shape[0]
    else:
        config["vocab_size"] = metadata.integer("vocab_size", len(gguf.metadata.get("tokenizer.ggml.tokens", ())))
    config["rope_scaling"] = _rope_scaling(gguf, metadata, config)
    window = metadata.get("attention.sliding_window")
    if window:  # the Llama class has no window; Mistral's is the same network with one
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": int(window)}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


def generation_config(gguf: GgufFile) -> dict[str, Any]:
    """The generation_config.json: beginning, padding, and every token that ends a turn."""
    ids = {name: gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    config: dict[str, Any] = {"bos_token_id": ids["bos"], "eos_token_id": ends[0] if len(ends) == 1 else ends}
    config["pad_token_id"] = gguf.metadata.get("tokenizer.ggml.padding_token_id")
    return {key: value for key, value in config.items() if value not in (None, [])}


def _rope_scaling(gguf: GgufFile, metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling` of the configuration, from metadata or from the stored frequency factors."""
    if ROPE_FACTORS in gguf.tensors:
        return _llama3_scaling(gguf, config)
    kind = metadata.get("rope.scaling.type")
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear"))
    if kind == "none" or not factor or (kind in (None, "linear") and factor == 1.0):
        return None
    scaling: dict[str, Any] = {"rope_type": kind or "linear", "factor": _shortest(factor)}
    if scaling["rope_type"] == "linear":
        return scaling
    if kind != "yarn":
        raise ModelError(f"{gguf.path} scales rotary positions by {kind!r}; known: none, linear, yarn, llama3")
    scaling["original_max_position_embeddings"] = metadata.integer(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    attention_factor = metadata.get("rope.scaling.attn_factor")
    if attention_factor is not None and attention_factor != 1.0:
        # GGUF multiplies YaRN's own 0.1 ln(s) + 1 by this; Hugging Face's field replaces it.
        scaling["attention_factor"] = _shortest(attention_factor) * (0.1 * math.log(factor) + 1.0)
    return scaling


def llama3_factors(head_dim: int, theta: float, factor: float, low: float, high: float, context: int) -> np.ndarray:
    """What Llama 3.1 divides each of its head_dim / 2 rotary frequencies by (its reference `apply_scaling`)."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _llama3_scaling(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Llama 3.1's scaling, recognised by the factors it gives: GGUF keeps the factors and drops their parameters."""
    stored = np.concatenate(list(gguf.tensors[ROPE_FACTORS].float32_chunks()))
    largest = float(stored.max())
    if largest == 1.0 == float(stored.min()):
        return None
    head_dim, theta, low, high, context = config["head_dim"], config["rope_theta"], 1.0, 4.0, 8192
    expected = llama3_factors(head_dim, theta, largest, low, high, context)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise ModelError(
            f"{gguf.path} stores rotary frequency factors that Llama 3.1's scaling (low {low:g}, high {high:g}, "
            f"original context {context}) does not give; such models are not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": _shortest(largest),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Stored name -> (checkpoint name, shape) for every tensor a checkpoint of this configuration has."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {
        "attn_q": (q_rows, hidden), "attn_k": (kv_rows, hidden), "attn_v": (kv_rows, hidden),
        "attn_output": (hidden, q_rows), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner), "attn_norm": (hidden,), "ffn_norm": (hidden,),
    }  # fmt: skip
    biased = (ATTENTION_MODULES if config["attention_bias"] else ()) + (MLP_MODULES if config["mlp_bias"] else ())
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, hf_name in MODEL_TENSORS.items():
        if name != "output.weight" or not config["tie_word_embeddings"]:
            expected[name] = (hf_name, (hidden,) if name == "output_norm.weight" else (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        for module, hf_module in LAYER_TENSORS.items():
            target = f"model.layers.{layer}.{hf_module}"
            expected[f"blk.{layer}.{module}.weight"] = (f"{target}.weight", shapes[module])
            if module in biased:
                expected[f"blk.{layer}.{module}.bias"] = (f"{target}.bias", shapes[module][:1])
    return expected


def half_split_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """Undoes GGUF's rotary order: the stored row of each row of a Hugging Face q or k projection.

    GGUF stores a head's rotary pairs side by side, (x0, y0, x1, y1, ...); Hugging Face stores the two halves,
    (x0, x1, ..., y0, y1, ...). `num_heads` is that of the projection: the KV heads for k.
    """
    return np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def checkpoint_plan(gguf: GgufFile, config: Mapping[str, Any]) -> list[TensorPlan]:
    """Every tensor of the checkpoint in a fixed order, checked against `config`.

    Raises ModelError naming all missing, unexpected and misshapen tensors together.
    """
    expected = _expected_shapes(config)
    missing = sorted(expected.keys() - gguf.tensors.keys())
    unexpected = sorted(gguf.tensors.keys() - expected.keys() - {ROPE_FACTORS})
    misshapen = [
        f"{name} is {gguf.tensors[name].shape}, expected {shape}"
        for name, (_, shape) in expected.items()
        if name in gguf.tensors and gguf.tensors[name].shape != shape
    ]
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    ]
    if problems:
        raise ModelError(f"the tensors of {gguf.path} do not fit its metadata; {'; '.join(problems)}")

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    interleaved = architecture_of(gguf).interleaved_rope
    plan = []
    for name, (hf_name, _) in expected.items():
        module = name.split(".")[-2]
        reorder = interleaved and module in heads
        row_order = half_split_rows(heads[module], config["head_dim"]) if reorder else None
        plan.append(TensorPlan(hf_name, gguf.tensors[name], row_order))
    return plan


def write_checkpoint(gguf: GgufFile, target_dir: Path, dtype: str) -> None:
    """Writes config.json, generation_config.json and the weights into `target_dir`.

    Raises ModelError, before it writes anything, when the file cannot be expressed as a checkpoint.
    """
    config = checkpoint_config(gguf, dtype)
    plan = checkpoint_plan(gguf, config)
    write_json(target_dir / "config.json", config)
    write_json(target_dir / "generation_config.json", generation_config(gguf))
    tensors = [
        TensorSource(item.name, item.source.shape, lambda item=item: item.source.float32_chunks(item.row_order))
        for item in plan
    ]
    write_safetensors(target_dir / SINGLE_FILE, tensors, dtype)


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write: its name, its shape, and a function that yields its values in pieces along the first axis."""

    name: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[np.ndarray]]


def write_safetensors(path: Path, tensors: list[TensorSource], dtype: str) -> None:
    """Writes `tensors` in the given order as one file, holding one piece of one tensor in memory at a time.

    The layout is the format's: the length of the header (8 bytes, little-endian), the header as JSON, then the values.
    Raises ModelError for values that are not finite in `dtype`.
    """
    item_bytes = DTYPES[dtype].itemsize
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + item_bytes * math.prod(tensor.shape)
        header[tensor.name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the values are aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors:
            for chunk in tensor.chunks():
                file.write(_cast(chunk, dtype, tensor.name).tobytes())
        file.flush()
        os.fsync(file.fileno())
    written = path.stat().st_size
    assert written == 8 + len(encoded) + end, f"{path} has {written} bytes, expected {8 + len(encoded) + end}"


def _cast(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = values.astype(DTYPES[dtype], copy=False)
    if not np.isfinite(cast.astype(np.float32, copy=False)).all():
        if np.isfinite(values.astype(np.float32, copy=False)).all():
            raise ModelError(f"{name} has values beyond the range of {dtype}; convert to bfloat16 or float32")
        raise ModelError(f"{name} has values that are not finite (NaN or infinity); the source is damaged")
    return np.ascontiguousarray(cast)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")

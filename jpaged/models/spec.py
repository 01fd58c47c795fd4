"""What a model is, as a plain value: read from a checkpoint directory's config.json, or refused with the reason.

Nothing here imports jax. transformers (its configuration classes, which know every default and every historic spelling
of a setting) is imported only for a configuration that needs them, because importing it is slow.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jpaged.errors import ModelError

ACTIVATIONS = ("silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position parameters in the words of transformers' `rope_parameters`; `kind` is its `rope_type`."""

    kind: str
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """Everything that shapes the network. Hashable, so that it can be a static part of a jitted function.

    Sizes are in elements, positions and windows in tokens. `sliding_window` of W means that a token sees itself and
    the W - 1 tokens before it. `rope` is None for models with learned positions, whose table starts with
    `position_offset` rows that no position uses.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    activation: str
    tied_embeddings: bool
    rope: RopeSpec | None = None
    position_offset: int = 0
    embedding_size: int = 0  # 0: hidden_size; otherwise the embeddings are projected to and from hidden_size
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_affine: bool = True
    norm_before: bool = True
    final_norm: bool = True
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    checkpoint_dtype: str = "float32"

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied with before the softmax."""
        return self.head_dim**-0.5

    @property
    def embedding_width(self) -> int:
        """Columns of the embedding table."""
        return self.embedding_size or self.hidden_size


# Keys that say how a model was trained, made, named or sampled: no number of the network depends on them.
_HARMLESS_KEYS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path architectures
    attention_dropout attn_implementation bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    decoder_start_token_id diversity_penalty do_sample dropout dtype early_stopping encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id head_dim
    hidden_act hidden_size id2label init_std initializer_range intermediate_size is_encoder_decoder is_llama_config
    label2id layerdrop length_penalty max_length max_position_embeddings max_sequence_length max_window_layers
    min_length model_type no_repeat_ngram_size num_attention_heads num_beam_groups num_beams num_hidden_layers
    num_key_value_heads num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    rms_norm_eps rope_parameters rope_scaling rope_theta sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache vocab_size
    """.split()
)
_LLAMA_KEYS = frozenset({"attention_bias", "mlp_bias"})
_MISTRAL_KEYS = frozenset({"sliding_window"})
# Llama's and Mistral's settings, with the types that a complete configuration gives them.
_COMPLETE_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), (int,)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"), (int,)),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), (bool,)),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), (int, type(None))),
    "rms_norm_eps": (float,),
    "rope_theta": (int, float),
    "hidden_act": (str,),
    "torch_dtype": (str,),
}
_OPT_KEYS = frozenset(
    """
    _remove_final_layer_norm activation_function do_layer_norm_before enable_bias ffn_dim
    layer_norm_elementwise_affine word_embed_proj_dim
    """.split()
)
_ROPE_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        """factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim
        truncate""".split()
    ),
}


def load_spec(model_dir: str | Path) -> ModelSpec:
    """Reads `config.json` (and `generation_config.json`, for its end-of-sequence ids) of a checkpoint directory.

    Raises:
        ModelError: no readable config.json, an architecture we do not know, or a setting we do not implement.
    """
    model_dir = Path(model_dir)
    raw = _read_json(model_dir / "config.json")
    generation = _read_json(model_dir / "generation_config.json", missing_ok=True)
    return spec_from_config(raw, generation)


def spec_from_config(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    """The spec of a config.json given as a dict; raises ModelError as load_spec does."""
    architecture = _architecture_of(raw)
    reader = _READERS[architecture]
    unknown = {
        key: value
        for key, value in raw.items()
        if key not in _HARMLESS_KEYS | reader.keys
        and not key.startswith("transformers.")
        and value not in (None, False, [], {})
    }
    if unknown:
        settings = ", ".join(f"{key}={value!r}" for key, value in sorted(unknown.items()))
        raise ModelError(
            f"config.json sets {settings}, which jpaged does not implement for {architecture}; "
            "remove the key only if you know that it does not change the network"
        )
    config = _parse(reader.config_class, raw)
    spec = reader.read(architecture, config, _token_ids(config, generation or {}))
    _check(spec)
    return spec


def _architecture_of(raw: dict[str, Any]) -> str:
    # Older exporters leave the list of architectures out.
    names = raw.get("architectures") or [_BY_MODEL_TYPE.get(raw.get("model_type"))]
    if len(names) == 1 and names[0] in _READERS:
        return str(names[0])
    got = f"architectures {names}" if raw.get("architectures") else f"model_type {raw.get('model_type')!r}"
    raise ModelError(f"config.json names {got}, which jpaged does not know; it knows {', '.join(KNOWN_ARCHITECTURES)}")


def _is_not_about_pytorch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


def _complete_config(config_class: str, raw: dict[str, Any]) -> SimpleNamespace | None:
    """The configuration as it stands, if it leaves nothing to fill in and spells nothing in an old way, as those that
    jpaged writes: to import transformers takes a second."""
    types = dict(_COMPLETE_TYPES)
    if config_class == "MistralConfig":
        types |= {"sliding_window": (int, type(None))}
        del types["attention_bias"], types["mlp_bias"]
    elif config_class != "LlamaConfig":
        return None
    if any(key not in raw or type(raw[key]) not in expected for key, expected in types.items()):
        return None
    if raw.get("rope_scaling") or raw.get("rope_parameters") or "dtype" in raw:
        return None
    if raw["num_attention_heads"] < 1 or raw["hidden_size"] % raw["num_attention_heads"]:
        return None  # transformers has words for it
    rope = {"rope_type": "default", "rope_theta": float(raw["rope_theta"])}
    return SimpleNamespace(**raw | {"rope_parameters": rope, "dtype": raw["torch_dtype"]})


def _parse(config_class: str, raw: dict[str, Any]) -> Any:
    """Lets transformers' own class fill defaults and normalise old spellings."""
    if (complete := _complete_config(config_class, raw)) is not None:
        return complete
    # jpaged uses transformers' configuration classes only, so users need not hear that its models cannot run.
    logging.getLogger("transformers").addFilter(_is_not_about_pytorch)
    import transformers

    try:
        # transformers completes the dicts it is given in place: hand it a copy.
        return getattr(transformers, config_class).from_dict(json.loads(json.dumps(raw)))
    except Exception as error:  # its validation raises half a dozen unrelated types
        raise ModelError(f"config.json is not a valid {config_class}: {error}") from error


def _read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise ModelError(
            f"{path} does not exist; a model directory needs config.json, the tokenizer's files and the weights"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def _token_ids(config: Any, generation: dict[str, Any]) -> dict[str, Any]:
    """End-of-sequence ids are the union of both files: chat models often add theirs in only one of them."""
    eos: list[int] = []
    for value in (generation.get("eos_token_id"), config.eos_token_id):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and token not in eos:
                eos.append(int(token))
    bos = generation.get("bos_token_id", config.bos_token_id)
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return {"eos_token_ids": tuple(eos), "bos_token_id": bos, "checkpoint_dtype": dtype}


def _read_rope(config: Any) -> RopeSpec:
    parameters = dict(config.rope_parameters or {})
    kind = parameters.pop("rope_type", None) or parameters.get("type") or "default"
    parameters.pop("type", None)
    theta = parameters.pop("rope_theta", None)
    if kind not in _ROPE_KEYS:
        raise ModelError(
            f"config.json asks for rope type {kind!r}, which jpaged does not implement; "
            f"it implements {', '.join(sorted(_ROPE_KEYS))}"
        )
    if parameters.get("partial_rotary_factor") == 1.0:
        del parameters["partial_rotary_factor"]
    unknown = {key: value for key, value in parameters.items() if key not in _ROPE_KEYS[kind] and value is not None}
    # Recent transformers write the trained length beside every rope type; only some types use it.
    if kind in ("default", "linear"):
        unknown.pop("original_max_position_embeddings", None)
    if unknown:
        raise ModelError(f"config.json sets {unknown} for rope type {kind!r}, which jpaged does not implement")
    needed = [key for key in ("factor", "low_freq_factor", "high_freq_factor") if key in _ROPE_KEYS[kind]]
    missing = [key for key in needed if parameters.get(key) is None] + ([] if theta else ["rope_theta"])
    if missing:
        raise ModelError(f"config.json lacks {', '.join(missing)} for rope type {kind!r}")
    renamed = {"original_max_position_embeddings": "original_max_position"}
    values = {
        renamed.get(str(key), str(key)): value
        for key, value in parameters.items()
        if key in _ROPE_KEYS[kind] and value is not None
    }
    return RopeSpec(kind=kind, theta=float(theta), **values)


def _read_llama(architecture: str, config: Any, tokens: dict[str, Any]) -> ModelSpec:
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        tied_embeddings=config.tie_word_embeddings,
        rope=_read_rope(config),
        attention_bias=getattr(config, "attention_bias", False),
        mlp_bias=getattr(config, "mlp_bias", False),
        sliding_window=config.sliding_window if architecture == "MistralForCausalLM" else None,
        **tokens,
    )


def _read_opt(architecture: str, config: Any, tokens: dict[str, Any]) -> ModelSpec:
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_dim,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        max_position=config.max_position_embeddings,
        norm_eps=1e-5,  # OPT's layer norms use torch's default; the config has no key for it
        activation=config.activation_function,
        tied_embeddings=config.tie_word_embeddings,
        position_offset=2,
        embedding_size=0 if config.word_embed_proj_dim == config.hidden_size else config.word_embed_proj_dim,
        attention_bias=config.enable_bias,
        mlp_bias=config.enable_bias,
        norm_affine=config.layer_norm_elementwise_affine,
        norm_before=config.do_layer_norm_before,
        final_norm=config.do_layer_norm_before and not config._remove_final_layer_norm,
        **tokens,
    )


def _check(spec: ModelSpec) -> None:
    """Refuses what the layers cannot compute."""
    if spec.activation not in ACTIVATIONS:
        raise ModelError(
            f"config.json asks for activation {spec.activation!r}, which jpaged does not implement; "
            f"it implements {', '.join(ACTIVATIONS)}"
        )
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} KV heads evenly")
    if spec.rope is not None and spec.head_dim % 2:
        raise ModelError(f"rotary positions need an even head size, got {spec.head_dim}")
    if spec.rope is None and spec.head_dim * spec.num_heads != spec.hidden_size:
        raise ModelError(f"hidden size {spec.hidden_size} is not a multiple of {spec.num_heads} attention heads")
    if spec.sliding_window is not None and spec.sliding_window < 1:
        raise ModelError(f"sliding_window must be at least 1 token or null, got {spec.sliding_window}")
    if spec.checkpoint_dtype not in WEIGHT_DTYPES:
        raise ModelError(f"config.json names dtype {spec.checkpoint_dtype!r}; jpaged reads {', '.join(WEIGHT_DTYPES)}")


@dataclass(frozen=True)
class _Reader:
    config_class: str
    keys: frozenset[str]
    read: Callable[[str, Any, dict[str, Any]], ModelSpec]


_READERS = {
    "LlamaForCausalLM": _Reader("LlamaConfig", _LLAMA_KEYS, _read_llama),
    "MistralForCausalLM": _Reader("MistralConfig", _MISTRAL_KEYS, _read_llama),
    "OPTForCausalLM": _Reader("OPTConfig", _OPT_KEYS, _read_opt),
}
_BY_MODEL_TYPE: dict[Any, str] = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "opt": "OPTForCausalLM"}
KNOWN_ARCHITECTURES = tuple(sorted(_READERS))

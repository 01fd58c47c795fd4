"""config.json -> ModelSpec: what is read, and what is refused rather than ignored."""

import json
import subprocess
import sys

import pytest

import jpaged.models.spec
from jpaged.errors import ModelError
from jpaged.models.spec import KNOWN_ARCHITECTURES, RopeSpec, _complete_config, load_spec, spec_from_config
from tests.fakes.tiny_models import TINY_LLAMA, TINY_MISTRAL, TINY_OPT


def test_llama_fields():
    spec = spec_from_config(TINY_LLAMA)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 8, 4, 8)
    assert (spec.queries_per_kv, spec.attention_scale) == (2, 8**-0.5)
    assert (spec.activation, spec.tied_embeddings, spec.sliding_window) == ("silu", True, None)
    assert spec.rope == RopeSpec("default", 10000.0)
    assert (spec.bos_token_id, spec.eos_token_ids, spec.max_position) == (1, (2,), 512)
    hash(spec)


def test_opt_fields():
    spec = spec_from_config(TINY_OPT)
    assert (spec.rope, spec.position_offset, spec.num_kv_heads, spec.intermediate_size) == (None, 2, 4, 96)
    assert (spec.attention_bias, spec.mlp_bias, spec.norm_before, spec.final_norm) == (True, True, True, True)
    narrow = spec_from_config(TINY_OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False})
    assert (narrow.embedding_width, narrow.norm_before, narrow.final_norm) == (32, False, False)


def test_defaults_come_from_the_configuration_class():
    minimal = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    spec = spec_from_config(minimal)
    assert (spec.sliding_window, spec.num_kv_heads, spec.hidden_size, spec.tied_embeddings) == (4096, 8, 4096, False)


def test_model_type_stands_in_for_missing_architectures():
    config = {key: value for key, value in TINY_LLAMA.items() if key != "architectures"}
    assert spec_from_config(config).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ],
)
def test_every_spelling_of_rope_scaling(rope):
    assert spec_from_config(TINY_LLAMA | rope).rope == RopeSpec("linear", 10000.0, factor=4.0)


def test_rope_details_are_kept():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    rope = spec_from_config(TINY_LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling}).rope
    assert rope == RopeSpec("llama3", 5e5, 8.0, 128, 1.0, 4.0)


def test_the_trained_length_defaults_to_max_position():
    rope = spec_from_config(TINY_LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}).rope
    assert rope is not None
    assert rope.original_max_position == 512


def test_eos_ids_are_the_union_of_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9], "bos_token_id": 5}))
    spec = load_spec(tmp_path)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((7, 2, 9), 5)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, MistralForCausalLM, OPTFor"),
        (TINY_LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'.*llama3"),
        (TINY_LLAMA | {"rope_scaling": {"rope_type": "made_up"}}, "rope type 'made_up'"),
        (TINY_LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        (TINY_LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 3}}, "wobble"),
        (TINY_LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (TINY_LLAMA | {"hidden_act": "relu6"}, "activation 'relu6'.*silu"),
        (TINY_OPT | {"activation_function": "quick_gelu"}, "quick_gelu"),
        (TINY_LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (TINY_LLAMA | {"sliding_window": 8}, "sliding_window=8"),
        (TINY_LLAMA | {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
        (TINY_MISTRAL | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (TINY_MISTRAL | {"sliding_window": 0}, "sliding_window"),
        (TINY_LLAMA | {"num_key_value_heads": 3}, "8 attention heads.*3 KV heads"),
        (TINY_LLAMA | {"head_dim": 7}, "even"),
        (TINY_OPT | {"num_attention_heads": 5}, "multiple"),
        (TINY_LLAMA | {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn.*bfloat16"),
        (TINY_LLAMA | {"hidden_size": "wide"}, "LlamaConfig"),
    ],
)
def test_what_is_not_implemented_is_refused(config, says):
    with pytest.raises(ModelError, match=says):
        spec_from_config(config)


def test_harmless_keys_are_no_reason_to_refuse():
    extra = {"_name_or_path": "x", "transformers.js_config": {"a": 1}, "rope_interleaved": False, "pretraining_tp": 1}
    assert spec_from_config(TINY_LLAMA | extra) == spec_from_config(TINY_LLAMA)


COMPLETE = {key: value for key, value in TINY_LLAMA.items() if key != "dtype"} | {
    "attention_bias": True,
    "bos_token_id": None,
    "eos_token_id": 3,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "mlp_bias": True,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
WINDOWED = {key: value for key, value in COMPLETE.items() if key not in ("attention_bias", "mlp_bias")} | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 9,
}


@pytest.mark.parametrize("config", [COMPLETE, WINDOWED, WINDOWED | {"sliding_window": None}], ids=str)
def test_a_complete_configuration_means_what_it_means_to_transformers(config, monkeypatch):
    assert _complete_config(f"{config['model_type'].capitalize()}Config", config) is not None
    spec = spec_from_config(config)
    monkeypatch.setattr(jpaged.models.spec, "_complete_config", lambda *_: None)
    assert spec_from_config(config) == spec


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"dtype": "float32"},
        {"hidden_size": "wide"},
        {"vocab_size": True},
        {"num_attention_heads": 7},
        {"num_attention_heads": 0},
        {"eos_token_id": [2, 3]},
        {"rms_norm_eps": 1},
    ],
    ids=str,
)
def test_anything_unusual_is_left_to_transformers(change):
    assert _complete_config("LlamaConfig", COMPLETE | change) is None
    assert _complete_config("OPTConfig", COMPLETE) is None
    for key in change.keys() & COMPLETE.keys() - {"rope_scaling"}:
        assert _complete_config("LlamaConfig", {name: COMPLETE[name] for name in COMPLETE if name != key}) is None


def test_a_complete_configuration_needs_no_transformers():
    code = f"from jpaged.models.spec import spec_from_config; import sys; spec_from_config({COMPLETE})"
    out = subprocess.run([sys.executable, "-c", f"{code}; print('transformers' in sys.modules)"],
                         capture_output=True, text=True, check=True)  # fmt: skip
    assert out.stdout.strip() == "False"


def test_unreadable_directories(tmp_path):
    with pytest.raises(ModelError, match=r"config.json does not exist"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a list"):
        load_spec(tmp_path)


def test_reading_a_spec_is_cheap_to_import():
    code = "import jpaged.models.spec, sys; print([m for m in ('jax', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_registry_knows_the_same_architectures():
    from jpaged.models.registry import ARCHITECTURES

    assert tuple(sorted(ARCHITECTURES)) == KNOWN_ARCHITECTURES

"""GGUF files: dequantised values, rotary order, configurations, and what is said of files that do not fit."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jpaged.errors import ModelError
from jpaged.weights.gguf_names import (
    checkpoint_config,
    checkpoint_plan,
    generation_config,
    half_split_rows,
    llama3_factors,
)
from jpaged.weights.gguf_reader import GgufTensor, read_gguf
from tests.engine.gguf_files import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, TinyGguf


def read_values(path: Path, chunk_bytes: int = 1 << 20) -> dict[str, np.ndarray]:
    """Checkpoint name -> values, through the whole reader."""
    gguf = read_gguf(path)
    plan = checkpoint_plan(gguf, checkpoint_config(gguf, "float32"))
    return {item.name: np.concatenate(list(item.source.float32_chunks(item.row_order, chunk_bytes))) for item in plan}


def test_q8_0_blocks_are_scale_times_integers() -> None:
    quants = np.arange(-16, 16, dtype=np.int8)
    block = np.frombuffer(np.float16(0.25).tobytes() + quants.tobytes(), np.uint8)
    tensor = GgufTensor("x", (2, 32), GGMLQuantizationType.Q8_0, np.stack([block, block]))
    (values,) = tensor.float32_chunks()
    np.testing.assert_array_equal(values, np.stack([0.25 * quants.astype(np.float32)] * 2))


def test_q4_1_blocks_are_scale_times_nibbles_plus_minimum() -> None:
    low, high = np.arange(16), np.arange(15, -1, -1)
    packed = (low | (high << 4)).astype(np.uint8)
    block = np.frombuffer(np.float16(0.5).tobytes() + np.float16(-3.0).tobytes() + packed.tobytes(), np.uint8)
    tensor = GgufTensor("x", (1, 32), GGMLQuantizationType.Q4_1, block[None])
    (values,) = tensor.float32_chunks()
    np.testing.assert_array_equal(values[0], 0.5 * np.concatenate([low, high]) - 3.0)


def test_a_storage_type_without_dequantisation_is_named() -> None:
    tensor = GgufTensor("x", (4,), GGMLQuantizationType.I32, np.zeros(4, np.int32))
    with pytest.raises(ModelError, match="tensor x is stored as I32"):
        list(tensor.float32_chunks())


@pytest.mark.parametrize("storage", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_values_shapes_and_rotary_order_come_back(tmp_path: Path, storage: str, tied: bool) -> None:
    tiny = TinyGguf(tied=tied, storage=GGMLQuantizationType[storage])
    found = read_values(tiny.write(tmp_path / "m.gguf"))
    weights = tiny.weights()
    assert len(found) == len(weights) == 2 + (not tied) + 9 * LAYERS
    assert ("lm_head.weight" in found) == (not tied)
    for name, module in (("model.embed_tokens.weight", "token_embd"), ("model.norm.weight", "output_norm")):
        np.testing.assert_array_equal(found[name], tiny.stored(weights[f"{module}.weight"]))
    for layer in range(LAYERS):
        for name, module in (
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ):
            expected = tiny.stored(weights[f"blk.{layer}.{module}.weight"])
            np.testing.assert_array_equal(found[f"model.layers.{layer}.{name}.weight"], expected)


def test_biases_move_with_their_rows(tmp_path: Path) -> None:
    tiny = TinyGguf(biased=True)
    found, weights = read_values(tiny.write(tmp_path / "m.gguf")), tiny.weights()
    for name, module in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("o_proj", "attn_output")):
        expected = weights[f"blk.1.{module}.bias"]
        np.testing.assert_array_equal(found[f"model.layers.1.self_attn.{name}.bias"], expected)


def test_small_pieces_join_to_the_same_values(tmp_path: Path) -> None:
    path = TinyGguf(storage=GGMLQuantizationType.Q8_0).write(tmp_path / "m.gguf")
    whole, pieces = read_values(path), read_values(path, chunk_bytes=3 * 4 * HIDDEN)
    assert whole.keys() == pieces.keys()
    assert all(np.array_equal(whole[name], pieces[name]) for name in whole)
    embedding = read_gguf(path).tensors["token_embd.weight"]
    assert [len(chunk) for chunk in embedding.float32_chunks(chunk_bytes=16 * 4 * HIDDEN)] == [16, 16, 8]


def test_half_split_rows_turn_pairs_into_halves() -> None:
    # Two heads of four dimensions, stored as x0 y0 x1 y1.
    assert half_split_rows(2, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_config_says_what_the_metadata_says(tmp_path: Path) -> None:
    gguf = read_gguf(TinyGguf().write(tmp_path / "m.gguf"))
    config = checkpoint_config(gguf, "bfloat16")
    expected = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "head_dim": HEAD_DIM,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": 40,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "rope_scaling": None,
        "tie_word_embeddings": True, "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert generation_config(gguf) == {"bos_token_id": 1, "eos_token_id": 2}


def test_every_token_that_ends_a_turn_ends_generation(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    gguf = read_gguf(TinyGguf(metadata=metadata).write(tmp_path / "m.gguf"))
    assert generation_config(gguf)["eos_token_id"] == [2, 0]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 8.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_rope_scaling_from_metadata(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any] | None) -> None:
    gguf = read_gguf(TinyGguf(metadata=metadata).write(tmp_path / "m.gguf"))
    assert checkpoint_config(gguf, "float32")["rope_scaling"] == expected


def test_unknown_rope_scaling_is_named(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 8.0}
    with pytest.raises(ModelError, match="longrope"):
        checkpoint_config(read_gguf(TinyGguf(metadata=metadata).write(tmp_path / "m.gguf")), "float32")


def test_llama3_factors_keep_high_frequencies_and_stretch_low_ones() -> None:
    factors = llama3_factors(128, 500000.0, 8.0, 1.0, 4.0, 8192)
    assert factors[0] == 1.0 and factors[-1] == 8.0
    wavelength = 2 * np.pi * 500000.0 ** (2 * 32 / 128)  # 4443: between 8192 / 4 and 8192 / 1
    smooth = (8192 / wavelength - 1) / 3
    assert factors[32] == pytest.approx(1 / ((1 - smooth) / 8 + smooth))
    assert (np.diff(factors) >= 0).all()


def test_llama3_scaling_is_recognised_by_its_factors(tmp_path: Path) -> None:
    metadata = {"llama.rope.freq_base": 500000.0}
    factors = llama3_factors(HEAD_DIM, 500000.0, 32.0, 1.0, 4.0, 8192).astype(np.float32)
    path = TinyGguf(metadata=metadata).write(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    assert checkpoint_config(read_gguf(path), "float32")["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in read_values(path))
    odd = TinyGguf(metadata=metadata).write(tmp_path / "odd.gguf", extra={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(ModelError, match="rotary frequency factors"):
        checkpoint_config(read_gguf(odd), "float32")


def test_a_window_makes_it_a_mistral(tmp_path: Path) -> None:
    gguf = read_gguf(TinyGguf(metadata={"llama.attention.sliding_window": 32}).write(tmp_path / "m.gguf"))
    config = checkpoint_config(gguf, "float32")
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 32)


def test_unknown_architecture_names_it_and_the_known_ones(tmp_path: Path) -> None:
    gguf = read_gguf(TinyGguf(architecture="mamba").write(tmp_path / "m.gguf"))
    with pytest.raises(ModelError, match=r"'mamba'.*\['llama'\]"):
        checkpoint_config(gguf, "float32")


def test_all_missing_metadata_is_reported_together(tmp_path: Path) -> None:
    tiny = TinyGguf(metadata={"llama.block_count": None, "llama.context_length": None})
    with pytest.raises(ModelError, match=r"llama\.context_length.*|llama\.block_count.*") as error:
        checkpoint_config(read_gguf(tiny.write(tmp_path / "m.gguf")), "float32")
    assert "llama.block_count" in str(error.value) and "llama.context_length" in str(error.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.rope.dimension_count": HEAD_DIM // 2}, "rotates 8 of the 16"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs between layers"),
        ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count is 0, expected a positive integer"),
        ({"llama.block_count": "two"}, r"llama\.block_count is 'two'"),
    ],
)
def test_metadata_that_cannot_be_expressed_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        checkpoint_config(read_gguf(TinyGguf(metadata=metadata).write(tmp_path / "m.gguf")), "float32")


def test_equal_per_layer_values_are_one_value(tmp_path: Path) -> None:
    tiny = TinyGguf(metadata={"llama.attention.head_count_kv": [KV_HEADS] * LAYERS})
    config = checkpoint_config(read_gguf(tiny.write(tmp_path / "m.gguf")), "float32")
    assert config["num_key_value_heads"] == KV_HEADS


def test_missing_unexpected_and_misshapen_tensors_are_reported_together(tmp_path: Path) -> None:
    path = TinyGguf(metadata={"llama.feed_forward_length": INNER + 32}).write(
        tmp_path / "m.gguf", drop=("blk.1.attn_v.weight",), extra={"blk.0.surprise.weight": np.zeros(4, np.float32)}
    )
    gguf = read_gguf(path)
    with pytest.raises(ModelError) as error:
        checkpoint_plan(gguf, checkpoint_config(gguf, "float32"))
    message = str(error.value)
    assert "missing: blk.1.attn_v.weight" in message
    assert "unexpected: blk.0.surprise.weight" in message
    assert f"blk.0.ffn_up.weight is ({INNER}, {HIDDEN}), expected ({INNER + 32}, {HIDDEN})" in message


@pytest.mark.parametrize("kept", [0.02, 0.3, 0.6, 0.999])
def test_a_file_cut_short_is_a_model_error(tmp_path: Path, kept: float) -> None:
    whole = TinyGguf().write(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(ModelError, match=r"cut\.gguf \(\d+ bytes\) is damaged or cut short"):
        read_gguf(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b"\x00" * 64])
def test_another_file_is_not_a_gguf_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"other\.gguf is not a GGUF file"):
        read_gguf(path)


@pytest.mark.parametrize("version", [1, 99])
def test_an_unknown_version_is_a_model_error(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(ModelError, match=f"version {version}"):
        read_gguf(path)


def test_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read_gguf(tmp_path / "absent.gguf")


def test_one_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    path = TinyGguf(metadata={"split.count": 3}).write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="one of 3 parts"):
        read_gguf(path)

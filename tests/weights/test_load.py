"""Checkpoint directories: every format and alias that is read, every fault that is reported."""

import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from jpaged.errors import ModelError
from jpaged.models.spec import load_spec, spec_from_config
from jpaged.parallel.mesh import make_mesh
from jpaged.parallel.sharding import parameter_paths
from jpaged.weights.load import load_weights
from jpaged.weights.orbax import save_orbax
from jpaged.weights.placement import weight_bytes
from tests.fakes.tiny_models import TINY_LLAMA, TINY_OPT, random_tensors, write_checkpoint, write_random_checkpoint


def _load(model_dir, dtype=jnp.float32, tensor_parallel_size=1):
    return load_weights(model_dir, load_spec(model_dir), dtype, make_mesh(tensor_parallel_size))


def _arrays(model):
    return {path: np.asarray(parameter.get_value()) for path, parameter in parameter_paths(model).items()}


def _assert_same(left, right):
    left, right = _arrays(left), _arrays(right)
    assert list(left) == list(right)
    for path in left:
        np.testing.assert_array_equal(left[path], right[path], err_msg=path)


def test_every_part_lands_in_its_place(tmp_path):
    config = TINY_LLAMA | {"attention_bias": True, "mlp_bias": True}
    tensors = random_tensors(config, 0)
    arrays = _arrays(_load(write_checkpoint(config, tensors, tmp_path)))
    prefix = "model.layers.1."
    for kind, rest in (("weight", (64,)), ("bias", ())):
        qkv = arrays[f"layers.attention.qkv.{kind}"][1].reshape(4, 4, 8, *rest)  # KV head, (2 q, k, v), row
        q = tensors[f"{prefix}self_attn.q_proj.{kind}"].reshape(4, 2, 8, *rest)
        np.testing.assert_array_equal(qkv[:, :2], q)
        np.testing.assert_array_equal(qkv[:, 2], tensors[f"{prefix}self_attn.k_proj.{kind}"].reshape(4, 8, *rest))
        np.testing.assert_array_equal(qkv[:, 3], tensors[f"{prefix}self_attn.v_proj.{kind}"].reshape(4, 8, *rest))
        gate_up = arrays[f"layers.mlp.gate_up.{kind}"][1].reshape(4, 2, 24, *rest)
        np.testing.assert_array_equal(gate_up[:, 0], tensors[f"{prefix}mlp.gate_proj.{kind}"].reshape(4, 24, *rest))
        np.testing.assert_array_equal(gate_up[:, 1], tensors[f"{prefix}mlp.up_proj.{kind}"].reshape(4, 24, *rest))
    np.testing.assert_array_equal(arrays["layers.mlp.down.weight"][1], tensors[f"{prefix}mlp.down_proj.weight"])
    np.testing.assert_array_equal(arrays["norm.weight"], tensors["model.norm.weight"])


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
def test_stored_dtypes_are_converted_once(stored, tmp_path):
    tensors = random_tensors(TINY_LLAMA, 0)
    model_dir = write_checkpoint(TINY_LLAMA, {name: t.astype(stored) for name, t in tensors.items()}, tmp_path)
    down = _arrays(_load(model_dir))["layers.mlp.down.weight"][0]
    assert down.dtype == np.float32
    np.testing.assert_array_equal(down, tensors["model.layers.0.mlp.down_proj.weight"].astype(stored))
    narrow = _arrays(_load(model_dir, jnp.bfloat16))
    assert narrow["layers.mlp.down.weight"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow["layers.mlp.down.weight"][0], down.astype(ml_dtypes.bfloat16))
    # Norms are never narrower than they were stored.
    np.testing.assert_array_equal(narrow["norm.weight"], tensors["model.norm.weight"].astype(stored))


def test_shards_equal_a_single_file(tmp_path):
    single = write_random_checkpoint(TINY_OPT, tmp_path / "single")
    sharded = _write_sharded(TINY_OPT, tmp_path / "sharded")
    _assert_same(_load(single), _load(sharded))


def _write_sharded(config, target):
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config, 0)
    weight_map = {}
    for shard in range(2):
        file_name = f"model-{shard + 1:05}-of-00002.safetensors"
        part = dict(list(tensors.items())[shard::2])
        save_file(part, target / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


@pytest.mark.parametrize(
    ("config", "prefix"), [(TINY_LLAMA, "model."), (TINY_OPT, "model."), (TINY_OPT, "model.decoder.")]
)
def test_prefixes_may_be_missing(config, prefix, tmp_path):
    tensors = random_tensors(config, 0)
    bare = write_checkpoint(config, {n.removeprefix(prefix): t for n, t in tensors.items()}, tmp_path / "bare")
    _assert_same(_load(bare), _load(write_checkpoint(config, tensors, tmp_path / "full")))


def test_harmless_tensors_and_a_tied_head_are_left_out(tmp_path):
    tensors = random_tensors(TINY_LLAMA, 0)
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "lm_head.weight": tensors["model.embed_tokens.weight"],
    }
    _assert_same(
        _load(write_checkpoint(TINY_LLAMA, tensors | more, tmp_path / "more")),
        _load(write_checkpoint(TINY_LLAMA, tensors, tmp_path / "plain")),
    )


def test_all_faults_are_reported_together(tmp_path):
    tensors = random_tensors(TINY_LLAMA | {"tie_word_embeddings": False}, 0)
    del tensors["lm_head.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.router.weight"] = np.ones((2, 2), np.float32)
    tensors["model.norm.weight"] = np.ones(63, np.float32)
    tensors["norm.weight"] = np.ones(64, np.float32)
    model_dir = write_checkpoint(TINY_LLAMA | {"tie_word_embeddings": False}, tensors, tmp_path)
    with pytest.raises(ModelError) as error:
        _load(model_dir)
    for part in (
        "2 missing: model.layers.1.mlp.up_proj.weight, lm_head.weight",
        "2 unexpected: model.layers.0.mlp.router.weight, norm.weight (the same tensor as model.norm.weight)",
        "1 of another shape: model.norm.weight is [63], expected [64]",
    ):
        assert part in str(error.value)


def test_quantised_tensors_are_refused(tmp_path):
    tensors = random_tensors(TINY_LLAMA, 0)
    tensors["model.norm.weight"] = np.ones(64, np.int8)
    with pytest.raises(ModelError, match=r"model.norm.weight.*I8.*quantised"):
        _load(write_checkpoint(TINY_LLAMA, tensors, tmp_path))


def test_overflow_of_float16_is_refused(tmp_path):
    tensors = random_tensors(TINY_LLAMA, 0)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = 1e6
    model_dir = write_checkpoint(TINY_LLAMA, tensors, tmp_path)
    with pytest.raises(ModelError, match=r"layers.1.mlp.down_proj.weight.*float16.*bfloat16"):
        _load(model_dir, jnp.float16)
    _load(model_dir, jnp.bfloat16)


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_truncated_files_are_refused(keep, tmp_path):
    model_dir = write_random_checkpoint(TINY_LLAMA, tmp_path)
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model.safetensors is not a complete safetensors file"):
        _load(model_dir)


def test_faulty_indexes_are_refused(tmp_path):
    model_dir = _write_sharded(TINY_LLAMA, tmp_path / "sharded")
    index = model_dir / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def write(weight_map):
        index.write_text(json.dumps({"weight_map": weight_map}))

    first = "model-00001-of-00002.safetensors"
    write(good["weight_map"] | {"extra.weight": first})
    with pytest.raises(ModelError, match=r"disagree: only in the index \['extra.weight'\]"):
        _load(model_dir)
    write({name: file for name, file in good["weight_map"].items() if name != "model.norm.weight"})
    with pytest.raises(ModelError, match=r"only in the file \['model.norm.weight'\]"):
        _load(model_dir)
    write(good["weight_map"] | {"extra.weight": "../other.safetensors"})
    with pytest.raises(ModelError, match="not a plain file name"):
        _load(model_dir)
    index.write_text("{}")
    with pytest.raises(ModelError, match="not a safetensors index"):
        _load(model_dir)
    write(good["weight_map"])
    (model_dir / first).unlink()
    with pytest.raises(ModelError, match=f"{first} does not exist"):
        _load(model_dir)


def test_directories_without_readable_weights(tmp_path):
    spec = spec_from_config(TINY_LLAMA)
    with pytest.raises(ModelError, match="holds no weights"):
        load_weights(tmp_path, spec, jnp.float32, make_mesh(1))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"pytorch_model.bin.*safe_serialization=True"):
        load_weights(tmp_path, spec, jnp.float32, make_mesh(1))
    with pytest.raises(ModelError, match="not a directory"):
        load_weights(tmp_path / "absent", spec, jnp.float32, make_mesh(1))


def test_weight_bytes_are_those_of_the_loaded_arrays(tmp_path):
    model_dir = write_random_checkpoint(TINY_OPT, tmp_path)
    for dtype in (jnp.float32, jnp.bfloat16):
        loaded = sum(array.nbytes for array in _arrays(_load(model_dir, dtype)).values())
        assert weight_bytes(load_spec(model_dir), dtype) == loaded


def test_orbax_round_trip(tmp_path):
    source = write_random_checkpoint(TINY_LLAMA | {"torch_dtype": "float32"}, tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    target = tmp_path / "target"
    save_orbax(source, target)
    assert {path.name for path in target.iterdir()} == {"config.json", "tokenizer.json", "orbax"}
    for dtype in (jnp.float32, jnp.bfloat16):
        _assert_same(_load(target, dtype), _load(source, dtype))
    split = _load(target, tensor_parallel_size=4)
    assert split.layers.attention.qkv.weight.get_value().sharding.spec == P(None, "tensor", None, None)
    _assert_same(split, _load(source))
    with pytest.raises(ModelError, match="already exists"):
        save_orbax(source, target)


def test_orbax_can_narrow_the_weights(tmp_path):
    source = write_random_checkpoint(TINY_OPT, tmp_path / "source")
    save_orbax(source, tmp_path / "target", "bfloat16")
    assert load_spec(tmp_path / "target").checkpoint_dtype == "bfloat16"
    _assert_same(_load(tmp_path / "target", jnp.bfloat16), _load(source, jnp.bfloat16))


def test_orbax_faults(tmp_path):
    source = write_random_checkpoint(TINY_LLAMA, tmp_path / "source")
    target = tmp_path / "target"
    save_orbax(source, target)
    other = TINY_LLAMA | {"tie_word_embeddings": False, "intermediate_size": 64}
    (target / "config.json").write_text(json.dumps(other))
    with pytest.raises(ModelError, match=r"1 missing: head.weight; 2 of another shape: layers.mlp.down.weight is"):
        _load(target)
    (target / "config.json").write_text(json.dumps(TINY_LLAMA))
    shutil.rmtree(target / "orbax")
    (target / "orbax").mkdir()
    with pytest.raises(ModelError, match="not a complete Orbax checkpoint"):
        _load(target)

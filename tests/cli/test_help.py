"""The help of every command renders and mentions every option."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from jpaged.cli.app import app
from jpaged.config import EngineConfig
from jpaged.params import SamplingParams

ROOT: Any = typer.main.get_command(app)


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


@pytest.mark.parametrize("path", [path for path, _ in commands(ROOT)], ids=" ".join)
def test_help_mentions_everything(run, path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    command = dict(commands(ROOT))[path]
    result = run(*path, "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    shown = set(re.findall(r"--[a-z][a-z-]*", result.stdout))
    options = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert {flag for flag in options if flag.startswith("--")} <= shown
    assert all(parameter.help for parameter in command.params if parameter.name != "help")
    assert command.help
    for name in getattr(command, "commands", {}):
        assert re.search(rf"│ {name}\b", result.stdout)


def test_there_is_an_option_for_every_field_of_the_engine():
    fields = set(EngineConfig.__dataclass_fields__) - {"model", "seed"} | {"engine_seed"}
    for path in (("serve",), ("generate",), ("chat",), ("batch",)):
        assert fields <= {parameter.name for parameter in dict(commands(ROOT))[path].params}


def test_sampling_options_are_fields_of_sampling_params():
    names = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"}
    assert names <= set(SamplingParams.__dataclass_fields__)
    for path in (("generate",), ("chat",), ("client", "generate"), ("client", "chat")):
        assert names <= {parameter.name for parameter in dict(commands(ROOT))[path].params}


def test_without_a_command_the_commands_are_listed(run):
    result = run()
    assert result.exit_code == 2
    assert all(name in result.stdout + result.stderr for name in ROOT.commands)

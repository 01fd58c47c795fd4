"""The help of every command renders and mentions every option."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from jpaged.cli.app import app
from jpaged.config import EngineConfig
from jpaged.params import BeamSearchParams, SamplingParams, StructuredOutputs

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
    """There is an option for every field that makes sense: a terminal is no stream, and a conversation has one answer
    at a time, which is text."""
    names = set(SamplingParams.__dataclass_fields__) - {"output_kind", "structured_outputs"}
    names |= set(StructuredOutputs.__dataclass_fields__)
    only_whole_answers = {"n", "logprobs", "prompt_logprobs", "detokenize"}
    beams = set(BeamSearchParams.__dataclass_fields__)
    for path, expected in (
        (("generate",), names | beams),
        (("client", "generate"), names | beams),
        (("chat",), names - only_whole_answers),
        (("client", "chat"), names - only_whole_answers),
    ):
        assert expected <= {parameter.name for parameter in dict(commands(ROOT))[path].params}


def test_the_help_of_many_options_comes_in_panels(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    for path in (("generate",), ("client", "chat")):
        panels = re.findall(r"^╭─ ([^─]+) ─", run(*path, "--help").stdout, re.MULTILINE)
        assert {"Options", "Sampling", "What may be drawn", "Structured output", "When it ends"} <= set(panels)
        assert len(panels) == len(set(panels))


def test_without_a_command_the_commands_are_listed(run):
    result = run()
    assert result.exit_code == 2
    assert all(name in result.stdout + result.stderr for name in ROOT.commands)

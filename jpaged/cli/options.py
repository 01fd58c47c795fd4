"""Command line options that several commands share, declared once."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from jpaged.config import DTYPES, POLICIES, PREEMPTIONS, EngineConfig
from jpaged.errors import InvalidRequestError
from jpaged.params import BeamSearchParams, Params, SamplingParams

MODEL_HELP = "A model directory, an Orbax checkpoint, a .gguf file, a hub id, or `demo`."


@dataclass(frozen=True)
class _Option:
    type: Any
    default: Any
    help: str
    flag: str | None = None


_ENGINE_OPTIONS = {
    "dtype": _Option(str, "auto", f"Of weights, activations and pages: {', '.join(DTYPES)}."),
    "max_model_len": _Option(int | None, None, "Longest sequence in tokens, prompt and output. Default: the model's."),
    "max_num_seqs": _Option(int, 64, "Most sequences in one step."),
    "max_num_batched_tokens": _Option(int, 512, "Token budget of one step."),
    "page_size": _Option(int | None, None, "Tokens per page. Default: 16; on TPU 128."),
    "num_pages": _Option(int | None, None, "Pages in the pool. Default: sized by --kv-memory-fraction."),
    "kv_memory_fraction": _Option(
        float | None, None, "Share of the memory beside the weights for pages. Default: 0.9; on a CPU 0.2."
    ),
    "enable_prefix_caching": _Option(
        bool, True, "Use pages again for requests that begin the same.", "--prefix-caching/--no-prefix-caching"
    ),
    "host_tier_gib": _Option(float, 0.0, "Host memory for pages that leave the device, in GiB."),
    "max_pinned_fraction": _Option(float, 0.5, "Share of the pool that pinned prefixes may take."),
    "preemption": _Option(str, "auto", f"How a sequence gives way: {', '.join(PREEMPTIONS)}."),
    "policy": _Option(str, "fcfs", f"Who runs next: {', '.join(POLICIES)}."),
    "overlap": _Option(bool, True, "Plan the next step while the device runs this one.", "--overlap/--no-overlap"),
    "engine_seed": _Option(int | None, None, "Seeds the requests that bring no seed. Default: fresh."),
    "tensor_parallel_size": _Option(int, 1, "Devices that share each layer."),
}
_SAMPLING_OPTIONS = {
    "max_tokens": _Option(int | None, 256, "Most tokens to generate."),
    "temperature": _Option(float, 0.0, "Divides the logits; 0 always takes the most likely token."),
    "top_p": _Option(float, 1.0, "Keep the most likely tokens that make up this probability."),
    "top_k": _Option(int, 0, "Keep the k most likely tokens; 0 keeps all."),
    "min_p": _Option(float, 0.0, "Keep tokens at least this likely relative to the most likely one."),
    "seed": _Option(int | None, None, "Makes the draw repeatable. Default: fresh noise."),
    "ignore_eos": _Option(bool, False, "Go on after an end-of-sequence token.", "--ignore-eos"),
}
_METHOD_OPTIONS = _SAMPLING_OPTIONS | {
    "n": _Option(int, 1, "Sequences to draw for each prompt."),
    "beam_width": _Option(int | None, None, "Search with this many beams instead of drawing. Default: no search."),
    "length_penalty": _Option(float, 1.0, "Of beams: above 0 favours longer output."),
    "early_stopping": _Option(str, "false", "Of beams: true, false or never, as in transformers."),
}
_EARLY_STOPPING: dict[str, Any] = {"true": True, "false": False, "never": "never"}


def with_engine_options[**P](command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the engine's options; it gets them as one EngineConfig in its parameter `config`.

    The command must have a parameter `model`, which stays.
    """

    def build(values: dict[str, Any]) -> EngineConfig:
        values["seed"] = values.pop("engine_seed")
        return EngineConfig(model=values.pop("model"), **values)

    return _with_options(command, "config", _ENGINE_OPTIONS, build, "Engine", keep=("model",))


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the sampling options; it gets them as one SamplingParams in its parameter `params`."""
    return _with_options(command, "params", _SAMPLING_OPTIONS, lambda values: SamplingParams(**values), "Sampling")


def with_method_options(command: Callable[..., None]) -> Callable[..., None]:
    """As `with_sampling_options`, and with beams: the command gets a SamplingParams or a BeamSearchParams."""
    return _with_options(command, "params", _METHOD_OPTIONS, _read_method, "Sampling and search")


def _read_method(values: dict[str, Any]) -> Params:
    beams = {name: values.pop(name) for name in ("beam_width", "length_penalty", "early_stopping")}
    if beams["beam_width"] is None:
        return SamplingParams(**values)
    drawn = [name for name in ("n", "top_p", "top_k", "min_p", "seed") if values[name] != _METHOD_OPTIONS[name].default]
    if drawn:
        raise InvalidRequestError(f"{', '.join(drawn)} cannot go with beam_width: a search draws nothing at random")
    shared = {name: values[name] for name in ("max_tokens", "temperature", "ignore_eos")}
    beams["early_stopping"] = _EARLY_STOPPING.get(beams["early_stopping"], beams["early_stopping"])
    return BeamSearchParams(**beams, **shared)


def _with_options(
    command: Callable[..., None],
    target: str,
    options: dict[str, _Option],
    build: Callable[[dict[str, Any]], Any],
    panel: str,
    keep: tuple[str, ...] = (),
) -> Callable[..., None]:
    """Replace the parameter `target` of a command by options, from whose values `build` makes it."""
    signature = inspect.signature(command)

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in options}
        values |= {name: arguments[name] for name in keep}
        command(**arguments, **{target: build(values)})

    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=Annotated[
                option.type,
                typer.Option(
                    *([option.flag] if option.flag else []),
                    help=option.help,
                    rich_help_panel=panel,
                    show_default=option.default is not None,
                ),
            ],
        )
        for name, option in options.items()
    ]
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != target]
    wrapper.__signature__ = signature.replace(parameters=kept + added)  # type: ignore[attr-defined]
    return wrapper

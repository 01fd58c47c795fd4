"""Command line options that several commands share, declared once."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from jpaged.config import DTYPES, POLICIES, PREEMPTIONS, EngineConfig

MODEL_HELP = "A model directory, an Orbax checkpoint, a .gguf file, a hub id, or `demo`."


@dataclass(frozen=True)
class Option:
    """An option by the name of its parameter; its flag is made of that unless it is given."""

    type: Any
    default: Any
    help: str
    flag: str | None = None
    metavar: str | None = None
    panel: str | None = None  # of the help; `None` is that of the options it is declared with


_ENGINE_OPTIONS = {
    "dtype": Option(str, "auto", f"Of weights, activations and pages: {', '.join(DTYPES)}."),
    "max_model_len": Option(int | None, None, "Longest sequence in tokens, prompt and output. Default: the model's."),
    "max_num_seqs": Option(int, 64, "Most sequences in one step."),
    "max_num_batched_tokens": Option(int, 512, "Token budget of one step."),
    "page_size": Option(int | None, None, "Tokens per page. Default: 16; on TPU 128."),
    "num_pages": Option(int | None, None, "Pages in the pool. Default: sized by --kv-memory-fraction."),
    "kv_memory_fraction": Option(
        float | None, None, "Share of the memory beside the weights for pages. Default: 0.9; on a CPU 0.2."
    ),
    "enable_prefix_caching": Option(
        bool, True, "Use pages again for requests that begin the same.", "--prefix-caching/--no-prefix-caching"
    ),
    "host_tier_gib": Option(float, 0.0, "Host memory for pages that leave the device, in GiB."),
    "max_pinned_fraction": Option(float, 0.5, "Share of the pool that pinned prefixes may take."),
    "preemption": Option(str, "auto", f"How a sequence gives way: {', '.join(PREEMPTIONS)}."),
    "policy": Option(str, "fcfs", f"Who runs next: {', '.join(POLICIES)}."),
    "overlap": Option(bool, True, "Plan the next step while the device runs this one.", "--overlap/--no-overlap"),
    "engine_seed": Option(int | None, None, "Seeds the requests that bring no seed. Default: fresh."),
    "tensor_parallel_size": Option(int, 1, "Devices that share each layer."),
    "profile_directory": Option(
        str | None, None, "Write a trace of the first steps, and a table of where they went.", "--profile", "DIR"
    ),
    "profile_steps": Option(int, 200, "Most steps of the profile; it ends when nothing is left to do."),
}


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the engine's options; it gets them as one EngineConfig in its parameter `config`.

    The command must have a parameter `model`, which stays.
    """

    def build(values: dict[str, Any]) -> EngineConfig:
        values["seed"] = values.pop("engine_seed")
        return EngineConfig(model=values.pop("model"), **values)

    return with_options(command, "config", _ENGINE_OPTIONS, build, "Engine", keep=("model",))


def with_options(
    command: Callable[..., None],
    target: str,
    options: dict[str, Option],
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
                    metavar=option.metavar,
                    rich_help_panel=option.panel or panel,
                    show_default=option.default is not None and option.default is not False,
                ),
            ],
        )
        for name, option in options.items()
    ]
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != target]
    wrapper.__signature__ = signature.replace(parameters=kept + added)  # type: ignore[attr-defined]
    return wrapper

"""`jpaged bench`: the benchmarks of the source tree, by name."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from jpaged.errors import ConfigError

BENCHMARKS = {
    "offline": "Throughput of a workload, all requests at once.",
    "latency": "One row alone: time to the first token, prefill and decode rates.",
    "serving": "Requests that arrive at random over gRPC: throughput and latencies.",
    "scheduler": "Host time to plan and to commit a step, without a device.",
    "step": "Where a step goes: plan, dispatch, wait, commit, and the gap in which the device waits.",
    "sampler": "What drawing tokens costs, alone and as a share of a step.",
    "startup": "Seconds from command to ready, cold and warm, and what they go to.",
    "prefix": "What a shared prefix, samples and beams save.",
    "memory": "Pages over a run, beside what contiguous reservation would take.",
}
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

bench = typer.Typer(help="Run a benchmark of the source tree: a table, and one JSON line last.", no_args_is_help=True)


def _make_command(name: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        script = SCRIPTS / f"bench_{name}.py"
        if not script.exists():
            raise ConfigError(
                f"{script} is not there; benchmarks come with the source tree: run this from a clone of it"
            )
        sys.argv = [str(script), *context.args]
        sys.path.insert(0, str(SCRIPTS))
        runpy.run_path(str(script), run_name="__main__")

    return command


for _name, _help in BENCHMARKS.items():
    # All arguments, --help too, are the script's.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    bench.command(_name, help=_help, context_settings=settings)(_make_command(_name))

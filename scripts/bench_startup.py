"""Seconds from command to READY, with empty caches and with full ones, and what they go to.

    python scripts/bench_startup.py --model demo [--turns 3] [--plot startup.png]

Each start is a process of its own. The first has an empty cache directory, so that it compiles everything, the native
kernels too; the model itself is there already. The phases add up to the total of a Python program; the last row is what
`jpaged serve` takes until it says that it is ready. Prints medians in a table and, last, one JSON line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from machine import machine
from plotting import COLOURS, GREY, picture, short, without_ticks
from rich.console import Console
from rich.table import Table

START = """
import json, sys, time
begin = time.time()
from jpaged import LLM
import jpaged.engine.llm
imported = time.time()
llm = LLM(sys.argv[1], dtype=sys.argv[2])
stats = llm.stats()
print(json.dumps({"imports": imported - begin, "compiled": stats.compilations, **llm.engine.parts.phase_seconds}))
"""


SERVE, TOTAL, COMPILED = "jpaged serve", "total", "programs compiled"
SHORTEST_DRAWN = 0.02  # of the warm total; shorter phases are drawn as one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=3, help="warm starts; there is one cold start")
    parser.add_argument("--plot", metavar="OUT.png")
    arguments = parser.parse_args()
    from jpaged.engine.model_source import resolve_model

    model = str(resolve_model(arguments.model))
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"XDG_CACHE_HOME": cache}
        cold = start(model, arguments.dtype, environment)
        warm = [start(model, arguments.dtype, environment) for _ in range(arguments.turns)]
        served = [serve(model, arguments.dtype, environment) for _ in range(arguments.turns)]
    medians = {name: statistics.median(run[name] for run in warm) for name in cold}
    medians[SERVE] = statistics.median(served)
    print_table(cold, medians)
    rounded = [{name: round(value, 2) for name, value in run.items()} for run in (cold, medians)]
    figures = {"machine": machine(), "dtype": arguments.dtype, "cold": rounded[0], "warm": rounded[1]}
    if arguments.plot:
        plot(arguments.plot, figures)
        print(f"wrote {arguments.plot}")
    print(json.dumps(figures))


def start(model: str, dtype: str, environment: dict[str, str]) -> dict[str, float]:
    """Start once; return seconds by phase, their "total" from command to ready, and "programs compiled", a count."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", START, model, dtype], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    total = time.monotonic() - begin
    if process.wait():
        sys.exit("the engine did not start, see above")
    phases = json.loads(line)
    compiled = phases.pop("compiled")
    return {"start Python": total - sum(phases.values())} | phases | {TOTAL: total, COMPILED: compiled}


def serve(model: str, dtype: str, environment: dict[str, str]) -> float:
    """Seconds from `jpaged serve` to its being ready."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "jpaged", "serve", model, "--dtype", dtype, "--port", "0"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    log = []
    for line in process.stderr:
        log.append(line)
        if "ready after" in line:
            break
    total = time.monotonic() - begin
    process.terminate()
    if process.wait():
        sys.exit("the server did not start: " + "".join(log))
    return total


def print_table(cold: dict[str, float], warm: dict[str, float]) -> None:
    table = Table("phase", "cold", "warm", title=f"Seconds from command to ready, {machine()}")
    for name in warm:
        digits = 0 if name == COMPILED else 2
        cells = [f"{run[name]:.{digits}f}" if name in run else "" for run in (cold, warm)]
        table.add_row(name, *cells)
    Console().print(table)


def plot(path: str, figures: dict[str, Any]) -> None:
    """What the cold and the warm start go to, phase by phase, each phase in its colour."""
    cold, warm = figures["cold"], figures["warm"]
    with picture(path, 9, 4.2, "From command to ready", figures["machine"]) as figure:
        axes = figure.subplots()
        starts = {"cold": 0.0, "warm": 0.0}
        for (name, seconds), colour in zip(drawn_phases(cold, warm).items(), [*COLOURS, GREY], strict=False):
            label = f"{name}: {seconds['cold']:.2f} s, {seconds['warm']:.2f} s"
            axes.barh([*starts], [*seconds.values()], left=[*starts.values()], color=colour, height=0.6, label=label)
            starts = {start: starts[start] + seconds[start] for start in starts}
        axes.bar_label(axes.containers[-1], [f"{short(cold[TOTAL])} s", f"{short(warm[TOTAL])} s"], padding=4)
        axes.invert_yaxis()
        without_ticks(axes.yaxis)
        axes.set(xlabel="seconds", xlim=(0, 1.1 * max(starts.values())))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, frameon=False, title="phase: cold, warm")


def drawn_phases(cold: dict[str, float], warm: dict[str, float]) -> dict[str, dict[str, float]]:
    """Seconds by phase, cold and warm; phases that are short in both are put together."""
    drawn, rest = {}, {"cold": 0.0, "warm": 0.0}
    for name in cold:
        seconds = {"cold": cold[name], "warm": warm[name]}
        if name in (TOTAL, COMPILED):
            continue
        if max(seconds.values()) < SHORTEST_DRAWN * warm[TOTAL]:
            rest = {start: rest[start] + seconds[start] for start in rest}
        else:
            drawn[name] = seconds
    return drawn | ({"other": rest} if any(rest.values()) else {})


if __name__ == "__main__":
    main()

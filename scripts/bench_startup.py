"""Seconds from command to READY, with empty caches and with full ones, and what they go to.

    python scripts/bench_startup.py --model demo [--turns 3]

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

from machine import machine
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


SERVE = "jpaged serve"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=3, help="warm starts; there is one cold start")
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
    print(json.dumps({"machine": machine(), "dtype": arguments.dtype, "cold": rounded[0], "warm": rounded[1]}))


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
    return {"start Python": total - sum(phases.values())} | phases | {"total": total, "programs compiled": compiled}


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
        digits = 0 if name == "programs compiled" else 2
        cells = [f"{run[name]:.{digits}f}" if name in run else "" for run in (cold, warm)]
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()

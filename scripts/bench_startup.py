"""Seconds from command to READY, with an empty compilation cache and with a full one, and what they go to.

    python scripts/bench_startup.py --model demo [--turns 3]

Each start is a process of its own. Cold starts have a cache directory of their own, so that they compile everything,
the native kernels too; the model itself is there already. Prints medians in a table and, last, one JSON line.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=3, help="warm starts; there is one cold start")
    arguments = parser.parse_args()
    from jpaged.engine.model_source import resolve_model

    model = str(resolve_model(arguments.model))
    with tempfile.TemporaryDirectory() as cache:
        cold = start(model, arguments.dtype, cache)
        warm = [start(model, arguments.dtype, cache) for _ in range(arguments.turns)]
    medians = {name: statistics.median(run[name] for run in warm) for name in cold}
    print_table(cold, medians)
    rounded = [{name: round(value, 2) for name, value in run.items()} for run in (cold, medians)]
    print(json.dumps({"machine": machine(), "cold": rounded[0], "warm": rounded[1]}))


def start(model: str, dtype: str, cache: str) -> dict[str, float]:
    """Start once; return seconds by phase, "total" from command to ready among them, and "compiled", a count."""
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", START, model, dtype], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    total = time.monotonic() - begin
    if process.wait():
        sys.exit("the engine did not start, see above")
    return {"total": total} | json.loads(line)


def print_table(cold: dict[str, float], warm: dict[str, float]) -> None:
    table = Table("phase", "cold", "warm", title=f"Seconds from command to ready, {machine()}")
    for name in cold:
        unit = "programs " if name == "compiled" else ""
        table.add_row(unit + name, f"{cold[name]:.2f}", f"{warm[name]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()

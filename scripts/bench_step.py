"""Where a step of decoding rows goes: the host's parts, the wait for the device, and the gap in which it waits.

    python scripts/bench_step.py --model demo [--rows 1 64 256]

All rows decode together, once with overlap and once without. The gap is an upper bound of the time in which the device
had nothing to do, see jpaged/engine/step_clock.py. On a CPU the host works on the device's cores: what it takes beside
a running step, with overlap, is more than it takes alone. Prints medians of the steps in which all rows decode, the
gap's share of their whole time, and one JSON line last.
"""

import argparse
import json
import random
import statistics

from machine import machine
from rich.console import Console
from rich.table import Table

from jpaged import LLM, SamplingParams
from jpaged.metrics import Observer, StepTimes
from jpaged.request import TokensPrompt

PARTS = ("plan", "dispatch", "commit", "host", "wait", "total")


class StepNotes(Observer):
    """Keeps the times of steps of a given size."""

    def __init__(self, num_tokens: int) -> None:
        self.turns: list[StepTimes] = []
        self._num_tokens = num_tokens

    def step_done(self, times: StepTimes, num_tokens: int) -> None:
        if num_tokens == self._num_tokens:
            self.turns.append(times)


def main() -> None:
    arguments = parse_arguments()
    results = [measure(arguments, rows, overlap) for rows in arguments.rows for overlap in (True, False)]
    print_table(results)
    print(json.dumps({"machine": machine(), "results": results}))


def measure(arguments: argparse.Namespace, rows: int, overlap: bool) -> dict[str, float]:
    """Decode `rows` requests twice, and time the second run."""
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=arguments.prompt + arguments.output,
        max_num_seqs=rows,
        overlap=overlap,
    )
    generator = random.Random(0)
    vocabulary_size = llm.engine.parts.spec.vocab_size
    prompts: list[TokensPrompt] = [
        {"prompt_token_ids": [generator.randrange(5, vocabulary_size) for _ in range(arguments.prompt)]}
        for _ in range(rows)
    ]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=arguments.output,
        ignore_eos=True,
        detokenize=llm.tokenizer is not None,
        skip_reading_prefix_cache=True,
    )
    for _ in range(2):
        notes = StepNotes(rows)
        llm.engine.observer = notes
        llm.generate(prompts, params)
    medians = {part: 1e6 * statistics.median(getattr(turn, part) for turn in notes.turns) for part in PARTS}
    whole = sum(turn.total for turn in notes.turns)
    return {
        "rows": rows,
        "overlap": overlap,
        "steps": len(notes.turns),
        **{f"{part}_us": round(median) for part, median in medians.items()},
        "gap_share": round(sum(turn.gap for turn in notes.turns) / whole, 4),
    }


def print_table(results: list[dict[str, float]]) -> None:
    table = Table(title=f"A step of decoding rows, in microseconds, on {machine()}")
    for title in ("rows", "overlap", *PARTS, "gap"):
        table.add_column(title, justify="right")
    for row in results:
        parts = (f"{row[f'{part}_us']:,}" for part in PARTS)
        table.add_row(str(row["rows"]), "on" if row["overlap"] else "off", *parts, f"{row['gap_share']:.1%}")
    Console().print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=96, help="tokens to generate")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""One row alone: prefill and decode rates for several prompt lengths.

    python scripts/bench_latency.py --model demo [--prompt 512 --output 96 --turns 3] [--plot latency.png]

Each prompt runs with one token and with all of them; the difference is decoding. Prints medians in a table and, last,
one JSON line with the figures and the machine.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any

from machine import machine
from plotting import BLUE, ORANGE, label_bars, picture, without_ticks
from rich.console import Console
from rich.table import Table

from jpaged import LLM, SamplingParams


def main() -> None:
    arguments = parse_arguments()
    llm = LLM(arguments.model, dtype=arguments.dtype, max_model_len=2048, max_num_seqs=arguments.max_num_seqs)
    vocabulary_size = llm.engine.parts.spec.vocab_size
    results = [measure(llm, length, arguments, vocabulary_size) for length in arguments.prompt or [16, 128, 512, 1024]]
    print_table(results, llm.engine.parts.dtype)
    figures = {"machine": machine(), "dtype": llm.engine.parts.dtype, "results": results}
    if arguments.plot:
        plot(arguments.plot, figures)
        print(f"wrote {arguments.plot}")
    print(json.dumps(figures))


def measure(llm: LLM, prompt_length: int, arguments: argparse.Namespace, vocabulary_size: int) -> dict[str, float]:
    generator = random.Random(prompt_length)
    first: list[float] = []
    rest: list[float] = []
    for _ in range(arguments.turns):
        prompt = {"prompt_token_ids": [generator.randrange(5, vocabulary_size) for _ in range(prompt_length)]}
        first.append(run(llm, prompt, 1))
        rest.append(run(llm, prompt, arguments.output) - first[-1])
    prefill_seconds, decode_seconds = statistics.median(first), statistics.median(rest)
    return {
        "prompt_tokens": prompt_length,
        "output_tokens": arguments.output,
        "time_to_first_token_seconds": round(prefill_seconds, 4),
        "prefill_tokens_per_second": round(prompt_length / prefill_seconds, 1),
        "decode_tokens_per_second": round((arguments.output - 1) / decode_seconds, 1),
        "inter_token_milliseconds": round(1e3 * decode_seconds / (arguments.output - 1), 2),
    }


def run(llm: LLM, prompt, num_tokens: int) -> float:
    """Seconds for one request; nothing of its prompt is read from the cache."""
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, skip_reading_prefix_cache=True
    )
    start = time.perf_counter()
    llm.generate(prompt, params)
    return time.perf_counter() - start


def print_table(results: list[dict[str, float]], dtype: str) -> None:
    table = Table(title=f"One row alone, {dtype}, on {machine()}")
    for title in ("prompt", "first token, ms", "prefill tokens/s", "decode tokens/s", "ms per token"):
        table.add_column(title, justify="right")
    for row in results:
        table.add_row(
            str(row["prompt_tokens"]),
            f"{1e3 * row['time_to_first_token_seconds']:.1f}",
            f"{row['prefill_tokens_per_second']:.0f}",
            f"{row['decode_tokens_per_second']:.1f}",
            f"{row['inter_token_milliseconds']:.2f}",
        )
    Console().print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt", type=int, action="append", help="prompt length in tokens; may be repeated")
    parser.add_argument("--output", type=int, default=96, help="tokens to generate")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--plot", metavar="OUT.png")
    return parser.parse_args()


def plot(path: str, figures: dict[str, Any]) -> None:
    """How fast one row decodes behind prompts of several lengths, and how soon it begins."""
    results = sorted(figures["results"], key=lambda row: row["prompt_tokens"])
    lengths = [f"{row['prompt_tokens']:,}" for row in results]
    panels = (
        ("Decoding", "tokens per second", BLUE, [row["decode_tokens_per_second"] for row in results]),
        ("To the first token", "milliseconds", ORANGE, [1e3 * row["time_to_first_token_seconds"] for row in results]),
    )
    with picture(path, 9, 3.8, f"One row alone, {figures['dtype']}", figures["machine"]) as figure:
        for axes, (title, unit, colour, values) in zip(figure.subplots(1, 2), panels, strict=True):
            label_bars(axes.bar(lengths, values, color=colour, width=0.6), values)
            without_ticks(axes.xaxis)
            axes.set(title=title, xlabel="tokens of the prompt", ylabel=unit, ylim=(0, 1.1 * max(values)))


if __name__ == "__main__":
    main()

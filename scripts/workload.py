"""The named workloads that every engine runs, so that tokens per second compare.

offline64: 64 requests at once, prompt lengths uniform 16..511, output lengths uniform 16..255, token ids drawn
uniformly, greedy, EOS ignored (15,976 prompt tokens, 7,983 output tokens).
sharegpt:N: the first N length pairs of workloads/sharegpt_lengths.csv, same token ids.
prefix:N: N requests that share one 512-token prefix, 64 own tokens each, 64 output tokens each.
"""

import csv
import random
from pathlib import Path

LENGTHS = Path(__file__).resolve().parent / "workloads" / "sharegpt_lengths.csv"


def load(name: str, vocabulary_size: int = 49000) -> tuple[list[list[int]], list[int]]:
    """Return (prompts as token ids, output lengths). Raises SystemExit for an unknown name."""
    generator = random.Random(0)

    def draw(count: int) -> list[int]:
        return [generator.randrange(5, vocabulary_size) for _ in range(count)]

    kind, _, count = name.partition(":")
    if kind == "offline64":
        prompts = [draw(generator.randrange(16, 512)) for _ in range(64)]
        return prompts, [generator.randrange(16, 256) for _ in range(64)]
    if kind == "sharegpt":
        with LENGTHS.open() as file:
            rows = list(csv.DictReader(file))[: int(count)]
        return [draw(int(row["prompt_tokens"])) for row in rows], [int(row["output_tokens"]) for row in rows]
    if kind == "prefix":
        shared = draw(512)
        return [shared + draw(64) for _ in range(int(count))], [64] * int(count)
    raise SystemExit(f"unknown workload {name!r}; known are offline64, sharegpt:N and prefix:N")

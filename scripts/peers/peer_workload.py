"""The workload file that compare_peers.py hands to each engine, and the line that each prints. Plain Python."""

import json
from dataclasses import dataclass


@dataclass
class Work:
    name: str
    prompts: list
    output_lengths: list
    shares_prefix: bool


def read(path) -> Work:
    with open(path) as file:
        return Work(**json.load(file))


def report(work: Work, seconds: float, generated: int) -> None:
    wanted = sum(work.output_lengths)
    assert generated == wanted, f"{generated} tokens were generated, {wanted} were wanted"
    print(json.dumps({"workload": work.name, "seconds": seconds, "output_tokens": generated}))

"""Structured output from the model itself: 300 JSON schemas, and whatever is finished must parse and validate.

    python scripts/check_schemas.py --model demo [--temperature 1.0] [--samples 1] [--max-tokens 512] [--limit 300]

The schemas are those of tests/parity/schemas/schemas.json. Each is asked for once, seeded, all of them in one batch.
Needs jsonschema, which the extra `dev` brings.

Prints a table, every output that is wrong and, last, one JSON line. Exits with 1 if a finished output does not parse or
validate, if a request failed, or if something was compiled after the engine was ready.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import validator_for
from rich.console import Console
from rich.table import Table

from jpaged import LLM, SamplingParams
from jpaged.params import StructuredOutputs

SCHEMAS = Path(__file__).resolve().parents[1] / "tests" / "parity" / "schemas" / "schemas.json"


def main() -> None:
    arguments = parse_arguments()
    entries = json.loads(SCHEMAS.read_text(encoding="utf-8"))[: arguments.limit]
    llm = LLM(arguments.model, dtype=arguments.dtype, max_model_len=1024 + arguments.max_tokens, max_num_seqs=64)
    conversations = [
        [{"role": "user", "content": f"Give me one example of JSON data for: {entry['name']}."}] for entry in entries
    ]
    params = [
        SamplingParams(
            n=arguments.samples,
            temperature=arguments.temperature,
            seed=seed,
            max_tokens=arguments.max_tokens,
            structured_outputs=StructuredOutputs(json_schema=entry["schema"]),
        )
        for seed, entry in enumerate(entries)
    ]
    begin = time.perf_counter()
    outputs = llm.chat(conversations, params)
    seconds = time.perf_counter() - begin

    counts: Counter[str] = Counter()
    num_tokens = 0
    for entry, output in zip(entries, outputs, strict=True):
        for completion in output.outputs:
            num_tokens += len(completion.token_ids)
            verdict, reason = judge(entry["schema"], completion.text, completion.finish_reason)
            counts[verdict] += 1
            if verdict in ("invalid", "failed"):
                print(f"{entry['name']}: {reason or completion.stop_reason}\n  {completion.text!r}")
    report(arguments, counts, num_tokens, seconds, llm.stats().compilations_after_ready)


def judge(schema: dict[str, Any], text: str, finish_reason: str | None) -> tuple[str, str]:
    """("valid", "invalid", "cut" by max_tokens, or "failed", and what is wrong with an invalid one)."""
    if finish_reason != "stop":
        return ("cut" if finish_reason == "length" else "failed"), ""
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, ValidationError) as error:
        return "invalid", str(error).partition("\n")[0]
    return "valid", ""


def report(
    arguments: argparse.Namespace, counts: Counter[str], num_tokens: int, seconds: float, compilations: int
) -> None:
    finished = counts["valid"] + counts["invalid"]
    table = Table("outputs", "count", title=f"{arguments.limit} JSON schemas, temperature {arguments.temperature:g}")
    table.add_row("finished", f"{finished:,}")
    table.add_row("valid", f"{counts['valid']:,}")
    table.add_row("invalid", f"{counts['invalid']:,}")
    table.add_row(f"cut after {arguments.max_tokens} tokens", f"{counts['cut']:,}")
    table.add_row("failed", f"{counts['failed']:,}")
    table.caption = f"{num_tokens:,} tokens in {seconds:.1f} s"
    Console().print(table)
    figures = {
        "model": arguments.model,
        "temperature": arguments.temperature,
        "outputs": counts.total(),
        "finished": finished,
        "valid": counts["valid"],
        "invalid": counts["invalid"],
        "cut": counts["cut"],
        "failed": counts["failed"],
        "tokens": num_tokens,
        "seconds": round(seconds, 2),
        "compilations_after_ready": compilations,
    }
    print(json.dumps(figures))
    if counts["invalid"] or counts["failed"] or compilations:
        sys.exit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--samples", type=int, default=1, help="of each schema")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--limit", type=int, default=300, help="how many of the schemas")
    return parser.parse_args()


if __name__ == "__main__":
    main()

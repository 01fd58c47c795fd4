"""Offline throughput: all requests of a workload at once.

    python scripts/bench_offline.py --model demo --workload offline64 [--dtype float32 ...]

Prints a table and, last, one JSON line. Exits with 1 if a request did not finish, a page was lost, or something was
compiled after the engine was ready. A second run in the same environment compiles nothing (programs_compiled 0).
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext

from rich.console import Console
from rich.table import Table
from workload import load

from jpaged import LLM, SamplingParams
from jpaged.engine.profiling import Profile


def main() -> None:
    arguments = parse_arguments()
    prompts, lengths = load(arguments.workload)
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        overlap=not arguments.no_overlap,
    )
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths
    ]
    profiler = llm.profile(arguments.profile) if arguments.profile else None
    start = time.perf_counter()
    with profiler or nullcontext():
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        seconds = time.perf_counter() - start
    stats = llm.stats()
    prompt_tokens = sum(map(len, prompts))
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    figures = {
        "engine": f"jpaged {llm.engine.parts.dtype}",
        "workload": arguments.workload,
        "seconds": round(seconds, 2),
        "prompt_tokens": prompt_tokens,
        "output_tokens": generated,
        "output_tokens_per_second": round(generated / seconds, 1),
        "total_tokens_per_second": round((generated + prompt_tokens) / seconds, 1),
        "kv_utilisation": round(stats.kv_utilisation, 4),
        "compilations_after_ready": stats.compilations_after_ready,
        "pages_leaked": stats.pages_used,
        "ready_seconds": round(stats.ready_seconds, 2),
        "programs_compiled": stats.compilations,
        "steps": stats.steps,
        "preemptions": stats.preemptions,
    }
    print_table(figures)
    if profiler is not None:
        print_profile(profiler.profile)
    print(json.dumps(figures))
    unfinished = sum(len(o.outputs[0].token_ids) != length for o, length in zip(outputs, lengths, strict=True))
    if unfinished or figures["pages_leaked"] or figures["compilations_after_ready"]:
        sys.exit(f"{unfinished} requests unfinished, see also pages_leaked and compilations_after_ready above")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--workload", default="offline64", help="offline64, sharegpt:N or prefix:N")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--profile", metavar="DIR", help="write a trace, and say where a step's time goes; costs speed")
    parser.add_argument("--no-overlap", action="store_true", help="wait for each step before planning the next")
    return parser.parse_args()


def print_profile(profile: Profile) -> None:
    table = Table("part", "ms a step", "share", title=f"{profile.steps} steps; the trace is in {profile.directory}")
    for name, milliseconds, share in profile.rows():
        table.add_row(name, f"{milliseconds:.2f}", f"{share:.1%}")
    Console().print(table)


def print_table(figures: dict[str, object]) -> None:
    table = Table("figure", "value", title="Offline throughput")
    for name, value in figures.items():
        table.add_row(name, str(value))
    Console().print(table)


if __name__ == "__main__":
    main()

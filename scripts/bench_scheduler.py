"""Host cost of scheduling, without a device.

    python scripts/bench_scheduler.py [--rows 64 256 1024] [--plot scheduler.png]

Requests of 512 prompt tokens decode together, with prefix caching on; the step before is committed after the next one
is planned, as the engine does with overlap. Median microseconds of `plan` and `commit` over the last 200 steps in which
all rows decode. Then the cost of a page for pools of a thousand and a million pages, which must not differ.

Prints tables and one JSON line for each size: rows, plan_us, commit_us. The last line is about the pools.
"""

import argparse
import json
import random
import statistics
import time
from collections import deque

from machine import machine
from plotting import BLUE, ORANGE, legend_above, picture, without_ticks
from reservation import draw, make_group
from rich.console import Console
from rich.table import Table

from jpaged.paging.page_pool import PagePool
from jpaged.paging.page_table import PageTable
from jpaged.scheduling.scheduler import Scheduler, SchedulerConfig
from jpaged.step_plan import StepPlan

PROMPT_TOKENS, OUTPUT_TOKENS, PAGE_SIZE_TOKENS = 512, 1000, 16
MEASURED_STEPS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--plot", metavar="OUT.png")
    arguments = parser.parse_args()
    results = [measure_scheduler(rows) for rows in arguments.rows]
    table = Table(
        "decoding rows", "plan (µs)", "commit (µs)", "both (µs)", "mean of both (µs)", title="Host cost of a step"
    )
    for result in results:
        both = result["plan_us"] + result["commit_us"]
        table.add_row(
            *(f"{n:,}" for n in (result["rows"], result["plan_us"], result["commit_us"], both)),
            f"{result['mean_us']:,}",
        )
    pools = [measure_pool(num_pages) for num_pages in (1_000, 1_000_000)]
    pool_table = Table("pages in the pool", "allocate (ns a page)", "free (ns a page)", title="Cost of a page")
    for pool in pools:
        pool_table.add_row(*(f"{n:,}" for n in pool.values()))
    console = Console()
    console.print(table)
    console.print(pool_table)
    if arguments.plot:
        plot(arguments.plot, results, machine())
        print(f"wrote {arguments.plot}")
    for result in results:
        print(json.dumps(result))
    print(json.dumps({"pools": pools}))


def measure_scheduler(rows: int) -> dict[str, int]:
    """Decode `rows` requests until `MEASURED_STEPS` steps of pure decode have been timed."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=rows * 160,
            page_size_tokens=PAGE_SIZE_TOKENS,
            max_num_seqs=rows,
            max_num_batched_tokens=8192,
            enable_prefix_caching=True,
        )
    )
    generator = random.Random(0)
    for place in range(rows):
        prompt = [generator.randrange(49_000) for _ in range(PROMPT_TOKENS)]
        scheduler.add(make_group(scheduler, place, prompt, OUTPUT_TOKENS))
    in_flight: deque[StepPlan] = deque()
    plan_seconds: list[float] = []
    commit_seconds: list[float] = []
    while len(commit_seconds) < MEASURED_STEPS:
        start = time.perf_counter()
        plan = scheduler.plan()
        planned_seconds = time.perf_counter() - start
        assert plan is not None
        in_flight.append(plan)
        if len(in_flight) < 2:
            continue
        done = in_flight.popleft()
        result = draw(done)
        start = time.perf_counter()
        scheduler.commit(done, result)
        if done.num_decode == plan.num_decode == rows:
            commit_seconds.append(time.perf_counter() - start)
            plan_seconds.append(planned_seconds)
    both = [plan + commit for plan, commit in zip(plan_seconds, commit_seconds, strict=True)]
    return {
        "rows": rows,
        "plan_us": microseconds(statistics.median(plan_seconds)),
        "commit_us": microseconds(statistics.median(commit_seconds)),
        "mean_us": microseconds(statistics.mean(both)),
    }


def measure_pool(num_pages: int, num_tables: int = 100, pages_each: int = 8, rounds: int = 200) -> dict[str, int]:
    """Time tables that take and free pages, in another order each round; medians of the rounds."""
    pool, generator = PagePool(num_pages), random.Random(0)
    num_tables = min(num_tables, num_pages // pages_each)
    allocate_seconds: list[float] = []
    free_seconds: list[float] = []
    for _ in range(rounds):
        tables = [PageTable(pool, PAGE_SIZE_TOKENS) for _ in range(num_tables)]
        start = time.perf_counter()
        for table in tables:
            for index in range(pages_each):  # one by one, as decoding takes them
                table.grow((index + 1) * PAGE_SIZE_TOKENS)
        allocate_seconds.append(time.perf_counter() - start)
        generator.shuffle(tables)
        start = time.perf_counter()
        for table in tables:
            table.release()
        free_seconds.append(time.perf_counter() - start)
    pages = num_tables * pages_each
    return {
        "pages": num_pages,
        "allocate_ns": round(1e9 * statistics.median(allocate_seconds) / pages),
        "free_ns": round(1e9 * statistics.median(free_seconds) / pages),
    }


def microseconds(seconds: float) -> int:
    return round(1e6 * seconds)


def plot(path: str, results: list[dict[str, int]], where: str) -> None:
    """A bar for each number of rows: what planning takes, and behind it what booking takes."""
    names = [f"{result['rows']:,} rows" for result in results]
    plans, commits = [result["plan_us"] for result in results], [result["commit_us"] for result in results]
    sums = [plan + commit for plan, commit in zip(plans, commits, strict=True)]
    with picture(path, 9, 1.9 + 0.5 * len(names), "What a step of decoding rows takes of the host", where) as figure:
        axes = figure.subplots()
        axes.barh(names, plans, color=BLUE, height=0.6)
        bars = axes.barh(names, commits, left=plans, color=ORANGE, height=0.6)
        parts = [f"{s:,} µs: {p:,} + {c:,}" for s, p, c in zip(sums, plans, commits, strict=True)]
        axes.bar_label(bars, parts, padding=4)
        axes.invert_yaxis()
        without_ticks(axes.yaxis)
        axes.set(xlabel="microseconds, medians", xlim=(0, 1.3 * max(sums)))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        legend_above(axes, {"plan": BLUE, "commit": ORANGE})


if __name__ == "__main__":
    main()

"""What the pages of a run hold, and what contiguous reservations would have taken for the same requests.

    python scripts/bench_memory.py --plot memory.png                # 32 requests of real lengths on the demo model
    python scripts/bench_memory.py --plot memory.png --simulate --workload sharegpt:200 --num-pages 1024   # no model

The picture shows, over the steps of the run, the device pages that are used, cached and free, the pages of the host
tier, and beside it what three contiguous policies would have reserved for the requests running in each step: up to
the maximum length, for an output of the next power of two, and for the true length known in advance (the baselines of
the PagedAttention paper, arXiv 2309.06180).

Before it comes the same comparison without a device, on the first 1,000 pairs of workloads/sharegpt_lengths.csv served
in the same memory: rows that fit, waste, and steps needed. Prints it as a table and, last, one JSON line. Exits with 1
if pages waste over 0.3 points more than rounding up to whole pages does.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field

from plotting import BLUE, GREEN, GREY, INK, LIGHT_BLUE, LIGHT_ORANGE, ORANGE, RED, legend_above, picture
from reservation import (
    CONTIGUOUS,
    Limits,
    Served,
    read_lengths,
    rounding_floor,
    run_without_device,
    serve_contiguous,
    serve_paged,
)
from rich.console import Console
from rich.table import Table
from stepping import serve
from workload import load

from jpaged import LLM, SamplingParams
from jpaged.request import RequestOutput
from jpaged.scheduling.scheduler import Scheduler, SchedulerConfig

PAGE_SIZE_TOKENS = 16
COMPARED_REQUESTS = 1000
MOST_WASTE_OVER_FLOOR = 0.003
PAGED = "pages"
POLICY_COLOURS = dict(zip(CONTIGUOUS, (RED, ORANGE, GREEN), strict=True))


@dataclass(slots=True)
class Trace:
    """Pages, step by step; `reserved` in pages as well, by policy."""

    title: str
    num_pages: int
    page_size_tokens: int
    used: list[int] = field(default_factory=list[int])
    cached: list[int] = field(default_factory=list[int])
    host_used: list[int] = field(default_factory=list[int])
    host_cached: list[int] = field(default_factory=list[int])
    reserved: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CONTIGUOUS})

    def add_reserved(self, running: list[tuple[int, int]], max_length: int) -> None:
        """What each policy would hold for these requests, (prompt tokens, output tokens) each."""
        for name, policy in CONTIGUOUS.items():
            slots = sum(policy(prompt, output, max_length) for prompt, output in running)
            self.reserved[name].append(slots / self.page_size_tokens)


def main() -> None:
    arguments = parse_arguments()
    figures = compare(arguments)
    print_table(figures, arguments.memory_slots)
    if arguments.plot:
        trace = simulate(arguments) if arguments.simulate else run_model(arguments)
        plot(arguments.plot, trace)
        figures["run"] = {
            "title": trace.title,
            "steps": len(trace.used),
            "peak_pages_used": max(trace.used),
            "peak_pages_reserved": {name: round(max(pages)) for name, pages in trace.reserved.items()},
            "peak_host_pages": max(map(sum, zip(trace.host_used, trace.host_cached, strict=True))),
        }
        print(f"wrote {arguments.plot}")
    print(json.dumps(figures))
    over = figures["servers"][PAGED]["waste"] - figures["rounding_floor"]
    if over > MOST_WASTE_OVER_FLOOR:
        sys.exit(f"pages waste {100 * over:.2f} points more than rounding, the limit is 0.3")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="OUT.png", help="draw a run; without it only the table is made")
    parser.add_argument("--simulate", action="store_true", help="run the scheduler without a model")
    parser.add_argument("--workload", default="sharegpt:32", help="of the run: sharegpt:N")
    parser.add_argument("--num-pages", type=int, default=256, help="device pages of the run")
    parser.add_argument("--host-pages", type=int, default=512, help="pages of the host tier, with --simulate")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--host-tier-gib", type=float, default=0.1, help="host tier, with a model")
    parser.add_argument("--memory-slots", type=int, default=32768, help="token slots in the comparison")
    return parser.parse_args()


def compare(arguments: argparse.Namespace) -> dict:
    """Serve the same lengths in the same memory, in all four ways."""
    lengths = read_lengths(COMPARED_REQUESTS)
    limits = Limits(memory_slots=arguments.memory_slots)
    servers = {name: serve_contiguous(lengths, policy, limits) for name, policy in CONTIGUOUS.items()}
    servers[PAGED] = serve_paged(lengths, PAGE_SIZE_TOKENS, limits)
    return {
        "requests": len(lengths),
        "memory_slots": limits.memory_slots,
        "rounding_floor": round(rounding_floor(lengths, PAGE_SIZE_TOKENS), 5),
        "servers": {name: _rounded(served) for name, served in servers.items()},
    }


def _rounded(served: Served) -> dict:
    return {name: round(value, 5) for name, value in asdict(served).items()}


def print_table(figures: dict, memory_slots: int) -> None:
    title = f"{figures['requests']:,} requests in memory for {memory_slots:,} tokens"
    caption = f"rounding to whole pages alone wastes {100 * figures['rounding_floor']:.2f} %"
    table = Table("reserved", "rows that fit", "waste", "steps", "steps / pages", title=title, caption=caption)
    paged_steps = figures["servers"][PAGED]["steps"]
    for name, served in figures["servers"].items():
        name = f"page by page ({PAGE_SIZE_TOKENS} tokens)" if name == PAGED else name
        ratio = f"{served['steps'] / paged_steps:.2f}"
        table.add_row(name, f"{served['rows']:.1f}", f"{100 * served['waste']:.2f} %", f"{served['steps']:,}", ratio)
    Console().print(table)


def simulate(arguments: argparse.Namespace) -> Trace:
    """Run the workload's lengths through the scheduler alone."""
    prompts, outputs = load(arguments.workload)
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=arguments.num_pages,
            page_size_tokens=PAGE_SIZE_TOKENS,
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=512,
            num_host_pages=arguments.host_pages,
            enable_prefix_caching=True,
            preemption="swap",
        )
    )
    title = f"{len(prompts)} requests of real lengths, {arguments.num_pages:,} pages (no model)"
    trace = Trace(title, arguments.num_pages, PAGE_SIZE_TOKENS)
    lengths = dict(enumerate((len(prompt), output) for prompt, output in zip(prompts, outputs, strict=True)))
    started: set[int] = set()
    for plan in run_without_device(scheduler, list(zip(prompts, outputs, strict=True))):
        here = {scheduler.group_of(sequence_id).group_id for sequence_id in plan.sequence_ids}
        started |= here
        # Who has given way still has its reservation: a contiguous server does not preempt.
        unfinished = {sequence.group.group_id for sequence in scheduler.books.sequences.values()}
        started &= unfinished
        trace.add_reserved([lengths[group_id] for group_id in started], arguments.max_model_len)
        pool, host_pool = scheduler.pool, scheduler.host_pool
        trace.used.append(pool.num_used)
        trace.cached.append(pool.num_cached)
        trace.host_used.append(host_pool.num_used)
        trace.host_cached.append(host_pool.num_cached)
    return trace


def run_model(arguments: argparse.Namespace) -> Trace:
    """Run the workload on a model, all requests at once."""
    prompts, outputs = load(arguments.workload)
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        num_pages=arguments.num_pages,
        page_size=PAGE_SIZE_TOKENS,
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=arguments.max_model_len,
        host_tier_gib=arguments.host_tier_gib,
    )
    title = f"{len(prompts)} requests of real lengths on {arguments.model}, {arguments.num_pages:,} pages"
    trace = Trace(title, arguments.num_pages, PAGE_SIZE_TOKENS)

    def note(served: list[RequestOutput]) -> None:
        stats = llm.stats()
        trace.used.append(stats.pages_used)
        trace.cached.append(stats.pages_cached)
        trace.host_used.append(stats.host_pages_used)
        trace.host_cached.append(stats.host_pages_cached)
        running = [
            (len(request.prompt_token_ids), output)
            for request, output in zip(served, outputs, strict=True)
            if request.times.first_scheduled is not None and not request.finished
        ]
        trace.add_reserved(running, arguments.max_model_len)

    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in outputs]
    serve(llm, prompts, [*params], note)
    return trace


def plot(path: str, trace: Trace) -> None:
    """Draw the pool on the left, the host tier under it, and the reservations on the right."""
    with picture(path, 13, 6.4, trace.title) as figure:
        grid = figure.add_gridspec(2, 2, height_ratios=[3, 1])
        device = figure.add_subplot(grid[0, 0])
        host = figure.add_subplot(grid[1, 0], sharex=device)
        beside = figure.add_subplot(grid[:, 1])
        _plot_device(device, trace)
        _plot_host(host, trace)
        _plot_reservations(beside, trace)
        for axes in (device, host, beside):
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.set(ylabel="pages", xlim=(0, len(trace.used) - 1))
        for axes in (host, beside):
            axes.set_xlabel("step")


def _plot_device(axes, trace: Trace) -> None:
    free = [trace.num_pages - used - cached for used, cached in zip(trace.used, trace.cached, strict=True)]
    axes.stackplot(range(len(free)), trace.used, trace.cached, free, colors=[BLUE, LIGHT_BLUE, GREY], lw=0)
    axes.set(title="Device pages", ylim=(0, trace.num_pages))
    axes.tick_params(labelbottom=False)
    legend_above(axes, {"used": BLUE, "cached": LIGHT_BLUE, "free": GREY})


def _plot_host(axes, trace: Trace) -> None:
    axes.stackplot(range(len(trace.used)), trace.host_used, trace.host_cached, colors=[ORANGE, LIGHT_ORANGE], lw=0)
    peak = max(map(sum, zip(trace.host_used, trace.host_cached, strict=True)))
    axes.set(title="Host pages", ylim=(0, max(peak * 1.05, 1)))
    legend_above(axes, {"of requests that gave way": ORANGE, "of evicted prefixes": LIGHT_ORANGE})


def _plot_reservations(axes, trace: Trace) -> None:
    steps = range(len(trace.used))
    peak = f"page by page: {max(trace.used):,} at most"
    below = axes.fill_between(steps, trace.used, color=BLUE, lw=0, label=peak)
    lines = []
    for name, pages in trace.reserved.items():
        label = f"{name}: {round(max(pages)):,} at most"
        lines += axes.plot(steps, pages, color=POLICY_COLOURS[name], lw=2, label=label)
    pool = axes.axhline(trace.num_pages, color=INK, lw=1, ls=(0, (5, 4)), label=f"the pool: {trace.num_pages:,}")
    axes.set(title="What the same requests would reserve, each in one piece", ylim=(0, None))
    axes.legend(handles=[*lines, below, pool], loc="upper right", framealpha=0.95, edgecolor="none")


if __name__ == "__main__":
    main()

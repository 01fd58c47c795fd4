"""What sharing pages saves: a common prefix, parallel samples, and beams.

    python scripts/bench_prefix.py --model demo [--requests 32] [--plot prefix.png]

Requests that share a 512-token prefix run with the prefix cache on and off: prompt tokens computed, most pages in use,
mean time to first token. Then one prompt with n = 8 samples and with 4 beams, against as many requests of their own.
Pages are counted after each step.

Prints tables and, last, one JSON line. Exits with 1 if under 85 % of the prompt pages are saved with 32 requests or
more, or if sharing takes more pages than the full pages of the prompt once and a tail and one page for each sequence.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass

from plotting import BLUE, ORANGE, picture
from rich.console import Console
from rich.table import Table
from stepping import serve
from workload import load

from jpaged import LLM, BeamSearchParams, SamplingParams
from jpaged.params import Params
from jpaged.request import RequestOutput

PAGE_SIZE_TOKENS = 16
SAMPLES, BEAMS = 8, 4
LEAST_SAVED, SAVED_FROM_REQUESTS = 0.85, 32


@dataclass(slots=True)
class Run:
    """One way to serve; `pages` in use after each step."""

    pages: list[int]
    seconds: float
    outputs: list[RequestOutput]

    @property
    def peak_pages(self) -> int:
        return max(self.pages)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def num_computed_prompt_tokens(self) -> int:
        return self.num_prompt_tokens - sum(output.num_cached_tokens for output in self.outputs)

    @property
    def mean_first_token_seconds(self) -> float:
        times = [output.times for output in self.outputs]
        return sum((t.first_token or t.last_token) - t.arrival for t in times) / len(times)


@dataclass(slots=True)
class Sharing:
    """One prompt, many sequences: pages with sharing and without, and the most that sharing may take."""

    shared: list[int]
    unshared: list[int]
    limit: int

    @property
    def saved(self) -> float:
        return 1 - max(self.shared) / max(self.unshared)


def main() -> None:
    arguments = parse_arguments()
    prompts, _ = load(f"prefix:{arguments.requests}")
    params: list[Params] = [_greedy(arguments.output_tokens)] * len(prompts)
    llm = start(arguments, enable_prefix_caching=True)
    on = run(llm, prompts, params)
    prompt, num_output = prompts[0], arguments.output_tokens
    samples = SamplingParams(n=SAMPLES, seed=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
    beams = BeamSearchParams(beam_width=BEAMS, max_tokens=num_output, ignore_eos=True, detokenize=False)
    groups = {
        f"{width} {name}": Sharing(run(llm, [prompt], [one]).pages, [], _most_pages(len(prompt), num_output, width))
        for name, width, one in (("samples", SAMPLES, samples), ("beams", BEAMS, beams))
    }
    del llm  # its memory is needed for the other
    llm = start(arguments, enable_prefix_caching=False)
    off = run(llm, prompts, params)
    for group, width in zip(groups.values(), (SAMPLES, BEAMS), strict=True):
        group.unshared = run(llm, [prompt] * width, params[:1] * width).pages
    saved_pages = (off.num_computed_prompt_tokens - on.num_computed_prompt_tokens) / off.num_computed_prompt_tokens
    print_tables(on, off, saved_pages, groups)
    if arguments.plot:
        plot(arguments.plot, on, off, groups)
        print(f"wrote {arguments.plot}")
    print(json.dumps(summarise(arguments, on, off, saved_pages, groups)))
    if len(prompts) >= SAVED_FROM_REQUESTS and saved_pages < LEAST_SAVED:
        sys.exit(f"{100 * saved_pages:.1f} % of the prompt pages are saved, 85 % are asked for")
    for name, group in groups.items():
        if max(group.shared) > group.limit:
            sys.exit(f"{name} took {max(group.shared)} pages, the limit is {group.limit}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=32, help="that share the prefix")
    parser.add_argument("--output-tokens", type=int, default=64, help="of each sequence")
    parser.add_argument("--plot", metavar="OUT.png")
    return parser.parse_args()


def start(arguments: argparse.Namespace, *, enable_prefix_caching: bool) -> LLM:
    """An engine in which all requests run at the same time."""
    longest = 1024
    return LLM(
        arguments.model,
        dtype=arguments.dtype,
        page_size=PAGE_SIZE_TOKENS,
        max_model_len=longest,
        max_num_seqs=max(arguments.requests, 8),
        num_pages=max(arguments.requests, 8) * longest // PAGE_SIZE_TOKENS,
        enable_prefix_caching=enable_prefix_caching,
    )


def run(llm: LLM, prompts: list[list[int]], params: list[Params]) -> Run:
    pages: list[int] = []
    begin = time.perf_counter()
    outputs = serve(llm, prompts, params, lambda outputs: pages.append(llm.stats().pages_used))
    seconds = time.perf_counter() - begin
    assert pages[-1] == 0, "a page is lost"
    return Run(pages, seconds, outputs)


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def _most_pages(num_prompt: int, num_output: int, width: int) -> int:
    """The prompt's full pages once, and for each sequence its tail and one page."""
    shared = (num_prompt - 1) // PAGE_SIZE_TOKENS
    tail = -(-(num_prompt + num_output - 1) // PAGE_SIZE_TOKENS) - shared
    return shared + width * (tail + 1)


def print_tables(on: Run, off: Run, saved_pages: float, groups: dict[str, Sharing]) -> None:
    title = f"{len(on.outputs)} requests that share a 512-token prefix"
    caption = f"{100 * saved_pages:.1f} % of the prompt pages are saved"
    table = Table("figure", "cache on", "cache off", title=title, caption=caption)
    table.add_row("prompt tokens computed", f"{on.num_computed_prompt_tokens:,}", f"{off.num_computed_prompt_tokens:,}")
    table.add_row("most pages in use", f"{on.peak_pages:,}", f"{off.peak_pages:,}")
    first = [f"{one.mean_first_token_seconds:.2f} s" for one in (on, off)]
    table.add_row("mean time to first token", *first)
    table.add_row("total", f"{on.seconds:.2f} s", f"{off.seconds:.2f} s")
    sharing = Table(
        "one prompt", "pages shared", "pages unshared", "saved", title="Samples and beams, most pages in use"
    )
    for name, group in groups.items():
        counts = max(group.shared), max(group.unshared)
        sharing.add_row(name, *(f"{count:,}" for count in counts), f"{100 * group.saved:.1f} %")
    console = Console()
    console.print(table)
    console.print(sharing)


def summarise(
    arguments: argparse.Namespace, on: Run, off: Run, saved_pages: float, groups: dict[str, Sharing]
) -> dict[str, object]:
    def figures(one: Run) -> dict[str, float]:
        return {
            "prompt_tokens_computed": one.num_computed_prompt_tokens,
            "peak_pages": one.peak_pages,
            "mean_first_token_seconds": round(one.mean_first_token_seconds, 3),
            "seconds": round(one.seconds, 2),
        }

    sharing = {
        name: {"peak_pages": max(group.shared), "peak_pages_unshared": max(group.unshared), "limit": group.limit}
        for name, group in groups.items()
    }
    return {
        "model": arguments.model,
        "requests": arguments.requests,
        "cache_on": figures(on),
        "cache_off": figures(off),
        "prompt_pages_saved": round(saved_pages, 4),
        **sharing,
    }


def plot(path: str, on: Run, off: Run, groups: dict[str, Sharing]) -> None:
    """Pages in use over each run's steps, shared against unshared."""
    panels = [(f"{len(on.outputs)} requests, one 512-token prefix", on.pages, off.pages)]
    panels += [(f"One prompt, {name}", group.shared, group.unshared) for name, group in groups.items()]
    with picture(path, 13, 4.2) as figure:
        all_axes = figure.subplots(1, len(panels))
        for axes, (title, shared, unshared) in zip(all_axes, panels, strict=True):
            curves = (unshared, ORANGE, "each with its own pages"), (shared, BLUE, "shared")
            for pages, colour, label in curves:
                steps = range(len(pages))
                axes.fill_between(steps, pages, step="post", color="white", lw=0)
                axes.fill_between(steps, pages, step="post", color=colour, alpha=0.25, lw=0)
                axes.step(steps, pages, where="post", color=colour, lw=2)
                where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "center"}
                axes.annotate(f"{label}: {max(pages):,}", (0.5, max(pages)), (0, 5), color=colour, **where)
            axes.set(title=title, xlabel="step", xlim=(0, max(len(shared), len(unshared)) - 1))
            axes.set_ylim(0, max(unshared) * 1.1)
            axes.yaxis.set_major_formatter("{x:,.0f}")
        all_axes[0].set_ylabel("pages in use")


if __name__ == "__main__":
    main()

"""What drawing tokens costs: the sampler alone, and its share of a model's step.

    python scripts/bench_sampler.py [--rows 64] [--vocabularies 49152 151936] [--model demo | --no-model]
        [--plot sampler.png]

The sampler alone: from logits to the packed result, for rows whose probabilities fall with the rank as those of a
language model do (Zipf, exponent 1.5), each with a history of 256 tokens, half of them generated. "flat" logits are the
worst case: the filters keep thousands of tokens, so that all rows look at the whole vocabulary. Then decode steps of
the engine with all rows running, greedy and with everything on, in turns; medians. On a CPU the sampler alone is
measured in both its forms; the engine takes the native one.

Prints tables and one JSON line last.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import machine
from plotting import BLUE, ORANGE, label_bars, legend_above, picture, without_ticks
from rich.console import Console
from rich.table import Table

from jpaged import LLM, SamplingParams
from jpaged.execution.batch import DrawLayout, pack_parameters, unpack_parameters
from jpaged.execution.constraints import ConstraintsLayout, make_constraints, num_words
from jpaged.execution.draw import draw_tokens
from jpaged.execution.rows import make_rows
from jpaged.step_plan import RowConstraints, RowSampling, StepPlan
from pallas_kernels.sampling.cpu import CpuSampling

HISTORY_TOKENS, PROMPT_TOKENS = 256, 128
ROUNDS, CALLS = 15, 5
XLA, NATIVE = "XLA", "native"
FILTERS = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02}
PENALTIES = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
BIASES = {token_id: 0.5 for token_id in range(100, 116)}
EVERYTHING: dict[str, Any] = FILTERS | PENALTIES | {"constraints": RowConstraints(logit_bias=tuple(BIASES.items()))}
# Name -> (parameters of all rows, logprobs wanted, a grammar mask for each row, flat logits)
CASES: dict[str, tuple[dict[str, Any], bool, bool, bool]] = {
    "greedy": ({}, False, False, False),
    "temperature": ({"temperature": 0.8}, False, False, False),
    "top_p": ({"temperature": 0.8, "top_p": 0.9}, False, False, False),
    "top_p, flat": ({"temperature": 1.0, "top_p": 0.9}, False, False, True),
    "penalties": (PENALTIES, False, False, False),
    "logprobs": ({}, True, False, False),
    "everything": (EVERYTHING, True, False, False),
    "greedy, masked": ({}, False, True, False),
    "everything, masked": (EVERYTHING, True, True, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--no-model", action="store_true", help="the sampler alone")
    parser.add_argument("--plot", metavar="OUT.png")
    arguments = parser.parse_args()
    devices = {str(device.device_kind) for device in jax.devices()}
    where = machine() if devices == {"cpu"} else ", ".join(sorted(devices))
    console = Console()
    forms: dict[str, CpuSampling | None] = {XLA: None}
    if devices == {"cpu"}:
        forms[NATIVE] = CpuSampling.make()
    alone = {
        f"{size:,} {form}": measure_sampler(arguments.rows, size, native)
        for size in arguments.vocabularies
        for form, native in forms.items()
    }
    columns = [f"{name} (µs)" for name in alone]
    table = Table("sampler alone", *columns, title=f"Drawing {arguments.rows} tokens on {where}")
    for name in CASES:
        table.add_row(name, *(f"{times[name]:,}" for times in alone.values()))
    console.print(table)
    result: dict[str, Any] = {"machine": where, "rows": arguments.rows, "sampler_us": alone}
    if not arguments.no_model:
        result["step_us"] = steps = measure_steps(arguments.model, arguments.rows)
        table = Table("decode step", "µs", "x greedy", title=f"{arguments.rows} rows of {arguments.model}")
        for name, microseconds in steps.items():
            table.add_row(name, f"{microseconds:,}", f"{microseconds / steps['greedy']:.2f}")
        console.print(table)
    if arguments.plot:
        plot(arguments.plot, result)
        print(f"wrote {arguments.plot}")
    print(json.dumps(result))


def measure_sampler(num_rows: int, vocabulary: int, native: CpuSampling | None) -> dict[str, int]:
    """Microseconds a call of each case; the best of many rounds, as the work does not vary and machines do."""
    draw = jax.jit(partial(draw_tokens, native=native))
    calls = {name: _prepare(draw, num_rows, vocabulary, *case) for name, case in CASES.items()}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                drawn = call()
            jax.block_until_ready(drawn)
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS)
    return {name: round(1e6 * seconds) for name, seconds in best.items()}


def _prepare(
    draw: Any, num_rows: int, vocabulary: int, settings: dict[str, Any], logprobs: bool, masked: bool, flat: bool
) -> Callable[[], jax.Array]:
    """A call that draws for rows which all have the same parameters, with everything on the device already."""
    generator = np.random.default_rng(0)
    ranks = np.stack([generator.permutation(vocabulary) for _ in range(num_rows)])
    logits = generator.normal(0, 0.5, ranks.shape) if flat else -1.5 * np.log1p(ranks)
    samplings = [RowSampling(**settings, seed=row, prompt_length=PROMPT_TOKENS) for row in range(num_rows)]
    packed = np.array([pack_parameters(sampling) for sampling in [*samplings, RowSampling()]])
    rows = make_rows(num_rows, 2 * HISTORY_TOKENS, 1, 0)._replace(
        tokens=jnp.asarray(generator.integers(0, vocabulary, (num_rows + 1, 2 * HISTORY_TOKENS)), jnp.int32),
        parameters=unpack_parameters(jnp.asarray(packed.T)),
    )
    constraints, layout = make_constraints(num_rows, vocabulary), ConstraintsLayout(vocabulary)
    enter = jax.jit(layout.enter)
    for row, sampling in enumerate(samplings):
        if sampling.constraints is not None:
            constraints = enter(constraints, layout.pack(row, sampling.constraints))
    masks = generator.integers(0, 2**32, (num_rows, num_words(vocabulary)), np.uint32)
    places = list(range(num_rows))
    plan = StepPlan(
        step=0,
        sequence_ids=places,
        row_ids=places,
        starts=[HISTORY_TOKENS - 1] * num_rows,
        counts=[1] * num_rows,
        samples=[True] * num_rows,
        wants_logprobs=logprobs,
        masks=[(place, masks[place]) for place in places] if masked else [],
    )
    draws = DrawLayout(num_rows, num_rows)
    batch = draws.unpack(jnp.asarray(draws.pack(plan)))
    arguments = jax.device_put((logits.astype(np.float32), rows, constraints, batch, masks))
    jax.block_until_ready(draw(*arguments))
    return lambda: draw(*arguments)


def measure_steps(model: str, num_rows: int, num_steps: int = 24, rounds: int = 4) -> dict[str, int]:
    """Median microseconds of a decode step with all rows running."""
    llm = LLM(model, max_model_len=512, max_num_seqs=num_rows, max_num_batched_tokens=512)
    common: dict[str, Any] = {"max_tokens": num_steps, "ignore_eos": True, "detokenize": False}
    biased = PENALTIES | {"logit_bias": BIASES}
    cases = {
        "greedy": SamplingParams(temperature=0.0, **common),
        "temperature": SamplingParams(temperature=0.8, seed=1, **common),
        "top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=1, **common),
        "everything": SamplingParams(**FILTERS, **biased, logprobs=5, seed=1, **common),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, params in cases.items():
            times[name] += _decode_seconds(llm, params, num_rows)
    return {name: round(1e6 * statistics.median(seconds)) for name, seconds in times.items()}


def _decode_seconds(llm: LLM, params: SamplingParams, num_rows: int) -> list[float]:
    """Seconds of each step in which all rows decode."""
    engine = llm.engine
    generator = np.random.default_rng(0)
    outputs = []
    for row in range(num_rows):
        prompt = generator.integers(100, 20_000, 64).tolist()
        outputs.append(engine.add_request(f"row {row}", engine.prepare({"prompt_token_ids": prompt}, params)))
    seconds = []
    while engine.has_work:
        all_decode = all(output.outputs[0].token_ids for output in outputs)
        start = time.perf_counter()
        deltas = engine.step()
        if all_decode and len(deltas) == num_rows and not outputs[0].finished:
            seconds.append(time.perf_counter() - start)
    return seconds


def plot(path: str, figures: dict[str, Any]) -> None:
    """The sampler alone: a panel for each vocabulary, in it two bars for each kind of request."""
    panels: dict[str, dict[str, dict[str, int]]] = {}
    for name, times in figures["sampler_us"].items():
        vocabulary, _, form = name.partition(" ")
        panels.setdefault(vocabulary, {})[form] = times
    title = f"Drawing {figures['rows']} tokens from their logits"
    colours = {XLA: ORANGE, NATIVE: BLUE}
    with picture(path, 2 + 4 * len(panels), 5.6, title, figures["machine"]) as figure:
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (vocabulary, forms) in zip(all_axes, panels.items(), strict=True):
            for place, (form, times) in enumerate(forms.items()):
                offsets = [case + 0.4 * (place - (len(forms) - 1) / 2) for case in range(len(times))]
                milliseconds = [1e-3 * microseconds for microseconds in times.values()]
                bars = axes.barh(offsets, milliseconds, height=0.36, color=colours[form])
                label_bars(bars, milliseconds)
            most = max(max(times.values()) for times in forms.values())
            axes.set(title=f"{vocabulary} token ids", xlabel="milliseconds", xlim=(0, 1.15e-3 * most))
            without_ticks(axes.yaxis)
        all_axes[0].set_yticks(range(len(CASES)), CASES)
        all_axes[0].invert_yaxis()
        legend_above(all_axes[-1], {form: colours[form] for form in colours if form in panels[vocabulary]})


if __name__ == "__main__":
    main()

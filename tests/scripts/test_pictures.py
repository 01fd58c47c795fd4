"""The benchmarks' pictures, each from a few figures."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib import image

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
MACHINE = "2 cores of a machine"
COLD = {"start Python": 0.5, "imports": 1.5, "load weights": 1.0, "load the tokenizer": 0.01, "compile": 20.0}
WARM = COLD | {"compile": 0.5}


def memory(script: ModuleType) -> tuple[Any, ...]:
    trace = script.Trace("3 steps", 4, 16, [1, 2, 3], [0, 1, 1], [0, 2, 1], [0, 0, 1])
    trace.reserved = {policy: [4, 5, 6] for policy in trace.reserved}
    return (trace,)


def prefix(script: ModuleType) -> tuple[Any, ...]:
    on, off = script.Run([1, 2, 0], 1.0, []), script.Run([3, 4, 0], 2.0, [])
    return on, off, {"2 beams": script.Sharing([1, 2], [2, 4], 4)}


def startup(script: ModuleType) -> tuple[Any, ...]:
    cold, warm = ({**phases, script.TOTAL: sum(phases.values()), script.COMPILED: 1} for phases in (COLD, WARM))
    return ({"machine": MACHINE, "dtype": "auto", "cold": cold, "warm": warm | {script.SERVE: 4.0}},)


def latency(script: ModuleType) -> tuple[Any, ...]:
    figures = {"decode_tokens_per_second": 70.0, "time_to_first_token_seconds": 0.02}
    return ({"machine": MACHINE, "dtype": "float32", "results": [{"prompt_tokens": n, **figures} for n in (16, 1024)]},)


def scheduler(script: ModuleType) -> tuple[Any, ...]:
    return [{"rows": rows, "plan_us": rows, "commit_us": 2 * rows} for rows in (64, 256)], MACHINE


def sampler(script: ModuleType) -> tuple[Any, ...]:
    times = {form: dict.fromkeys(script.CASES, 700) for form in (script.XLA, script.NATIVE)}
    return ({"machine": MACHINE, "rows": 64, "sampler_us": {f"49,152 {form}": times[form] for form in times}},)


def peers(script: ModuleType) -> tuple[Any, ...]:
    figures = {"seconds": 2.0, "least": 1.5, "most": 2.5}
    ran = [("offline64", "jpaged"), ("offline64", "other"), ("one:8:8", "jpaged")]
    return ({"machine": MACHINE, "results": [{"workload": w, "engine": e, **figures} for w, e in ran]},)


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("bench_memory", memory),
        ("bench_prefix", prefix),
        ("bench_startup", startup),
        ("bench_latency", latency),
        ("bench_scheduler", scheduler),
        ("bench_sampler", sampler),
        ("compare_peers", peers),
    ],
)
def test_a_picture_shows_something(monkeypatch, tmp_path, name, figures):
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module(name)
    script.plot(str(tmp_path / "picture.png"), *figures(script))
    pixels = image.imread(tmp_path / "picture.png")
    assert 0.02 < (pixels[..., :3] < 0.99).any(axis=-1).mean() < 0.9


def test_short_phases_of_a_start_are_drawn_as_one(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("bench_startup")
    [figures] = startup(script)
    drawn = script.drawn_phases(figures["cold"], figures["warm"])
    assert [*drawn] == ["start Python", "imports", "load weights", "compile", "other"]
    assert drawn["compile"] == {"cold": 20.0, "warm": 0.5} and drawn["other"] == {"cold": 0.01, "warm": 0.01}
    for start in ("cold", "warm"):
        assert sum(seconds[start] for seconds in drawn.values()) == pytest.approx(figures[start][script.TOTAL])

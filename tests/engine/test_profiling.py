"""Profiles: events summed up by what they belong to, and a trace of a real engine."""

import json

import pytest

from jpaged import SamplingParams
from jpaged.engine.profiling import kind_of, read_trace


def op(name: str, start: float, microseconds: float) -> dict:
    return {"ph": "X", "name": name, "ts": start, "dur": microseconds, "args": {"hlo_op": name, "hlo_module": "step"}}


def host(part: str, start: float, microseconds: float) -> dict:
    return {"ph": "X", "name": f"jpaged.{part}", "ts": start, "dur": microseconds}


def test_operations_belong_to_their_innermost_scope():
    assert kind_of("jit(step)/layers/while/body/paged_attention/mul") == "attention"
    assert kind_of("jit(step)/layers/while/body/matmul/dot_general") == "matrix products"
    assert kind_of("jit(step)/layers/while/body/rsqrt") == "layers, rest"
    assert kind_of("jit(draw)/logits/dot_general") == "head"
    assert kind_of("jit(draw)/sampler/cond/branch_1_fun/max") == "sampler"
    assert kind_of("") == "other"


def test_a_trace_is_summed_up_without_counting_anything_twice(tmp_path):
    paths = {("step", "a"): "jit(step)/layers/paged_attention/x", ("step", "b"): "jit(draw)/sampler/y"}
    events = [
        op("while.1", 0, 100),  # a container of the next two
        op("a", 0, 40),
        op("b", 30, 30),  # side by side with the end of the first
        op("a", 80, 20),
        {"ph": "M", "name": "process_name"},
        host("plan", 0, 5),
        host("dispatch", 5, 10),
        host("dispatch", 60, 10),
        host("wait", 20, 30),
    ]
    profile = read_trace(events, paths, tmp_path)
    assert profile.steps == 2
    assert profile.wall_seconds == pytest.approx(100e-6)
    assert profile.gap_seconds == pytest.approx(20e-6)
    assert profile.device_seconds == pytest.approx({"attention": 60e-6, "sampler": 30e-6})
    assert profile.host_seconds == pytest.approx({"plan": 5e-6, "dispatch": 20e-6, "wait": 30e-6, "commit": 0.0})
    assert profile.rows()[0] == ("device: attention", pytest.approx(0.03), pytest.approx(0.6))


def test_an_engine_s_steps_are_told_apart(make_llm, tmp_path):
    llm = make_llm()
    profiler = llm.profile(str(tmp_path))
    with profiler:
        llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(seed=1, max_tokens=8, ignore_eos=True))
    profile = profiler.profile
    assert profile.steps == 8
    assert {"attention", "matrix products", "head", "sampler"} <= set(profile.device_seconds)
    assert all(seconds > 0 for seconds in profile.host_seconds.values())
    assert 0 <= profile.gap_seconds < profile.wall_seconds
    assert json.loads((tmp_path / "profile.json").read_text())["steps"] == 8

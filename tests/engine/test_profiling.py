"""Where time goes: turns of the loop, a trace's events summed up by what they belong to, traces of a real engine."""

import json
from typing import Any

import pytest

from jpaged import ConfigError, SamplingParams
from jpaged.engine.profiling import kind_of, read_trace
from jpaged.engine.step_clock import StepClock
from jpaged.metrics import Observer, StepTimes


def op(name: str, start: float, microseconds: float, program: str = "step") -> dict:
    return {"ph": "X", "name": name, "ts": start, "dur": microseconds, "args": {"hlo_op": name, "hlo_module": program}}


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
    paths = {
        ("step", "a"): "jit(step)/layers/paged_attention/x",
        ("step", "b"): "jit(step)/sampler/y",
        ("draw", "a"): "jit(draw)/logits/z",
    }
    events = [
        op("while.1", 0, 100),  # a container of the next two
        op("a", 0, 40),
        op("b", 30, 30),  # side by side with the end of the first
        op("a", 80, 20),
        op("a", 105, 15, "draw"),
        op("a", 123, 17),
        {"ph": "M", "name": "process_name"},
        host("plan", 0, 5),
        host("dispatch", 5, 10),
        host("dispatch", 60, 10),
        host("wait", 20, 30),
    ]
    profile = read_trace(events, paths, tmp_path)
    assert profile.steps == 2
    assert profile.wall_seconds == pytest.approx(140e-6)
    assert (profile.overhead_seconds, profile.gap_seconds) == pytest.approx((20e-6, 8e-6))
    assert profile.device_seconds == pytest.approx({"attention": 77e-6, "sampler": 30e-6, "head": 15e-6})
    assert profile.host_seconds == pytest.approx({"plan": 5e-6, "dispatch": 20e-6, "wait": 30e-6, "commit": 0.0})
    assert profile.rows()[0] == ("device: attention", pytest.approx(0.0385), pytest.approx(0.55))
    assert "2 steps" in profile.describe() and "device: attention             0.04   55.0%" in profile.describe()


def test_an_engine_s_steps_are_told_apart(make_llm, tmp_path):
    llm = make_llm()
    profiler = llm.profile(str(tmp_path))
    with profiler:
        llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(seed=1, max_tokens=8, ignore_eos=True))
    profile = profiler.profile
    assert profile.steps == 8
    assert {"attention", "matrix products", "head", "sampler"} <= set(profile.device_seconds)
    assert all(seconds > 0 for seconds in profile.host_seconds.values())
    assert 0 <= profile.gap_seconds + profile.overhead_seconds < profile.wall_seconds
    assert json.loads((tmp_path / "profile.json").read_text())["steps"] == 8


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize(("max_tokens", "steps"), [(3, 3), (20, 5)])
def test_an_engine_profiles_its_first_steps_once(make_llm, tmp_path, caplog, max_tokens, steps):
    """Until there are enough of them, or nothing is left to do."""
    with caplog.at_level("INFO", "jpaged.engine.profiling"):
        llm = make_llm(profile_directory=str(tmp_path / "new" / "place"), profile_steps=5)
        llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy(max_tokens))
        llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy(max_tokens))
    [written] = tmp_path.rglob("profile.json")
    assert json.loads(written.read_text())["steps"] == steps
    assert [record.message.startswith(f"profile: {steps} steps") for record in caplog.records] == [True]
    assert (written.parent / "profile.txt").read_text().startswith(f"{steps} steps")
    assert len(list(tmp_path.rglob("*.trace.json.gz"))) == 1


def test_a_profile_that_cannot_be_written_keeps_the_engine_from_starting(make_llm, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write a profile to .*file.* name another directory"):
        make_llm(profile_directory=str(tmp_path / "file"))


class Step:
    """Stands for a dispatched step."""

    def __init__(self, done: bool) -> None:
        self.done = done

    def is_done(self) -> bool:
        return self.done


@pytest.fixture
def clock(monkeypatch):
    """A clock, and what sets its time."""
    now = [0.0]
    monkeypatch.setattr("jpaged.engine.step_clock.time.monotonic", lambda: now[0])
    return StepClock(), lambda seconds: now.__setitem__(0, seconds)


def test_a_gap_lasts_from_when_the_device_was_last_seen_at_work(clock):
    clock, set_time = clock
    before: Any = Step(done=False)
    clock.begin_turn(None)
    clock.dispatched(None)
    assert clock.end_turn().gap == 0  # there was no work before
    set_time(1.0)
    clock.begin_turn(before)
    set_time(1.5)
    clock.dispatched(before)
    assert clock.end_turn().gap == 0  # it was still at work
    set_time(2.0)
    clock.begin_turn(before)
    with clock.part("plan"):
        set_time(2.25)
    clock.look(before)
    before.done = True
    with clock.part("dispatch"):
        set_time(3.0)
    clock.dispatched(before)
    clock.waited()
    assert clock.end_turn() == StepTimes(plan=0.25, dispatch=0.75, wait=0.0, commit=0.0, gap=0.75)
    set_time(10.0)
    clock.begin_turn(None)
    clock.dispatched(None)
    assert clock.end_turn().gap == 7.0  # nothing was with the device all the while
    clock.idle()
    set_time(20.0)
    clock.begin_turn(None)
    clock.dispatched(None)
    assert clock.end_turn().gap == 0.0
    assert (clock.gap_seconds, clock.host_seconds, clock.turn_seconds) == (7.75, 1.0, 1.0)


@pytest.mark.parametrize("overlap", [True, False])
def test_an_engine_s_turns_are_reported_in_parts(make_llm, overlap):
    class Notes(Observer):
        def __init__(self) -> None:
            self.turns: list[StepTimes] = []

        def step_done(self, times: StepTimes, num_tokens: int) -> None:
            self.turns.append(times)

    llm = make_llm(overlap=overlap)
    before, notes = llm.stats(), Notes()
    llm.engine.observer = notes
    llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy(10))
    llm.engine.observer = Observer()
    after = llm.stats()
    assert len(notes.turns) == 10
    assert all(min(times.wait, times.commit, times.gap) >= 0 for times in notes.turns)
    if not overlap:
        # The first step finds a device that was idle without work; each other one waited for commit, plan and dispatch.
        assert notes.turns[0].gap == 0
        for last, times in zip(notes.turns, notes.turns[1:], strict=False):
            assert times.gap >= last.commit + times.plan + times.dispatch
    for total, name in (("step_seconds", "total"), ("step_host_seconds", "host"), ("step_gap_seconds", "gap")):
        sum_of_turns = sum(getattr(times, name) for times in notes.turns)
        assert getattr(after, total) - getattr(before, total) == pytest.approx(sum_of_turns)

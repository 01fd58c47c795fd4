"""Overlap on equals overlap off: everything that requests can ask for, at once, in a pool that is too small for it."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import NoneType

import pytest

from jpaged import LLM, BeamSearchParams, SamplingParams, StructuredOutputs
from jpaged.params import Params
from jpaged.request import RequestOutput, TokenLogprobs
from jpaged.scheduling.sequence import SequenceGroup
from jpaged.step_plan import ON_DEVICE, StepPlan
from tests.cli.tiny_chat_model import write_tiny_chat_model
from tests.engine.test_parameters import random_params
from tests.fakes.plan_checks import check_plan

MAX_NUM_SEQS = 8
AMPLE = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 16}
# Room for any request alone, and a host tier of 8 pages of 2 KiB: who has more, or comes when it is full, recomputes.
TIGHT = AMPLE | {"num_pages": 48, "host_tier_gib": 8 * 2**11 / 2**30, "preemption": "swap"}
SEEDS = 0, 1, 4, 5  # with these, groups give way by swaps and by recomputing in each tight run
TOLERANCE = 2e-4  # of logprobs
ALWAYS = "page copies", "row copies", "prefix_cache_hits_tokens", "given up while queued", "given up while in a row"


@dataclass(slots=True)
class Job:
    """A request, the step before which it comes, and when it is given up: after the step with its `abort_after`th
    token, or, if it is expendable, once it has had to give way."""

    prompt: list[int]
    params: Params
    arrival: int
    abort_after: int | None = None
    is_expendable: bool = False


@dataclass(slots=True)
class Watch:
    """What has happened while jobs were served: counts by name, and the places of jobs that were given up."""

    counts: Counter[str] = field(default_factory=Counter)
    given_up: set[int] = field(default_factory=set)

    def note(self, plan: StepPlan) -> None:
        check_plan(plan)
        self.counts["page copies"] += len(plan.page_copies)
        self.counts["row copies"] += len(plan.row_copies)
        self.counts["tokens known on the device only"] += plan.token_ids.count(ON_DEVICE)
        self.counts["most rows"] = max(self.counts["most rows"], plan.num_seqs)


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())  # a byte-level vocabulary begins with the bytes


def one_of_each(generator: random.Random) -> list[Params]:
    """Every way to go on: greedy, seeded, penalised, with logprobs, as samples, as beams, by stops, words, grammars."""

    def common(least: int = 6) -> dict:
        return {"seed": generator.getrandbits(64), "max_tokens": generator.randint(least, 40), "ignore_eos": True}

    pair = lambda: "".join(generator.sample("abcdefgh", 2))  # noqa: E731
    return [
        SamplingParams(temperature=0.0, **common()),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=5, **common()),
        random_params(generator, n=1, max_tokens=40, min_tokens=generator.randint(0, 12)),
        SamplingParams(n=3, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.3, logprobs=0, **common()),
        BeamSearchParams(beam_width=generator.randint(2, 4), max_tokens=generator.randint(8, 20), length_penalty=0.8),
        SamplingParams(
            temperature=3.0, allowed_token_ids=ids("abcdefgh"), stop=[pair() for _ in range(4)], **common(18)
        ),
        SamplingParams(
            n=generator.randint(1, 2),
            temperature=3.0,
            allowed_token_ids=ids("abcd"),
            bad_words=("ab", "ca", "bcb"),
            stop_token_ids=ids("d"),
            min_tokens=6,
            **common(),
        ),
        SamplingParams(structured_outputs=StructuredOutputs(regex="[a-f]{3,12}-(x|y)+[0-9]{2}!"), **common(18)),
    ]


def mixed_jobs(seed: int) -> list[Job]:
    """4 x MAX_NUM_SEQS of them, with priorities; many begin alike, up to a page's end or to the middle of a page."""
    generator = random.Random(seed)
    bases = [[generator.randrange(3, 128) for _ in range(24)] for _ in range(2)]
    params = [one for _ in range(MAX_NUM_SEQS // 2) for one in one_of_each(generator)]
    generator.shuffle(params)
    jobs: list[Job] = []
    for place, wish in enumerate(params):
        shared = generator.choice([0, 8, 15, 16, 17, 24])
        own = generator.choice([0, 1, generator.randint(1, 15)]) if shared else generator.randint(1, 30)
        prompt = generator.choice(bases)[:shared] + [generator.randrange(3, 128) for _ in range(own)]
        jobs.append(Job(prompt, replace(wish, priority=generator.randrange(3)), max(0, place - 12) // 2))
    queued, rest = generator.sample(jobs[8:14], 2), generator.sample(jobs[14:], 14)  # 14 come at once
    for job, count in zip(queued + rest, [0, 0, 0, 1, 1, 2, 5, 9], strict=False):
        job.abort_after = count
    for job in rest[6:]:
        job.is_expendable = True
    return jobs


def serve(llm: LLM, jobs: list[Job], watch: Watch) -> list[RequestOutput]:
    """Serve all jobs from an empty cache on, and give up those that are to be given up; look at the books each step."""
    engine, takes_priorities = llm.engine, llm.engine.parts.config.policy == "priority"
    engine.reset()  # nothing is cached, and nothing is left of a run that failed
    outputs: list[RequestOutput] = []
    for step in range(10_000):
        while len(outputs) < len(jobs) and jobs[len(outputs)].arrival <= step:
            job = jobs[len(outputs)]
            params = job.params if takes_priorities else replace(job.params, priority=0)
            request = engine.prepare({"prompt_token_ids": job.prompt}, params)
            outputs.append(engine.add_request(f"job {len(outputs)}", request))
        if len(outputs) == len(jobs) and not engine.has_work:
            break
        engine.step()
        engine.check_invariants()
        groups = {request.output.request_id: request.group for request in engine._requests.values()}
        for place, job in enumerate(jobs):
            group = groups.get(f"job {place}")
            if group is not None and is_given_up(job, group):
                watch.counts[f"given up while {where_it_is(group)}"] += 1
                assert engine.abort_request(f"job {place}")
                watch.given_up.add(place)
                engine.check_invariants()
    return outputs


def is_given_up(job: Job, group: SequenceGroup) -> bool:
    if job.is_expendable and group.num_preemptions and group.live[0].row < 0:
        return True
    num_drawn = max(len(sequence.output_token_ids) for sequence in group.live)
    return job.abort_after is not None and num_drawn >= job.abort_after


def where_it_is(group: SequenceGroup) -> str:
    if group.live[0].row >= 0:
        return "in a row"
    return "swapped out" if group.is_swapped else "waiting again" if group.num_preemptions else "queued"


def watched(llm: LLM, jobs: list[Job], patch: pytest.MonkeyPatch) -> tuple[list[RequestOutput], Watch]:
    """Serve jobs and look at all that must hold whatever they are."""
    watch, runner, before = Watch(), llm.engine.parts.runner, llm.stats()
    start = runner.start
    with patch.context() as patched:
        patched.setattr(runner, "start", lambda plan: (watch.note(plan), start(plan))[1])
        outputs = serve(llm, jobs, watch)
    after = llm.stats()
    for kind in ("preemptions_swap", "preemptions_recompute", "prefix_cache_hits_tokens", "compilations_after_ready"):
        watch.counts[kind] = getattr(after, kind) - getattr(before, kind)
    assert (after.pages_used, after.host_pages_used, after.rows_running, after.rows_waiting) == (0, 0, 0, 0)
    assert watch.counts["compilations_after_ready"] == 0
    assert [place for place, output in enumerate(outputs) if not output.finished] == sorted(watch.given_up)
    return outputs, watch


def check_same(found: RequestOutput, expected: RequestOutput) -> None:
    """Of a request that ended by itself: all that its user sees."""
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert getattr(one, name) == getattr(other, name), name
        for name in ("cumulative_logprob", "score"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=TOLERANCE), name
        check_same_logprobs(one.logprobs, other.logprobs)
    check_same_logprobs(found.prompt_logprobs, expected.prompt_logprobs)


def check_same_logprobs(found: list | None, expected: list | None) -> None:
    for one, other in zip_longest(found or [], expected or []):
        assert (one is None) == (other is None)  # a prompt's first token has none
        common = close_entries(one or {}, other or {})
        assert len(one or {}) == len(other or {}) <= common + 1  # the last place may go to one that is as likely


def close_entries(one: TokenLogprobs, other: TokenLogprobs) -> int:
    common = one.keys() & other.keys()
    assert all(abs(one[token].logprob - other[token].logprob) < TOLERANCE for token in common)
    return len(common)


def check_same_beginning(found: RequestOutput, expected: RequestOutput) -> None:
    """Of a request that was given up in one run at least: what both have."""
    for one, other in zip(found.outputs, expected.outputs, strict=False):
        length = min(len(one.token_ids), len(other.token_ids))
        assert one.token_ids[:length] == other.token_ids[:length]


@pytest.mark.parametrize(("seed", "policy"), [(seed, ("fcfs", "priority")[seed % 2]) for seed in SEEDS])
def test_overlap_changes_nothing_at_any_load(tiny_dirs, make_llm, tmp_path_factory, monkeypatch, seed, policy):
    """Fault 1: 4 x max_num_seqs requests with preemptions of both kinds, forks and cancellations, against a pool in
    which nobody gives way and steps that wait for each other."""
    if "chat" not in tiny_dirs:
        tiny_dirs["chat"] = write_tiny_chat_model(tmp_path_factory.mktemp("chat"))
    jobs = mixed_jobs(seed)
    expected, reference = watched(make_llm("chat", overlap=False, **AMPLE), jobs, monkeypatch)
    ends = {(type(one.stop_reason), one.finish_reason) for output in expected for one in output.outputs}
    assert ends >= {(str, "stop"), (int, "stop"), (NoneType, "stop"), (NoneType, "length")}
    for options in ({"overlap": True, **AMPLE}, *({"overlap": on, "policy": policy, **TIGHT} for on in (False, True))):
        outputs, watch = watched(make_llm("chat", **options), jobs, monkeypatch)
        for place, (found, other) in enumerate(zip(outputs, expected, strict=True)):
            check = check_same_beginning if place in watch.given_up | reference.given_up else check_same
            check(found, other)
        assert {place for place in watch.given_up if not jobs[place].is_expendable} == reference.given_up
        counts, is_tight = watch.counts, "num_pages" in options
        assert all(counts[name] for name in ALWAYS) and counts["most rows"] > MAX_NUM_SEQS // 2
        assert bool(counts["tokens known on the device only"]) == options["overlap"]
        assert bool(counts["preemptions_swap"]) == bool(counts["preemptions_recompute"]) == is_tight

"""Every sampling parameter through the engine, mixed in one batch, against a plain reference; nothing compiles."""

import random
from dataclasses import replace

import numpy as np
import pytest

from jpaged import LLM, InvalidRequestError, SamplingParams
from tests.fakes.dense_attention import dense_logits
from tests.fakes.plain_sampling import draw, log_softmax, processed_logits

VOCABULARY, EOS, LONGEST = 128, 2, 96


@pytest.fixture
def llm(make_llm):
    """The usual engine; afterwards every page must be back and nothing compiled."""
    llm = make_llm()
    before = llm.stats().compilations_after_ready  # other tests' own jax code may have compiled
    yield llm
    llm.engine.check_invariants()
    assert (llm.stats().pages_used, llm.stats().compilations_after_ready) == (0, before)


def random_params(generator: random.Random, **fixed) -> SamplingParams:
    """Any parameters that a model without a tokenizer can honour."""
    chance = lambda value, otherwise, likely=0.4: value if generator.random() < likely else otherwise  # noqa: E731
    some_ids = lambda most: tuple(generator.sample(range(VOCABULARY), generator.randint(1, most)))  # noqa: E731
    max_tokens = generator.randint(1, 14)
    return SamplingParams(
        **{
            "temperature": chance(0.0, generator.uniform(0.1, 2.0)),
            "top_p": chance(generator.uniform(0.05, 1.0), 1.0),
            "top_k": chance(generator.randint(-1, 140), 0),
            "min_p": chance(generator.uniform(0.0, 0.6), 0.0),
            "seed": generator.getrandbits(64),
            "presence_penalty": chance(generator.uniform(-2, 2), 0.0),
            "frequency_penalty": chance(generator.uniform(-2, 2), 0.0),
            "repetition_penalty": chance(generator.uniform(0.5, 2.0), 1.0),
            "logit_bias": chance({token: generator.uniform(-8, 8) for token in some_ids(100)}, None),
            "allowed_token_ids": chance(some_ids(60), None, 0.25),
            "max_tokens": max_tokens,
            "min_tokens": chance(generator.randint(0, max_tokens), 0),
            "stop_token_ids": chance(some_ids(20), ()),
            "ignore_eos": chance(True, False),
            "logprobs": chance(generator.choice([0, 1, 5, 20, 21, 60, -1]), None),
            "prompt_logprobs": chance(generator.choice([0, 3, 20, 50, -1]), None, 0.2),
            "skip_reading_prefix_cache": chance(True, False),
            "cache_salt": chance("salt", ""),
            "truncate_prompt_tokens": chance(generator.choice([-1, 1, 4, 30]), None, 0.2),
            "output_kind": generator.choice(["delta", "cumulative", "final_only"]),
            "n": chance(generator.randint(1, 4), 1, 0.2),
            **fixed,
        }
    )


def random_prompt(generator: random.Random, longest: int = 40) -> list[int]:
    return [generator.randrange(3, VOCABULARY) for _ in range(generator.randint(1, longest))]


def reference_logits(llm: LLM, tokens: list[int]) -> np.ndarray:
    """[len(tokens), V]; one compiled shape for all lengths."""
    padded = np.zeros(LONGEST, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(dense_logits(llm.engine.parts.runner.model, padded))[: len(tokens)]


def check_output(llm: LLM, prompt: list[int], params: SamplingParams, output) -> None:
    """Compare every token, logprob and reason to end with what the documented order gives."""
    if params.truncate_prompt_tokens is not None:
        keep = params.truncate_prompt_tokens if params.truncate_prompt_tokens > 0 else LONGEST - 1
        prompt = prompt[-keep:]
    assert output.prompt_token_ids == prompt
    for completion in output.outputs:
        tokens = prompt + completion.token_ids
        logits = reference_logits(llm, tokens)
        for place, token in enumerate(completion.token_ids):
            position = len(prompt) + place
            own = processed_logits(logits[position - 1], tokens[:position], len(prompt), params, eos_token_ids=[EOS])
            assert token == draw(own, params, position, completion.index), (params, place)
        check_logprobs(params.logprobs, completion.logprobs, logits[len(prompt) - 1 :], completion.token_ids)
        if params.logprobs is not None:
            own = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
            assert completion.cumulative_logprob == pytest.approx(sum(own))
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        ends = [i for i, token in enumerate(completion.token_ids) if token in stops and i >= params.min_tokens]
        if completion.finish_reason == "stop":
            assert ends == [len(completion.token_ids) - 1]
            last = completion.token_ids[-1]
            assert completion.stop_reason == (last if last in params.stop_token_ids else None)
        else:
            assert (completion.finish_reason, ends) == ("length", [])
            assert len(completion.token_ids) == min(params.max_tokens or LONGEST, LONGEST - len(prompt))
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        check_logprobs(params.prompt_logprobs, output.prompt_logprobs[1:], reference_logits(llm, prompt), prompt[1:])


def check_logprobs(count: int | None, entries, logits: np.ndarray, tokens: list[int]) -> None:
    """`logits[i]` are those that `tokens[i]` was drawn from; `entries` must hold the raw logprobs."""
    if count is None:
        assert entries is None
        return
    assert len(entries) == len(tokens)
    for entry, row, token in zip(entries, logits, tokens, strict=False):
        logprobs = log_softmax(row)
        best = np.argsort(-logprobs, kind="stable")[: VOCABULARY if count == -1 else count].tolist()
        assert list(entry)[: len(best)] == best
        assert set(entry) == {*best, token}
        for token_id, found in entry.items():
            assert found.logprob == pytest.approx(logprobs[token_id], abs=2e-4)
            assert found.rank == int((logprobs >= logprobs[token_id]).sum())
            assert found.decoded_token is None  # there is no tokenizer


@pytest.mark.parametrize("overlap", [True, False])
def test_random_parameters_mixed_in_one_batch_equal_the_plain_reference(make_llm, overlap):
    llm = make_llm(overlap=overlap)
    before = llm.stats().compilations_after_ready
    generator = random.Random(11)
    prompts = [random_prompt(generator) for _ in range(60)]
    params = [random_params(generator) for _ in prompts]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert (llm.stats().pages_used, llm.stats().compilations_after_ready) == (0, before)
    for prompt, wish, output in zip(prompts, params, outputs, strict=True):
        check_output(llm, prompt, wish, output)


def test_two_thousand_parameter_sets_compile_nothing(llm):
    """Lengths around every bucket, any mix of parameters: the compile counter stays where it is (the fixture looks)."""
    generator = random.Random(5)
    prompts = [random_prompt(generator, longest=80) for _ in range(2000)]
    params = [random_params(generator, max_tokens=generator.randint(4, 5), min_tokens=0) for _ in prompts]
    for first in range(0, 2000, 250):
        batch = slice(first, first + 250)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[batch]], params[batch])
        assert all(completion.finish_reason for output in outputs for completion in output.outputs)


def seeded_requests(count: int) -> tuple[list, list[SamplingParams]]:
    generator = random.Random(count)
    prompts = [{"prompt_token_ids": random_prompt(generator, 30)} for _ in range(count)]
    fixed = {"prompt_logprobs": None, "truncate_prompt_tokens": None, "n": 1, "min_tokens": 20, "max_tokens": 32}
    return prompts, [random_params(generator, **fixed) for _ in prompts]


def all_tokens(outputs) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 30, "host_tier_gib": 0.001, "preemption": "swap"},
        {"num_pages": 30, "preemption": "recompute"},
        {"overlap": False},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 8},
        {"tensor_parallel_size": 2},
    ],
    ids=["swap", "recompute", "no-overlap", "no-prefix-cache", "small-budget", "tensor-parallel"],
)
def test_a_seed_gives_the_same_tokens_whatever_the_engine_does(make_llm, options):
    """Penalties included: their counts come from the row's own history, wherever its pages have been."""
    prompts, params = seeded_requests(24)
    expected = all_tokens(make_llm().generate(prompts, params))
    other = make_llm(**options)
    preemptions = other.stats().preemptions
    assert all_tokens(other.generate(prompts, params)) == expected
    if "num_pages" in options:
        assert other.stats().preemptions > preemptions
    order = random.Random(1).sample(range(24), 24)
    shuffled = all_tokens(other.generate([prompts[place] for place in order], [params[place] for place in order]))
    assert [shuffled[order.index(place)] for place in range(24)] == expected
    for place in (0, 7, 23):
        assert all_tokens(other.generate(prompts[place], params[place])) == [expected[place]]


def test_samples_of_one_request_differ_and_no_seed_means_fresh_noise(llm):
    prompt = {"prompt_token_ids": [5, 6, 7]}
    params = SamplingParams(n=8, seed=3, max_tokens=10, ignore_eos=True)
    [first] = all_tokens(llm.generate(prompt, params))
    assert len({tuple(tokens) for tokens in first}) == 8
    assert all_tokens(llm.generate(prompt, params)) == [first]
    fresh = replace(params, seed=None)
    drawn = {tuple(tokens) for _ in range(3) for tokens in all_tokens(llm.generate(prompt, fresh))[0]}
    assert len(drawn) == 24


def test_penalised_greedy_with_overlap_equals_without(make_llm):
    generator = random.Random(8)
    prompts = [{"prompt_token_ids": random_prompt(generator, 30)} for _ in range(32)]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=20,
            ignore_eos=True,
            repetition_penalty=generator.choice([1.0, 1.3]),
            frequency_penalty=generator.choice([0.0, 0.4]),
            presence_penalty=generator.choice([0.0, 0.6]),
        )
        for _ in prompts
    ]
    assert all_tokens(make_llm().generate(prompts, params)) == all_tokens(
        make_llm(overlap=False).generate(prompts, params)
    )


def test_prompt_logprobs_do_not_depend_on_order_or_cache(llm):
    """The same prompts scored in two orders, cold and warm."""
    generator = random.Random(21)
    shared = random_prompt(generator, 30) + [9] * 20
    prompts = [{"prompt_token_ids": shared + random_prompt(generator, 20)} for _ in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)

    def score(order):
        outputs = llm.generate([prompts[place] for place in order], params)
        return {place: output.prompt_logprobs for place, output in zip(order, outputs, strict=True)}

    llm.flush_prefix_cache()
    cold = score([0, 1, 2, 3, 4, 5])
    llm.generate(prompts, SamplingParams(max_tokens=1))  # fills the cache
    for scores in (score([5, 3, 1, 0, 2, 4]), score([0])):
        for place, entries in scores.items():
            assert len(entries) == len(cold[place])
            for entry, expected in zip(entries[1:], cold[place][1:], strict=True):
                assert list(entry) == list(expected)
                for token_id, found in entry.items():
                    assert found.logprob == pytest.approx(expected[token_id].logprob, abs=1e-4)


def test_output_kinds(llm):
    prompt = {"prompt_token_ids": [5, 6, 7]}
    wish = SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True, logprobs=1)
    [whole] = llm.generate(prompt, wish)
    kinds = {
        kind: list(llm.stream(prompt, replace(wish, output_kind=kind)))
        for kind in ("delta", "cumulative", "final_only")
    }
    for index, completion in enumerate(whole.outputs):
        deltas, sums, finals = ([d for d in kinds[kind] if d.index == index] for kind in kinds)
        assert [len(delta.token_ids) for delta in deltas] == [1] * 6
        assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
        assert [delta.token_ids for delta in sums] == [completion.token_ids[: count + 1] for count in range(6)]
        assert [len(delta.logprobs) for delta in sums] == [1, 2, 3, 4, 5, 6]
        assert [(delta.token_ids, delta.finish_reason, len(delta.logprobs)) for delta in finals] == [
            (completion.token_ids, "length", 6)
        ]
    for deltas in kinds.values():
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"stop_token_ids": (128,)}, "stop_token_ids holds 128, the vocabulary has ids 0..127"),
        ({"allowed_token_ids": (5, 500)}, "allowed_token_ids holds 500, the vocabulary has ids 0..127"),
        ({"logit_bias": {128: 1.0}}, "logit_bias holds 128, the vocabulary has ids 0..127"),
        ({"logprobs": 129}, "logprobs is 129, it must be at most the vocabulary's 128, or -1 for all of it"),
        ({"prompt_logprobs": 200}, "prompt_logprobs is 200, it must be at most the vocabulary's 128"),
        ({"stop": "x"}, "stop is set, but this model has no tokenizer"),
        ({"bad_words": ("x",)}, "bad_words is set, but this model has no tokenizer"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(llm, wish, message):
    with pytest.raises(InvalidRequestError, match=message.replace(".", r"\.")):
        llm.generate({"prompt_token_ids": [5]}, SamplingParams(**wish))


def test_more_logprobs_than_memory_should_hold_are_refused(llm, monkeypatch):
    monkeypatch.setattr("jpaged.engine.preparation.MAX_LOGPROB_ENTRIES", 1000)
    llm.generate({"prompt_token_ids": [5]}, SamplingParams(logprobs=-1, max_tokens=7))
    with pytest.raises(InvalidRequestError, match="which makes 1024 entries for 8 tokens, the limit is 1000"):
        llm.generate({"prompt_token_ids": [5]}, SamplingParams(logprobs=-1, max_tokens=8))

"""The engine on tiny models, in float32: the same tokens whatever the company, and books that balance."""

import dataclasses
import json
import random
import shutil
import threading

import numpy as np
import pytest

from jpaged import LLM, CapacityError, ConfigError, InvalidRequestError, ModelError, SamplingParams
from jpaged.metrics import EngineStats
from jpaged.request import TokensPrompt
from tests.fakes.dense_attention import dense_logits
from tests.fakes.tiny_models import TINY_LLAMA, TINY_OPTIONS, tiny_buckets, write_random_checkpoint


def random_prompts(count: int, seed: int = 0, longest: int = 60) -> list[TokensPrompt]:
    generator = random.Random(seed)
    return [
        {"prompt_token_ids": [generator.randrange(3, 128) for _ in range(generator.randint(1, longest))]}
        for _ in range(count)
    ]


def greedy(max_tokens: int = 12, **settings) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **settings)


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def llm(make_llm):
    """The usual engine; afterwards every page must be back and nothing compiled."""
    llm = make_llm()
    before = llm.stats().compilations_after_ready  # other tests' own jax code may have compiled
    yield llm
    llm.engine.check_invariants()
    stats = llm.stats()
    assert (stats.pages_used, stats.rows_running, stats.rows_waiting) == (0, 0, 0)
    assert stats.compilations_after_ready == before


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_greedy_equals_a_dense_model_without_pages(make_llm, name):
    llm = make_llm(name)
    prompts = random_prompts(5, seed=1)
    model = llm.engine.parts.runner.model
    for prompt, generated in zip(prompts, tokens(llm.generate(prompts, greedy(6))), strict=True):
        history = list(prompt["prompt_token_ids"])
        for token in generated:
            logits = np.asarray(dense_logits(model, np.array(history, np.int32)))[-1]
            assert token == logits.argmax()
            history.append(token)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_alone_in_company_in_another_order_and_without_overlap(make_llm, name):
    llm, plain = make_llm(name), make_llm(name, overlap=False)
    prompts = random_prompts(64)
    together = tokens(llm.generate(prompts, greedy()))
    assert all(len(generated) == 12 for generated in together)
    assert tokens(plain.generate(prompts, greedy())) == together
    order = random.Random(3).sample(range(64), 64)
    shuffled = tokens(llm.generate([prompts[place] for place in order], greedy()))
    assert [shuffled[order.index(place)] for place in range(64)] == together
    for place in range(0, 64, 9):
        assert tokens(llm.generate(prompts[place], greedy())) == [together[place]]


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_tensor_parallel_gives_the_same_tokens(make_llm, name):
    prompts = random_prompts(12, seed=4)
    expected = tokens(make_llm(name).generate(prompts, greedy()))
    for size in (2, 4):
        assert tokens(make_llm(name, tensor_parallel_size=size).generate(prompts, greedy())) == expected


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_changes_nothing(make_llm, overlap):
    """A pool of 1.2 x one request and 8 requests: all finish with the tokens of a big pool."""
    prompts = random_prompts(8, seed=5, longest=40)
    expected = tokens(make_llm().generate(prompts, greedy(30)))
    llm = make_llm(num_pages=21, overlap=overlap)
    llm.flush_prefix_cache()
    before = llm.stats().preemptions
    assert tokens(llm.generate(prompts, greedy(30))) == expected
    stats = llm.stats()
    assert 0 < stats.preemptions - before <= 16 and stats.pages_used == 0


@pytest.mark.parametrize("budget", [1, 7, 13])
def test_any_token_budget_works(make_llm, budget):
    prompts = random_prompts(6, seed=6, longest=20)
    expected = tokens(make_llm().generate(prompts, greedy(5)))
    assert tokens(make_llm(max_num_batched_tokens=budget, max_num_seqs=4).generate(prompts, greedy(5))) == expected


def test_a_seed_gives_the_same_tokens_alone_in_company_and_after_preemption(llm, make_llm):
    prompts = random_prompts(8, seed=7, longest=40)
    params = [SamplingParams(temperature=1.0, seed=100 + place, max_tokens=30, ignore_eos=True) for place in range(8)]
    together = tokens(llm.generate(prompts, params))
    assert tokens(llm.generate(prompts[::-1], params[::-1]))[::-1] == together
    assert tokens(llm.generate(prompts[3], params[3])) == [together[3]]
    small = make_llm(num_pages=21)
    assert tokens(small.generate(prompts, params)) == together
    assert tokens(llm.generate(prompts[3], dataclasses.replace(params[3], seed=1))) != [together[3]]


def test_without_a_seed_every_request_draws_its_own_noise(llm):
    prompt = random_prompts(1)[0]
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    assert len({tuple(generated) for generated in tokens(llm.generate([prompt] * 6, params))}) == 6


def test_what_ends_a_sequence_is_reported(llm):
    prompt = random_prompts(1, seed=8)[0]
    [free] = llm.generate(prompt, greedy(20))
    generated = free.outputs[0].token_ids
    assert (free.outputs[0].finish_reason, free.outputs[0].stop_reason) == ("length", None)
    place = next(place for place in range(5, 20) if generated[place] not in generated[:place])
    [stopped] = llm.generate(prompt, greedy(20, stop_token_ids=(generated[place],)))
    assert stopped.outputs[0].token_ids == generated[: place + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", generated[place])


def test_an_end_of_sequence_token_stops_unless_ignored(tiny_dirs, make_llm):
    prompt = random_prompts(1, seed=9)[0]
    generated = tokens(make_llm().generate(prompt, greedy(20)))[0]
    place = next(place for place in range(3, 20) if generated[place] not in generated[:place])
    source, target = tiny_dirs["llama"], tiny_dirs["llama"].parent / "other_eos"
    target.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": [127, generated[place]]}
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").symlink_to(source / "model.safetensors")
    tiny_dirs["other_eos"] = target
    llm = make_llm("other_eos")
    [stopped] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=20))
    assert stopped.outputs[0].token_ids == generated[: place + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", None)
    assert tokens(llm.generate(prompt, greedy(20))) == [generated]


def test_without_max_tokens_a_sequence_fills_the_context(llm):
    prompt = random_prompts(1, seed=10)[0]
    [output] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 96


def test_random_parameters_and_lengths_compile_nothing(llm):
    generator = random.Random(11)
    prompts = random_prompts(80, seed=12, longest=90)
    params = [
        SamplingParams(
            temperature=generator.choice([0.0, 0.3, 1.0, 3.0]),
            top_p=generator.choice([1.0, 0.9, 0.01]),
            top_k=generator.choice([-1, 0, 1, 40, 10_000]),
            min_p=generator.choice([0.0, 0.1, 1.0]),
            seed=generator.choice([None, 0, 2**64 - 1]),
            max_tokens=generator.choice([None, 1, 5]),
            ignore_eos=generator.random() < 0.5,
            stop_token_ids=tuple(generator.sample(range(128), generator.randint(0, 5))),
        )
        for _ in prompts
    ]
    outputs = llm.generate(prompts, params)
    assert all(output.finished and output.outputs[0].token_ids for output in outputs)
    assert all(0 <= token < 128 for generated in tokens(outputs) for token in generated)


@pytest.mark.parametrize("steps", range(6))
def test_an_aborted_request_gives_its_pages_back_at_once_and_leaves_the_others_alone(llm, steps):
    """Aborted while queued, in prefill and in decode, with a step in flight."""
    engine = llm.engine
    prompts = random_prompts(20, seed=13)
    expected = tokens(llm.generate(prompts, greedy()))
    outputs = [
        engine.add_request(f"r{place}", engine.prepare(prompt, greedy())) for place, prompt in enumerate(prompts)
    ]
    for _ in range(steps):
        engine.step()
    for place in range(0, 20, 2):
        assert engine.abort_request(f"r{place}") is not outputs[place].finished
        engine.check_invariants()
    while engine.has_work:
        engine.step()
    assert tokens(outputs[1::2]) == expected[1::2]


def test_stopping_a_stream_early_frees_its_pages(llm):
    stream = llm.stream(random_prompts(1)[0], greedy())
    assert next(stream).token_ids
    stream.close()
    assert llm.stats().pages_used == 0


def test_stats_is_a_dataclass_that_says_how_full_the_pages_are(make_llm):
    llm = make_llm(page_size=16, num_pages=100)
    llm.generate(random_prompts(16, longest=80), greedy(2))
    stats = llm.stats()
    assert dataclasses.is_dataclass(stats) and isinstance(stats, EngineStats)
    assert stats.pages_total == 100 and stats.pages_used == 0
    assert stats.pages_free + stats.pages_cached == 100 and stats.pages_cached > 0
    assert 0.5 < stats.kv_utilisation <= 1
    assert stats.buckets == tiny_buckets() and stats.steps > 0


def test_a_second_start_compiles_nothing(make_llm):
    make_llm()
    config = make_llm().engine.parts.config
    again = LLM(config.model, **config.options())
    assert again.stats().compilations == 0
    assert all(program.was_read for program in again.engine.parts.runner._programs._programs)  # nor traces
    assert tokens(again.generate(random_prompts(2), greedy())) == tokens(
        make_llm().generate(random_prompts(2), greedy())
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_hidden_layers": 3}, r"missing: model\.layers\.2"), ({"intermediate_size": 64}, "of another shape")],
    ids=str,
)
def test_a_start_that_fails_says_why_and_leaves_no_threads(tiny_dirs, tmp_path, change, message):
    source = tiny_dirs["llama"]
    shutil.copy(source / "model.safetensors", tmp_path)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        LLM(str(tmp_path), **TINY_OPTIONS)
    left = [thread for thread in threading.enumerate() if thread.name.startswith("jpaged-")]
    for thread in left:
        thread.join(60)
    assert not any(thread.is_alive() for thread in left)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": []}, "the prompt has no tokens"),
        ({"prompt_token_ids": [5, 128]}, r"holds 128, the vocabulary has ids 0\.\.127"),
        ({"prompt_token_ids": [5, -1]}, "holds -1, token ids are at least 0"),
        ({"prompt_token_ids": [5, 1.5]}, r"holds 1\.5, token ids are whole numbers"),
        ({"prompt_token_ids": [5] * 96}, "the prompt has 96 tokens, the limit is 95 .* shorten it"),
        ("text", "no tokenizer"),
        (17, "a prompt is text or"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_refused_alone(llm, prompt, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, greedy())
    good = random_prompts(1)[0]
    running = llm.engine.add_request("good", llm.engine.prepare(good, greedy()))
    llm.engine.step()
    with pytest.raises(InvalidRequestError, match=message):
        llm.engine.prepare(prompt, greedy())
    while llm.engine.has_work:
        llm.engine.step()
    assert tokens([running]) == tokens(llm.generate(good, greedy()))


def test_one_bad_prompt_among_many_is_named_before_anything_runs(llm):
    steps = llm.stats().steps
    with pytest.raises(InvalidRequestError, match="prompt 1 of 3: the prompt has no tokens"):
        llm.generate([{"prompt_token_ids": [5]}, {"prompt_token_ids": []}, {"prompt_token_ids": [6]}], greedy())
    assert llm.stats().steps == steps


def test_what_the_pool_can_never_hold_is_refused_alone(make_llm):
    llm = make_llm(num_pages=21)
    with pytest.raises(CapacityError, match=r"needs 23 pages of 4 tokens .* the pool has 21; lower max_tokens"):
        llm.generate({"prompt_token_ids": [5] * 60}, greedy(30))
    assert len(tokens(llm.generate({"prompt_token_ids": [5] * 60}, greedy(25)))[0]) == 25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, r"temperature is -0\.1, it must be at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, r"top_p is 0\.0, it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1"),
        ({"top_k": -2}, "top_k is -2, it must be a whole number of at least -1"),
        ({"min_p": 2}, "min_p is 2, it must be at least 0 and at most 1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"max_tokens": 0}, "max_tokens is 0, it must be a whole number of at least 1"),
        ({"max_tokens": "5"}, "max_tokens is '5'"),
        ({"stop_token_ids": (-4,)}, "stop_token_ids holds -4"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, it must be a list of token ids"),
        ({"top_k": 2**40}, "top_k is 1099511627776, it must be a whole number of at least -1 and at most 2147483647"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no', it must be true or false"),
        ({"cache_salt": 5}, "cache_salt is 5, it must be a text"),
        ({"cache_salt": "\ud800"}, "it must be a text that UTF-8 can hold"),
        ({"n": 0}, "n is 0"),
    ],
    ids=str,
)
def test_a_bad_parameter_names_the_field_the_value_and_the_range(settings, message):
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int3"}, "dtype is 'int3', it must be one of auto, bfloat16, float32"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"kv_memory_fraction": 1.5}, "kv_memory_fraction is 1.5"),
        ({"num_pages": 10**9}, "1000000000 pages of .* lower num_pages to at most"),
        ({"max_model_len": 10_000}, "max_model_len is 10000, the model was made for 512 positions"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide"),
        ({"max_batch": 3}, "unknown option max_batch; the options are dtype, "),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_work_fails_before_weights_load(make_llm, monkeypatch, options, message):
    monkeypatch.setattr("jpaged.engine.startup.load_weights", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=message):
        make_llm(**options)


def test_changed_weights_find_no_old_kv(make_llm, tiny_dirs, tmp_path):
    """Reloaded under the same name: cached tokens are 0, and the tokens are those of a new engine."""
    place = tmp_path / "model"
    shutil.copytree(tiny_dirs["llama"], place)
    llm = LLM(str(place), **TINY_OPTIONS)
    prompts = random_prompts(6, seed=30, longest=40)
    assert tokens(llm.generate(prompts, greedy())) == tokens(make_llm().generate(prompts, greedy()))
    assert any(output.num_cached_tokens for output in llm.generate(prompts, greedy()))
    llm.pin_prefix("kept", prompts[0])
    write_random_checkpoint(TINY_LLAMA, place, seed=1)
    before = llm.stats().compilations_after_ready
    llm.reload_weights()
    assert (llm.stats().pages_used, llm.stats().pages_cached) == (0, 0)
    outputs = llm.generate(prompts, greedy())
    assert [output.num_cached_tokens for output in outputs] == [0] * 6
    assert llm.stats().compilations_after_ready == before
    fresh = LLM(str(place), **TINY_OPTIONS)
    assert tokens(outputs) == tokens(fresh.generate(prompts, greedy()))
    with pytest.raises(ModelError, match="differs from the running model in"):
        llm.reload_weights(str(tiny_dirs["opt"]))
    stream = llm.stream(prompts[0], greedy())
    next(stream)
    with pytest.raises(InvalidRequestError, match="1 requests are running"):
        llm.reload_weights()
    stream.close()
    assert tokens(llm.generate(prompts, greedy())) == tokens(outputs)

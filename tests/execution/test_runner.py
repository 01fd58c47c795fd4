"""Plans through a Runner with a tiny model, on one device and on two, against its logits computed without pages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.execution.compilation import counter
from jpaged.execution.programs import Program
from jpaged.execution.runner import TOKENS_PER_CHANGE, Runner, RunnerConfig
from jpaged.models.spec import spec_from_config
from jpaged.parallel.mesh import make_mesh
from jpaged.step_plan import (
    MAX_CANDIDATES,
    ON_DEVICE,
    RowConstraints,
    RowSampling,
    ScoredToken,
    StepPlan,
    StepResult,
)
from jpaged.weights.random import random_weights
from pallas_kernels.paged_attention.api import PageSpec
from pallas_kernels.paged_attention.dispatch import choose
from tests.execution.draws import bits_of, processed_by_numpy
from tests.fakes.dense_attention import dense_logits
from tests.fakes.tiny_models import TINY_LLAMA

PAGE_SIZE, PAGES_PER_SEQUENCE, ROWS, BUDGET = 4, 12, 4, 16  # few shapes: each is compiled
VOCABULARY = TINY_LLAMA["vocab_size"]
SPEC = spec_from_config(TINY_LLAMA)


@pytest.fixture(scope="module")
def model():
    return random_weights(SPEC, jnp.float32, 0, make_mesh(1))


@pytest.fixture(scope="module", params=[1, 2])
def runner(request):
    mesh = make_mesh(request.param, spec=SPEC)
    page_spec = PageSpec(
        SPEC.num_layers, ROWS * PAGES_PER_SEQUENCE, PAGE_SIZE, SPEC.num_kv_heads, SPEC.head_dim, jnp.float32
    )
    attention, _ = choose("cpu", page_spec, num_q_heads=SPEC.num_heads, q_dtype=jnp.float32)
    config = RunnerConfig(page_spec, PAGE_SIZE * PAGES_PER_SEQUENCE, ROWS, BUDGET)
    runner = Runner(random_weights(SPEC, jnp.float32, 0, mesh), attention, mesh, config)
    runner.warm_up()
    return runner


def pages_of(row: int) -> list[tuple[int, int, int, int]]:
    return [(0, row, index, row * PAGES_PER_SEQUENCE + index) for index in range(PAGES_PER_SEQUENCE)]


def prefill(prompts: dict[int, list[int]], samplings: dict[int, RowSampling], **rest: Any) -> StepPlan:
    """A plan that takes rows, computes their prompts whole and draws for each."""
    return StepPlan(
        step=0,
        sequence_ids=list(prompts),
        row_ids=list(prompts),
        starts=[0] * len(prompts),
        counts=[len(prompt) for prompt in prompts.values()],
        samples=[True] * len(prompts),
        token_ids=[token for prompt in prompts.values() for token in prompt],
        rows_taken=[(row, samplings.get(row, RowSampling())) for row in prompts],
        new_pages=[entry for row in prompts for entry in pages_of(row)],
        **rest,
    )


def decode(lengths: dict[int, int], **rest: Any) -> StepPlan:
    """A plan in which rows of these lengths, the last drawn token included, draw the next."""
    count = len(lengths)
    return StepPlan(
        step=1,
        sequence_ids=list(lengths),
        row_ids=list(lengths),
        starts=[length - 1 for length in lengths.values()],
        counts=[1] * count,
        samples=[True] * count,
        num_decode=count,
        token_ids=[ON_DEVICE] * count,
        **rest,
    )


def prompt(length: int, salt: int) -> list[int]:
    return [(salt * 37 + position * 11) % VOCABULARY for position in range(length)]


def run(runner: Runner, plan: StepPlan) -> StepResult:
    before = counter.unexpected_programs
    result = runner.start(plan).result()
    assert counter.unexpected_programs == before, "a step compiled something"
    return result


def logits_behind(model: Any, tokens: list[int]) -> np.ndarray:
    """The model's logits for the token after these, float32 [V]."""
    padded = tokens + [0] * (PAGE_SIZE * PAGES_PER_SEQUENCE - len(tokens))  # one shape; padding is not seen
    return np.asarray(dense_logits(model, padded))[len(tokens) - 1]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_constrained_and_penalised_rows_follow_the_reference_while_others_stay_greedy(runner, model):
    prompts = {0: prompt(3, 1), 1: prompt(5, 2), 2: prompt(3, 3), 3: prompt(5, 4)}
    best = [int(token) for token in np.argsort(-logits_behind(model, prompts[1]))[:3]]
    samplings = {
        1: RowSampling(
            presence_penalty=1.0,
            frequency_penalty=0.5,
            repetition_penalty=1.5,
            prompt_length=5,
            min_length=8,
            constraints=RowConstraints(logit_bias=((best[2], 3.0),), late_token_ids=tuple(best[:2])),
        ),
        2: RowSampling(
            constraints=RowConstraints(allowed_bits=bits_of([3, 5, 8, 90], VOCABULARY), bad_words=((5, 8), (8, 5)))
        ),
    }
    histories = {row: list(tokens) for row, tokens in prompts.items()}
    mask = bits_of([10, 20, 30], VOCABULARY)
    plan = prefill(prompts, samplings)
    for step in range(8):
        masks = {3: mask} if step == 4 else {}
        plan.masks = list(masks.items())
        result = run(runner, plan)
        for row, history in histories.items():
            logits = logits_behind(model, history)
            expected = processed_by_numpy(logits, samplings.get(row, RowSampling()), history, masks.get(row))
            assert result.token_ids[row] == expected.argmax(), (row, step)
            history.append(int(result.token_ids[row]))
        plan = decode({row: len(history) for row, history in histories.items()})
    assert histories[2][-1] in (3, 5, 8, 90) and histories[3][5 + 4] in (10, 20, 30)


def test_logprobs_and_ranks_are_of_the_models_own_logits(runner, model):
    prompts = {0: prompt(6, 5), 1: prompt(6, 6), 2: prompt(4, 7)}
    samplings = {
        1: RowSampling(temperature=2.0, seed=4, constraints=RowConstraints(allowed_bits=bits_of([7, 9], VOCABULARY))),
        2: RowSampling(temperature=0.5, is_beam=True),
    }
    result = run(runner, prefill(prompts, samplings, wants_logprobs=True))
    assert result.logprobs is not None and result.scored is None and result.wide is None
    for row, tokens in prompts.items():
        logits = logits_behind(model, tokens) / (0.5 if row == 2 else 1.0)
        logprobs, token = log_softmax(logits), result.token_ids[row]
        assert result.logprobs.logprobs[row] == pytest.approx(logprobs[token], abs=2e-5)
        assert result.logprobs.ranks[row] == (logits >= logits[token]).sum()
        order = np.argsort(-logits)[:MAX_CANDIDATES]
        assert result.logprobs.candidate_ids[row].tolist() == order.tolist()
        np.testing.assert_allclose(result.logprobs.candidate_logprobs[row], logprobs[order], atol=2e-5)
    assert result.token_ids[1] in (7, 9)
    assert run(runner, decode({0: 7})).logprobs is None


def test_scored_and_wide_tokens_agree_with_the_step(runner, model):
    prompts = {0: prompt(9, 8), 1: prompt(7, 9)}
    scored = [
        ScoredToken(place, 9 * place + position - 1, 0, position, tokens[position])
        for place, tokens in prompts.items()
        for position in range(1, len(tokens))
    ] * 5
    wide = [*scored[::5], ScoredToken(1, 15, 0, 7, ON_DEVICE)]
    assert len(scored) > 64 and len(wide) > 8  # more than one call of each
    plan = prefill(prompts, {}, wants_logprobs=True, scored=scored, wide=wide)
    result = run(runner, plan)
    assert result.logprobs is not None and result.scored is not None and result.wide is not None
    assert result.wide.shape == (len(wide), VOCABULARY) and len(result.scored.logprobs) == len(scored)
    for index, token in enumerate(scored):
        logits = logits_behind(model, prompts[token.place][: token.position])
        assert result.scored.logprobs[index] == pytest.approx(log_softmax(logits)[token.token_id], abs=3e-5)
        assert result.scored.ranks[index] == (logits >= logits[token.token_id]).sum()
    for index, token in enumerate(wide[:-1]):
        assert result.wide[index, token.token_id] == pytest.approx(result.scored.logprobs[5 * index], abs=1e-5)
        best = result.scored.candidate_ids[5 * index]
        np.testing.assert_allclose(result.wide[index, best], result.scored.candidate_logprobs[5 * index], atol=1e-5)
    drawn = result.token_ids[1]
    assert result.wide[-1, drawn] == pytest.approx(result.logprobs.logprobs[1], abs=1e-5)
    np.testing.assert_allclose(
        result.wide[-1, result.logprobs.candidate_ids[1]], result.logprobs.candidate_logprobs[1], atol=1e-5
    )


def test_the_next_step_may_start_before_scores_are_read(runner, model):
    tokens = prompt(16, 10)
    scored = [ScoredToken(0, position - 1, 0, position, tokens[position]) for position in range(1, 16)]
    first = runner.start(prefill({0: tokens}, {}, scored=scored))
    later = [runner.start(decode({0: 17 + step})) for step in range(3)]
    found = first.result().scored
    assert found is not None
    for index, token in enumerate(scored):
        expected = log_softmax(logits_behind(model, tokens[: token.position]))[token.token_id]
        assert found.logprobs[index] == pytest.approx(expected, abs=3e-5)
    assert len([step.result() for step in later]) == 3


def test_histories_that_were_never_computed_count_and_forks_inherit_them(runner, model):
    """A cached prefix: its pages hold KV, the row never saw its tokens. Then a fork of it."""
    penalised = RowSampling(repetition_penalty=3.0, frequency_penalty=2.0, prompt_length=6)

    def token_with(tokens: list[int], history: list[int]) -> int:
        return int(processed_by_numpy(logits_behind(model, tokens), penalised, history).argmax())

    # A sequence where the tokens that the row did not compute decide what is drawn.
    sequences = (prompt(14, salt) for salt in range(100))
    tokens = next(tokens for tokens in sequences if token_with(tokens, tokens) != token_with(tokens, tokens[12:]))
    run(runner, prefill({0: tokens}, {}))
    # Row 1 takes over the pages of the first 12 tokens and computes the last two.
    plan = StepPlan(
        step=1,
        sequence_ids=[1],
        row_ids=[1],
        starts=[12],
        counts=[2],
        samples=[True],
        token_ids=tokens[12:],
        rows_taken=[(1, penalised)],
        histories=[(1, tokens[:12])],
        new_pages=[*[(0, 1, index, index) for index in range(3)], *pages_of(1)[3:]],
    )
    drawn = run(runner, plan).token_ids[0]
    assert drawn == token_with(tokens, tokens)
    # Row 2 forks row 1: history and page table, a page of its own for what comes next, and other parameters.
    forked = RowSampling(presence_penalty=2.0, prompt_length=6)
    plan = decode(
        {1: 15, 2: 15},
        rows_taken=[(2, forked)],
        row_copies=[(1, 2)],
        new_pages=pages_of(2)[3:],
        page_copies=[(PAGES_PER_SEQUENCE + 3, 2 * PAGES_PER_SEQUENCE + 3)],
    )
    result = run(runner, plan)
    history = [*tokens, int(drawn)]
    logits = logits_behind(model, history)
    assert result.token_ids[0] == processed_by_numpy(logits, penalised, history).argmax()
    assert result.token_ids[1] == processed_by_numpy(logits, forked, history).argmax()


def test_histories_longer_than_one_call_holds_are_entered_whole(runner, monkeypatch):
    tokens = prompt(40, 12)
    calls = []
    enter = runner._enter_histories
    monkeypatch.setattr(runner, "_enter_histories", lambda rows, words: calls.append(words) or enter(rows, words))
    histories = [(row % 3, tokens[: 30 + row % 3]) for row in range(3)] * 30
    run(runner, StepPlan(step=0, histories=histories))
    assert len(calls) == -(-30 * (30 + 31 + 32) // TOKENS_PER_CHANGE) > 1
    kept = np.asarray(runner._rows.tokens)
    for row in range(3):
        assert kept[row, : 30 + row].tolist() == tokens[: 30 + row]


def test_a_reset_runner_draws_again(runner, model):
    before = runner.compilations_after_ready
    runner.reset()
    assert runner.compilations_after_ready == before
    tokens = prompt(6, 13)
    constraints = RowConstraints(allowed_bits=bits_of([44], VOCABULARY))
    assert run(runner, prefill({0: tokens}, {0: RowSampling(constraints=constraints)})).token_ids[0] == 44
    assert run(runner, prefill({0: tokens}, {})).token_ids[0] == logits_behind(model, tokens).argmax()


def test_replaced_weights_draw_and_score(runner, model):
    mesh = runner._parts.mesh
    other = random_weights(SPEC, jnp.float32, 1, mesh)
    tokens = prompt(9, 14)
    scored = [ScoredToken(0, 4, 0, 5, tokens[5])]
    plan = prefill({0: tokens}, {}, scored=scored, wide=scored)
    kept = runner.model
    runner.replace_weights(other)
    result = run(runner, plan)
    runner.replace_weights(kept)
    logits = logits_behind(random_weights(SPEC, jnp.float32, 1, make_mesh(1)), tokens[:5])
    assert result.scored is not None and result.wide is not None
    assert result.scored.logprobs[0] == pytest.approx(log_softmax(logits)[tokens[5]], abs=3e-5)
    assert result.wide[0, tokens[5]] == pytest.approx(result.scored.logprobs[0], abs=1e-5)
    again = run(runner, plan).scored
    assert again is not None and abs(result.scored.logprobs[0] - again.logprobs[0]) > 0.01


@pytest.mark.parametrize("runner", [1], indirect=True)
def test_a_kept_program_that_does_not_run_is_compiled_again(runner, model, monkeypatch):
    config, attention, mesh = runner._config, runner._parts.attention, runner._parts.mesh
    again = Runner(random_weights(SPEC, jnp.float32, 0, mesh), attention, mesh, config)
    again.make_ready()
    assert again.compilations == 0
    call = Program.__call__

    def fail(program: Program, *arguments: Any) -> Any:
        if program.was_read:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: Function wrapped_broadcast not found")
        return call(program, *arguments)

    monkeypatch.setattr(Program, "__call__", fail)
    jax.clear_caches()  # else what this process has compiled need not be compiled again
    again.warm_up()
    assert again.compilations == len(again._programs._programs)
    tokens = prompt(6, 15)
    [drawn] = run(again, prefill({0: tokens}, {})).token_ids
    assert again.compilations_after_ready == 0
    assert drawn == logits_behind(model, tokens).argmax()
    last = Runner(random_weights(SPEC, jnp.float32, 0, mesh), attention, mesh, config)
    last.make_ready()
    assert last.compilations == 0

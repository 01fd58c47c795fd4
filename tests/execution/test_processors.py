"""Every processor against plain numpy, in one batch with rows that have others or none; and logprobs."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.execution.draw import draw_tokens
from jpaged.execution.logprobs import describe_tokens, unpack_logprobs
from jpaged.execution.processors import asks_for_processing, process
from jpaged.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIASES
from jpaged.step_plan import MAX_CANDIDATES, RowConstraints, RowSampling
from tests.execution.draws import (
    bits_of,
    draw_batch,
    drawing_state,
    native_sampling,
    packed_masks,
    parameters_of,
    processed_by_numpy,
)

VOCABULARY, MAX_MODEL_LEN = 1100, 600
change = jax.jit(process)


def random_history(length: int, seed: int, distinct: int = 40) -> list[int]:
    return (np.random.default_rng(seed).integers(0, distinct, length) * 27 % VOCABULARY).tolist()


def random_logits(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, VOCABULARY)).astype(np.float32)


LONG = random_history(550, 1)
WORDS = tuple((5, 6 + word) for word in range(2 * MAX_BAD_WORDS - 1))
CASES: dict[str, tuple[RowSampling, list[int]]] = {
    "none": (RowSampling(), random_history(30, 0)),
    "presence": (RowSampling(presence_penalty=1.5, prompt_length=10), random_history(30, 2)),
    "frequency": (RowSampling(frequency_penalty=-0.7, prompt_length=10), random_history(90, 3)),
    "repetition": (RowSampling(repetition_penalty=1.7, prompt_length=20), random_history(30, 4)),
    "all penalties, long": (
        RowSampling(presence_penalty=0.5, frequency_penalty=0.1, repetition_penalty=1.3, prompt_length=300),
        LONG,
    ),
    "long prompt": (RowSampling(repetition_penalty=0.8, frequency_penalty=1.0, prompt_length=550), LONG),
    "short output of a long prompt": (RowSampling(frequency_penalty=0.5, prompt_length=540), LONG),
    "one token": (RowSampling(repetition_penalty=2.0, presence_penalty=1.0, prompt_length=1), [5]),
    "one token again and again": (
        RowSampling(repetition_penalty=2.0, frequency_penalty=0.25, prompt_length=400),
        [7] * 590,
    ),
    "bias": (
        RowSampling(constraints=RowConstraints(logit_bias=((0, 1.0), (VOCABULARY - 1, -1e4), (44, 0.125)))),
        random_history(4, 5),
    ),
    "all biases": (
        RowSampling(
            constraints=RowConstraints(logit_bias=tuple((token, token / 64) for token in range(MAX_LOGIT_BIASES)))
        ),
        random_history(4, 6),
    ),
    "allowed": (
        RowSampling(constraints=RowConstraints(allowed_bits=bits_of([0, 31, 32, 63, 700, VOCABULARY - 1], VOCABULARY))),
        random_history(4, 7),
    ),
    "bad words": (
        RowSampling(constraints=RowConstraints(bad_words=((1, 2, 3), (2, 3, 4), (3, 5), (4, 6), (9, 1, 2, 3, 7)))),
        [8, 1, 2, 3],
    ),
    "a history shorter than the word": (RowSampling(constraints=RowConstraints(bad_words=((2, 3, 9), (3, 8)))), [3]),
    "long bad word": (
        RowSampling(
            constraints=RowConstraints(bad_words=(tuple(range(MAX_BAD_WORD_TOKENS)), tuple(range(1, 17)), (14, 20)))
        ),
        list(range(MAX_BAD_WORD_TOKENS - 1)),
    ),
    "all bad words": (RowSampling(constraints=RowConstraints(bad_words=(*WORDS, (6, 1)))), [5]),
    "early": (
        RowSampling(min_length=31, constraints=RowConstraints(late_token_ids=(2, 900))),
        random_history(30, 8),
    ),
    "late enough": (
        RowSampling(min_length=30, constraints=RowConstraints(late_token_ids=(2, 900))),
        random_history(30, 9),
    ),
    "masked": (RowSampling(), random_history(12, 10)),
    "masked and allowed": (
        RowSampling(constraints=RowConstraints(allowed_bits=bits_of(list(range(0, VOCABULARY, 3)), VOCABULARY))),
        random_history(12, 11),
    ),
    "everything": (
        RowSampling(
            presence_penalty=-0.5,
            frequency_penalty=0.3,
            repetition_penalty=1.1,
            prompt_length=11,
            min_length=50,
            constraints=RowConstraints(
                bits_of(list(range(0, 400)), VOCABULARY), ((4, 2.0), (9, 3.0), (6, 1.0)), ((5, 6), (1, 7)), (3, 4, 999)
            ),
        ),
        [*random_history(30, 12), 5],
    ),
}
SAMPLINGS = [sampling for sampling, _ in CASES.values()]
HISTORIES = [history for _, history in CASES.values()]
MASKS = {
    list(CASES).index("masked"): bits_of([1, 64, 1000], VOCABULARY),
    list(CASES).index("masked and allowed"): bits_of(list(range(0, VOCABULARY, 5)), VOCABULARY),
}
LOGITS = random_logits(len(CASES))


@pytest.fixture(scope="module")
def processed():
    """All cases in one batch, float32 [rows, V]."""
    rows, constraints = drawing_state(SAMPLINGS, HISTORIES, VOCABULARY, MAX_MODEL_LEN)
    masks = packed_masks(MASKS, len(CASES), VOCABULARY)
    batch = draw_batch(HISTORIES, masks=MASKS)
    return np.asarray(change(jnp.asarray(LOGITS), rows, constraints, parameters_of(SAMPLINGS), batch, masks))


@pytest.mark.parametrize("case", CASES)
def test_each_row_is_processed_by_its_own_wishes_alone(processed, case):
    place = list(CASES).index(case)
    expected = processed_by_numpy(LOGITS[place], SAMPLINGS[place], HISTORIES[place], MASKS.get(place))
    assert (np.isneginf(processed[place]) == np.isneginf(expected)).all()
    np.testing.assert_allclose(processed[place], expected, rtol=2e-6, atol=2e-6)
    changes = (processed[place] != LOGITS[place]).any()
    assert changes == (case not in ("none", "late enough"))


@pytest.mark.parametrize("case", CASES)
def test_a_batch_that_asks_for_nothing_is_known_as_such(case):
    sampling, history = CASES[case]
    place = list(CASES).index(case)
    masks = {0: MASKS[place]} if place in MASKS else {}
    asks = asks_for_processing(parameters_of([sampling]), draw_batch([history], masks=masks))
    assert asks == (case not in ("none", "late enough"))


def test_rows_that_draw_nothing_ask_for_nothing():
    """A prompt's chunk of a row with every wish: neither processed nor drawn, and the others do not notice."""
    rows, constraints = drawing_state(SAMPLINGS, HISTORIES, VOCABULARY, MAX_MODEL_LEN)
    samples = [name == "none" for name in CASES]
    masks = packed_masks({}, len(CASES), VOCABULARY)
    batch = draw_batch(HISTORIES, samples=samples)
    drawn = np.asarray(jax.jit(draw_tokens)(jnp.asarray(LOGITS), rows, constraints, batch, masks))
    assert drawn[0, 0] == LOGITS[0].argmax()
    assert (drawn[:, 0] == LOGITS.argmax(axis=1)).all(), "a row that draws nothing was processed"
    assert not drawn[:, 1:].any(), "logprobs that nobody asked for"


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.8}, {"temperature": 0.9, "top_k": 40, "top_p": 0.9}], ids=str
)
def test_the_native_form_draws_the_same(settings):
    """Every wish of every case, native and by XLA, whose logits are the same to the last bit or two."""
    native = native_sampling()
    samplings = [replace(sampling, **settings, seed=seed) for seed, sampling in enumerate(SAMPLINGS)]
    rows, constraints = drawing_state(samplings, HISTORIES, VOCABULARY, MAX_MODEL_LEN)
    batch = draw_batch(HISTORIES, masks=MASKS, wants_logprobs=True)
    arguments = jnp.asarray(LOGITS), rows, constraints, batch, packed_masks(MASKS, len(CASES), VOCABULARY)
    by_xla = np.asarray(jax.jit(draw_tokens)(*arguments))
    drawn = np.asarray(jax.jit(partial(draw_tokens, native=native))(*arguments))
    assert dict(zip(CASES, drawn[:, 0], strict=True)) == dict(zip(CASES, by_xla[:, 0], strict=True))
    wanted, found = unpack_logprobs(by_xla[:, 1:]), unpack_logprobs(drawn[:, 1:])
    assert (found.ranks == wanted.ranks).all() and (found.candidate_ids == wanted.candidate_ids).all()
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 12])
@pytest.mark.parametrize("form", ["xla", "native"])
def test_logprobs_and_ranks_against_numpy(form, vocabulary):
    native = native_sampling() if form == "native" else None
    rows = 24
    generator = np.random.default_rng(1)
    logits = generator.normal(0, 3, (rows, vocabulary)).astype(np.float32)
    logits[3] = np.round(logits[3]) + 0.0  # many equal ones, and no -0
    token_ids = generator.integers(0, vocabulary, rows).astype(np.int32)
    token_ids[:2] = logits[:2].argmax(axis=1)
    temperature = np.where(np.arange(rows) % 3 == 0, 1.0, 0.4).astype(np.float32)
    found = unpack_logprobs(
        np.asarray(jax.jit(partial(describe_tokens, native=native))(logits, token_ids, temperature))
    )
    scaled = logits.astype(np.float64) / temperature[:, None]
    logprobs = scaled - scaled.max(axis=1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
    own = np.take_along_axis(logprobs, token_ids[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(found.logprobs, own, atol=1e-5)
    ranks = (logits >= np.take_along_axis(logits, token_ids[:, None], axis=1)).sum(axis=1)
    assert found.ranks.tolist() == ranks.tolist() and found.ranks[0] == 1
    count = min(MAX_CANDIDATES, vocabulary)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    assert found.candidate_ids[:, :count].tolist() == order.tolist()
    np.testing.assert_allclose(
        found.candidate_logprobs[:, :count], np.take_along_axis(logprobs, order, axis=1), atol=1e-5
    )
    assert np.isneginf(found.candidate_logprobs[:, count:]).all()

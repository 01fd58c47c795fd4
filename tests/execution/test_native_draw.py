"""Native draws against plain numpy and against XLA's form, for logits of every kind, on every instruction set."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.execution.logprobs import describe_tokens, unpack_logprobs
from jpaged.execution.noise import draw_keys, gumbel
from jpaged.execution.sampler import sample
from jpaged.step_plan import RowSampling
from pallas_kernels.native.build import runnable_instruction_sets
from pallas_kernels.sampling.cpu import CpuSampling
from tests.execution.draws import native_sampling, parameters_of, same_parameters, sample_natively

VOCABULARY = 3001  # no multiple of a vector or of a block
SETTINGS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, top_k, top_p, min_p in product((0.7, 1.6), (0, 1, 3, 50, 1500), (1.0, 0.9, 0.3), (0.0, 0.06))
]
KINDS = ["flat", "lively", "zipf", "rounded", "one value", "ascending", "masked", "one token", "lowest", "huge", "tiny"]
DECISIVE = 1e-5  # two forms agree on a draw that is decided by more


@pytest.fixture(scope="module", params=runnable_instruction_sets(), ids=lambda chosen: chosen.name)
def native(request: pytest.FixtureRequest) -> CpuSampling:
    return native_sampling(request.param)


def logits_of(kind: str, rows: int, vocabulary: int = VOCABULARY) -> np.ndarray:
    """float32 [rows, V]."""
    generator = np.random.default_rng(len(kind))
    normal = generator.normal(0, 1, (rows, vocabulary))
    ranks = np.stack([generator.permutation(vocabulary) for _ in range(rows)])
    some = generator.random(normal.shape) < 0.03
    return {
        "flat": lambda: 0.3 * normal,
        "lively": lambda: 3 * normal + 20,
        "zipf": lambda: -1.5 * np.log1p(ranks),
        "rounded": lambda: np.round(2 * normal) + 0.0,  # and no -0
        "one value": lambda: np.full(normal.shape, 2.5),
        "ascending": lambda: np.broadcast_to(np.linspace(-30, -3, vocabulary), normal.shape),
        "masked": lambda: np.where(some, normal, -np.inf),
        "one token": lambda: np.where(ranks == 0, -7.0, -np.inf),
        "lowest": lambda: np.where(some, normal, np.finfo(np.float32).min),
        "huge": lambda: 1e6 * normal,
        "tiny": lambda: 1e-4 * normal,
    }[kind]().astype(np.float32)


def keep(scaled: np.ndarray, settings: dict[str, float]) -> tuple[np.ndarray, bool]:
    """What the filters keep of one row's scaled logits, bool [V], and whether rounding might decide it."""
    kept, close = np.ones(len(scaled), bool), False
    if settings["min_p"] > 0:
        floor = np.log(np.float32(settings["min_p"]))
        kept = scaled >= floor
        close = bool((np.abs(scaled - floor) < DECISIVE).any())
    if 0 < settings["top_k"] < len(scaled):
        kept &= scaled >= np.sort(scaled)[-int(settings["top_k"])]
    if settings["top_p"] < 1:
        ordered = np.sort(scaled[kept])[::-1]
        mass = np.cumsum(np.exp(ordered.astype(np.float64)))
        mass /= mass[-1]
        # Equal ones stay together, so that only sums at the end of equals count.
        is_last = np.append(ordered[1:] != ordered[:-1], True)
        close |= bool((np.abs(mass - settings["top_p"])[is_last] < DECISIVE).any())
        kept &= scaled >= ordered[np.argmax(mass >= settings["top_p"])]
    return kept, close


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_those_of_plain_numpy_and_of_xla(native, kind):
    logits = logits_of(kind, len(SETTINGS))
    parameters = parameters_of([RowSampling(**settings, seed=row) for row, settings in enumerate(SETTINGS)])
    positions = jnp.arange(len(SETTINGS)) * 13
    drawn = np.asarray(jax.jit(partial(sample_natively, native))(logits, parameters, positions))
    by_xla = np.asarray(jax.jit(sample)(logits, parameters, positions))
    keys = draw_keys(parameters.seed_low, parameters.seed_high, parameters.sample_index, positions)
    noise = np.asarray(gumbel(keys, jnp.arange(VOCABULARY)[None, :]))
    decided = 0
    for row, settings in enumerate(SETTINGS):
        with np.errstate(over="ignore"):  # the lowest number there is becomes -inf
            scaled = (logits[row] - logits[row].max()) / np.float32(settings["temperature"])
        kept, close = keep(scaled, settings)
        noisy = np.where(kept, scaled + noise[row], -np.inf)
        best, second = np.sort(noisy)[[-1, -2]]
        if not close and best - second > DECISIVE * max(1, abs(best)):
            assert drawn[row] == noisy.argmax() == by_xla[row], settings
            decided += 1
        assert np.isfinite(logits[row, drawn[row]])
    assert decided > 0.8 * len(SETTINGS)


@pytest.mark.parametrize("kind", KINDS)
def test_descriptions_are_those_of_xla(native, kind):
    logits = logits_of(kind, 24)
    token_ids = np.random.default_rng(2).integers(0, VOCABULARY, 24).astype(np.int32)
    token_ids[:8] = logits[:8].argmax(axis=1)
    temperature = np.where(np.arange(24) % 3 == 0, 0.6, 1.0).astype(np.float32)
    wanted, found = (
        unpack_logprobs(np.asarray(jax.jit(partial(describe_tokens, native=form))(logits, token_ids, temperature)))
        for form in (None, native)
    )
    assert found.ranks.tolist() == wanted.ranks.tolist()
    assert found.candidate_ids.tolist() == wanted.candidate_ids.tolist()
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.candidate_logprobs, wanted.candidate_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 127, 128, 129, 1000])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_numbers_that_are_none_neither_crash_nor_spread(native, bad, vocabulary):
    samplings = [RowSampling(**settings, seed=row) for row, settings in enumerate(SETTINGS)]
    logits = logits_of("lively", len(samplings), vocabulary)
    draw, positions = jax.jit(partial(sample_natively, native)), jnp.arange(len(samplings))
    expected = np.asarray(draw(logits, parameters_of(samplings), positions))
    hurt = logits.copy()
    hurt[::4] = bad
    hurt[1::4, vocabulary // 2] = bad
    tokens = np.asarray(draw(hurt, parameters_of(samplings), positions))
    assert ((tokens >= 0) & (tokens < vocabulary)).all()
    assert (tokens[2::4] == expected[2::4]).all() and (tokens[3::4] == expected[3::4]).all()
    if vocabulary > 1 and bad != np.inf:
        assert (tokens[1::4] != vocabulary // 2).all()
    described = np.asarray(jax.jit(partial(describe_tokens, native=native))(hurt, tokens))
    best_ids = unpack_logprobs(described).candidate_ids
    assert ((best_ids >= 0) & (best_ids < vocabulary)).all()


def test_noise_has_its_bounds():
    """Tokens are passed over by bounds on their noise: with many tokens and draws, any that is wrong shows."""
    rows, vocabulary = 16, 50_000
    draw = jax.jit(partial(sample_natively, native_sampling()))
    logits = logits_of("flat", rows, vocabulary)
    parameters = same_parameters(rows, temperature=0.9, seed=3)
    for first in range(0, 20 * rows, rows):
        positions = first + jnp.arange(rows)
        drawn = draw(logits, parameters, positions)
        keys = draw_keys(parameters.seed_low, parameters.seed_high, parameters.sample_index, positions)
        noise = np.asarray(gumbel(keys, jnp.arange(vocabulary)[None, :]))
        scaled = (logits - logits.max(axis=1, keepdims=True)) / np.float32(0.9)
        noisy = scaled + noise
        gap = noisy.max(axis=1) - noisy[np.arange(rows), drawn]
        assert (gap < DECISIVE).all()

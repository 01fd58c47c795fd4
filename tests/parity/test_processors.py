"""Processors and filters against transformers' own, in float32 (scripts/make_golden_processors.py)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.execution import sampler
from jpaged.execution.noise import draw_keys, gumbel
from jpaged.execution.processors import process
from jpaged.step_plan import RowConstraints, RowSampling
from tests.execution.draws import (
    bits_of,
    draw_batch,
    drawing_state,
    native_sampling,
    packed_masks,
    parameters_of,
    sample_natively,
)
from tests.parity.seeded import seeded_tensor

GOLDEN_DIR = Path(__file__).parent / "golden"
GOLDEN = json.loads((GOLDEN_DIR / "processors.json").read_text())
EXPECTED = np.load(GOLDEN_DIR / "processors.npz")
VOCABULARY, CASES = GOLDEN["vocabulary"], GOLDEN["cases"]
NAMES = [case["name"] for case in CASES]


def row_sampling(case: dict) -> RowSampling:
    allowed = case.get("allowed_token_ids")
    constraints = RowConstraints(
        allowed_bits=None if allowed is None else bits_of(allowed, VOCABULARY),
        logit_bias=tuple((token_id, bias) for token_id, bias in case.get("logit_bias", ())),
        bad_words=tuple(map(tuple, case.get("bad_words", ()))),
        late_token_ids=tuple(case.get("eos_token_ids", ())),
    )
    names = ("temperature", "repetition_penalty", "top_k", "top_p", "min_p")
    return RowSampling(
        **{name: case[name] for name in names if name in case},
        prompt_length=case["prompt_length"],
        min_length=case["prompt_length"] + case.get("min_tokens", 0),
        constraints=constraints,
    )


@pytest.fixture(scope="module")
def processed():
    """All cases in one batch: their rows, and their logits after the processors, float32 [rows, V]."""
    samplings, histories = [row_sampling(case) for case in CASES], [case["history"] for case in CASES]
    rows, constraints = drawing_state(samplings, histories, VOCABULARY, 64)
    spread = np.float32(GOLDEN["spread"])
    logits = np.stack([seeded_tensor("logits", (VOCABULARY,), case["seed"]) * spread for case in CASES])
    parameters, masks = parameters_of(samplings), packed_masks({}, len(CASES), VOCABULARY)
    return parameters, jax.jit(process)(logits, rows, constraints, parameters, draw_batch(histories), masks)


@pytest.fixture(scope="module")
def filtered(processed):
    """Logits behind the temperature, -inf for tokens that the filters drop, float32 [rows, V]."""
    parameters, logits = processed

    def keep(logits: jax.Array) -> jax.Array:
        draws = sampler._draws(logits, parameters, jnp.zeros(len(CASES), jnp.int32))
        scaled = draws.scale(logits)
        keys = sampler._ordered_key(scaled)
        nothing = jnp.zeros(len(CASES), jnp.uint32)
        lowest, _ = sampler._lowest_kept_key(scaled, keys, draws, VOCABULARY, nothing, nothing.astype(jnp.float32))
        # A dropped token is drawn by none of the noise: the same comparison as in the sampler.
        return jnp.where(keys >= lowest[:, None], scaled, -jnp.inf)

    return np.asarray(jax.jit(keep)(logits))


def test_the_native_form_draws_what_the_kept_logits_draw(processed, filtered):
    """At many positions: noise takes it all over the tokens that are kept, and never to another."""
    parameters, logits = processed
    draw = jax.jit(lambda positions: sample_natively(native_sampling(), logits, parameters, positions))
    token_ids = jnp.arange(VOCABULARY)[None, :]
    for position in range(50):
        seeds = parameters.seed_low, parameters.seed_high, parameters.sample_index
        positions = jnp.full(len(CASES), position)
        noisy = filtered + np.asarray(gumbel(draw_keys(*seeds, positions), token_ids))
        assert draw(positions).tolist() == noisy.argmax(axis=1).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_processors_equal_transformers(processed, name):
    got, expected = np.asarray(processed[1][NAMES.index(name)]), EXPECTED[f"{name}/processed"]
    assert got.dtype == expected.dtype == np.float32
    assert (np.isneginf(got) == np.isneginf(expected)).all()
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_filters_keep_what_transformers_keeps(filtered, name):
    got, expected = filtered[NAMES.index(name)], EXPECTED[f"{name}/filtered"]
    assert (np.isneginf(got) == np.isneginf(expected)).all()
    kept = np.isfinite(expected)
    # The sampler shifts logits so that the largest is 0, which changes no probability.
    np.testing.assert_allclose(got[kept], expected[kept] - expected.max(), rtol=0, atol=5e-6)

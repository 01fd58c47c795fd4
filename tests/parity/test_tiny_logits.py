"""Every supported architecture and setting against transformers' logits in float32 (scripts/make_golden.py)."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.spec import load_spec
from jpaged.parallel.mesh import make_mesh
from jpaged.weights.load import load_weights
from tests.fakes.dense_attention import dense_logits
from tests.fakes.tiny_models import write_random_checkpoint

GOLDEN_DIR = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN_DIR / "tiny_cases.json").read_text())
LOGITS = np.load(GOLDEN_DIR / "tiny_logits.npz")


def _load(case, tmp_path, dtype):
    model_dir = write_random_checkpoint(CASES[case]["config"], tmp_path / case, CASES[case]["seed"])
    return load_weights(model_dir, load_spec(model_dir), dtype, make_mesh(1))


@pytest.mark.parametrize("case", CASES)
def test_float32_logits_equal_the_reference(case, tmp_path):
    model = _load(case, tmp_path, jnp.float32)
    prompts = CASES[case]["prompts"]
    longest = max(map(len, prompts))
    for index, prompt in enumerate(prompts):
        padded = prompt + [0] * (longest - len(prompt))  # one shape, one compilation; padding follows, so is not seen
        got = np.asarray(dense_logits(model, padded))[: len(prompt)]
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, LOGITS[f"{case}/{index}"], atol=5e-5, rtol=0)


@pytest.mark.parametrize("case", ["llama_gqa_tied", "mistral_window", "opt_tied"])
def test_bfloat16_errs_less_than_transformers_bfloat16(case, tmp_path):
    model = _load(case, tmp_path, jnp.bfloat16)
    prompts = CASES[case]["prompts"]
    error = np.abs(np.asarray(dense_logits(model, prompts[-1])) - LOGITS[f"{case}/{len(prompts) - 1}"])
    assert 0 < error.mean() < CASES[case]["bfloat16_mean_error"]


def test_the_window_matters_in_its_case(tmp_path):
    case = "mistral_window"
    config = CASES[case]["config"] | {"sliding_window": None}
    model_dir = write_random_checkpoint(config, tmp_path, CASES[case]["seed"])
    model = load_weights(model_dir, load_spec(model_dir), jnp.float32, make_mesh(1))
    last = len(CASES[case]["prompts"]) - 1
    error = np.abs(np.asarray(dense_logits(model, CASES[case]["prompts"][last])) - LOGITS[f"{case}/{last}"])
    assert error[: config_window(case)].max() < 5e-5  # too early for the window to hide anything
    assert error[config_window(case) :].max() > 0.1


def config_window(case):
    return CASES[case]["config"]["sliding_window"]

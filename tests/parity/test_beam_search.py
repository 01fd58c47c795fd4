"""Beam search through the whole engine against transformers' (scripts/make_golden.py).

The golden searches vary the width, the length penalty, when to stop, and how many tokens end a hypothesis. None of
them hangs on rounding, so what is found and its order must be equal.
"""

import json
from pathlib import Path

import pytest

from jpaged import LLM, BeamSearchParams
from jpaged.request import Prompt
from tests.fakes.tiny_models import TINY_OPTIONS, write_random_checkpoint

GOLDEN_DIR = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN_DIR / "beams.json").read_text())
DEMO = json.loads((GOLDEN_DIR / "demo_beams.json").read_text())


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """An engine in float32 on a tiny model, and the searches made with it."""
    golden = CASES[request.param]
    model_dir = write_random_checkpoint(golden["config"], tmp_path_factory.mktemp(request.param), golden["seed"])
    llm = LLM(str(model_dir), **TINY_OPTIONS)
    return llm, golden["searches"]


def check_searches(llm: LLM, searches: list[dict]) -> None:
    """Run all searches together and compare tokens, order, scores and why each hypothesis ended."""
    eos_token_ids = llm.engine.parts.spec.eos_token_ids
    prompts: list[Prompt] = [{"prompt_token_ids": search["prompt_token_ids"]} for search in searches]
    outputs = llm.beam_search(prompts, [BeamSearchParams(**search["params"]) for search in searches])
    for search, output in zip(searches, outputs, strict=True):
        where = (search["params"], search["prompt_token_ids"])
        assert [found.token_ids for found in output.outputs] == search["token_ids"], where
        assert [found.score for found in output.outputs] == pytest.approx(search["scores"], rel=0, abs=1e-4), where
        for found in output.outputs:
            stopped = found.token_ids[-1] in eos_token_ids
            assert found.finish_reason == ("stop" if stopped else "length"), where
            assert stopped or len(found.token_ids) == search["params"]["max_tokens"], where
    assert llm.stats().pages_used == 0


def test_beams_equal_transformers(case):
    llm, searches = case
    check_searches(llm, searches)
    assert llm.stats().compilations_after_ready == 0


@pytest.mark.parametrize("width", [2, 4, 8])
def test_beams_share_all_pages_but_their_tails(case, width):
    llm, _ = case
    num_prompt_tokens, max_tokens, page_size = 41, 16, 4
    vocabulary = llm.engine.parts.spec.vocab_size
    prompt = {"prompt_token_ids": [(7 * place + width) % vocabulary for place in range(num_prompt_tokens)]}
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    engine = llm.engine
    output = engine.add_request("beams", engine.prepare(prompt, params))
    peak = 0
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        peak = max(peak, engine.stats().pages_used)
    shared = num_prompt_tokens // page_size
    tail = -(-(num_prompt_tokens + max_tokens - 1 - shared * page_size) // page_size)  # the last token has no KV
    assert shared + width <= peak <= shared + width * (tail + 1)
    assert [len(found.token_ids) for found in output.outputs] == [max_tokens] * width
    assert engine.stats().pages_used == 0


def test_demo_model_beams_equal_transformers():
    # The shapes of test_demo_tokens: in one run they are compiled once.
    llm = LLM("demo", dtype="float32", max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64, num_pages=400)
    check_searches(llm, DEMO)

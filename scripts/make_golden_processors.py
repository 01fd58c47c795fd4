"""Writes the golden files that tests/parity/test_processors.py compares with: what transformers' own logits processors
make of random logits, in float32.

Needs the environment of make_golden.py, for jpaged never imports torch:

    /tmp/golden/bin/python scripts/make_golden_processors.py

processors.json: each case's row, by the names of jpaged.SamplingParams where it has them, and its history.
processors.npz: for each case its logits after the processors, and after the filters behind them (-inf is dropped).
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.parity.seeded import seeded_tensor  # noqa: E402

GOLDEN_DIR = ROOT / "tests/parity/golden"
VOCABULARY = 3000
SPREAD = 110.0  # makes logits of about -5 to 5
HISTORY_TOKENS, PROMPT_TOKENS = 40, 25
HISTORY_ALPHABET = 30  # so that tokens repeat

# Filters change what the processors left, so each case has a temperature.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.3},
    "repetition_reward": {"temperature": 1.0, "repetition_penalty": 0.6},
    "cold": {"temperature": 0.31},
    "hot": {"temperature": 2.7},
    "top_k": {"temperature": 1.0, "top_k": 17},
    "top_k_wide": {"temperature": 0.9, "top_k": 1200},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_p_narrow": {"temperature": 0.5, "top_p": 0.05},
    "top_p_wide": {"temperature": 2.0, "top_p": 0.97},
    "min_p": {"temperature": 1.0, "min_p": 0.08},
    "min_p_wide": {"temperature": 1.8, "min_p": 0.002},
    "filters": {"temperature": 1.4, "min_p": 0.003, "top_k": 90, "top_p": 0.85},
    "bias": {"temperature": 1.0, "logit_bias": [[3, 4.5], [17, -2.25], [2999, 6.0], [5, -100.0]]},
    "allowed": {"temperature": 1.0, "allowed_token_ids": [0, 31, 32, 64, 500, 1023, 2047, 2999]},
    "bad_words": {"temperature": 1.0, "bad_words": "of the history"},
    "early": {"temperature": 1.0, "min_tokens": HISTORY_TOKENS - PROMPT_TOKENS + 1, "eos_token_ids": [7, 2100]},
    "late_enough": {"temperature": 1.0, "min_tokens": HISTORY_TOKENS - PROMPT_TOKENS, "eos_token_ids": [7, 2100]},
    "everything": {
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "logit_bias": [[3, 1.5], [11, 2.0], [40, 3.0], [7, 9.0]],
        "allowed_token_ids": list(range(0, 2400)),
        "bad_words": "of the history",
        "min_tokens": 100,
        "eos_token_ids": [7, 19],
        "min_p": 0.002,
        "top_k": 60,
        "top_p": 0.9,
    },
}


def main() -> None:
    records, arrays = [], {}
    for index, (name, case) in enumerate(CASES.items()):
        state = np.random.RandomState(index)
        history = (state.randint(0, HISTORY_ALPHABET, HISTORY_TOKENS) * 7 % VOCABULARY).tolist()
        case = case | ({"bad_words": bad_words(history)} if "bad_words" in case else {})
        logits = torch.from_numpy(seeded_tensor("logits", (VOCABULARY,), index) * np.float32(SPREAD))[None]
        ids = torch.tensor([history])
        processed = processors(case)(ids, logits.clone())
        filtered = filters(case)(ids, processed.clone())
        assert processed.dtype == filtered.dtype == torch.float32
        arrays[f"{name}/processed"], arrays[f"{name}/filtered"] = processed[0].numpy(), filtered[0].numpy()
        records.append({"name": name, "seed": index, "history": history, "prompt_length": PROMPT_TOKENS, **case})
        print(
            f"{name}: {int((processed != logits).sum())} logits changed, {int(filtered.isfinite().sum())} tokens kept"
        )
    lines = ",\n  ".join(json.dumps(record) for record in records)
    (GOLDEN_DIR / "processors.json").write_text(
        f'{{"vocabulary": {VOCABULARY}, "spread": {SPREAD}, "cases": [\n  {lines}]}}\n'
    )
    np.savez_compressed(GOLDEN_DIR / "processors.npz", **arrays)


def bad_words(history: list[int]) -> list[list[int]]:
    """Words whose beginnings end the history, of several lengths, and some that do not."""
    ends = [[*history[-length:], last] for length, last in ((1, 3), (2, 11), (5, 2000), (15, 2999))]
    return [*ends, [history[-1] + 1, 100], [history[-2], 101], [*history[-4:-1], 102]]


def processors(case: dict[str, Any]) -> LogitsProcessorList:
    """In jpaged's order."""
    chain = LogitsProcessorList()
    if "allowed_token_ids" in case:
        chain.append(PrefixConstrainedLogitsProcessor(lambda *_: case["allowed_token_ids"], num_beams=1))
    if "bad_words" in case:
        chain.append(NoBadWordsLogitsProcessor(case["bad_words"]))
    if "min_tokens" in case:
        chain.append(
            MinNewTokensLengthLogitsProcessor(PROMPT_TOKENS, case["min_tokens"], torch.tensor(case["eos_token_ids"]))
        )
    if "logit_bias" in case:
        chain.append(SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in case["logit_bias"]}))
    if "repetition_penalty" in case:
        chain.append(RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
    return chain


def filters(case: dict[str, Any]) -> LogitsProcessorList:
    """In jpaged's order."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(case["temperature"])])
    if "min_p" in case:
        chain.append(MinPLogitsWarper(case["min_p"]))
    if "top_k" in case:
        chain.append(TopKLogitsWarper(case["top_k"]))
    if "top_p" in case:
        chain.append(TopPLogitsWarper(case["top_p"]))
    return chain


if __name__ == "__main__":
    main()

"""The documented order of sampling, in plain numpy and float64 for one row: what the device must agree with."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jpaged.execution.noise import draw_keys, gumbel
from jpaged.params import SamplingParams


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def processed_logits(
    logits: np.ndarray,
    history: Sequence[int],
    num_prompt_tokens: int,
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int] = (),
    bad_word_ids: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """What the model's logits [V] become before the temperature, for the token behind `history`."""
    logits, history, output = logits.astype(np.float64), list(history), list(history[num_prompt_tokens:])
    if params.allowed_token_ids is not None:
        allowed = np.zeros(len(logits), bool)
        allowed[list(params.allowed_token_ids)] = True
        logits[~allowed] = -np.inf
    for word in bad_word_ids:
        if not word[:-1] or history[-len(word) + 1 :] == list(word[:-1]):
            logits[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        logits[[*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += bias
    for token_id in set(history):
        factor = params.repetition_penalty
        logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
    for token_id in set(output):
        logits[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    return logits


def kept_logits(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Logits [V] over the temperature, -inf for the tokens that min_p, top_k and top_p drop, in this order."""
    kept = (logits - logits.max()) / params.temperature
    if params.min_p > 0:
        kept[np.exp(kept) < params.min_p] = -np.inf
    if 0 < params.top_k < len(kept):
        kept[kept < np.sort(kept)[-params.top_k]] = -np.inf
    if params.top_p < 1:
        order = np.argsort(-kept, kind="stable")
        mass = np.cumsum(np.exp(kept[order])) / np.exp(kept).sum()
        least = kept[order[np.searchsorted(mass, params.top_p)]]
        kept[kept < least] = -np.inf
    return kept


def draw(logits: np.ndarray, params: SamplingParams, position: int, sample_index: int = 0) -> int:
    """The token that processed logits [V] and a seeded request's noise give at a position."""
    if params.temperature == 0:
        return int(logits.argmax())
    assert params.seed is not None
    words = np.array([params.seed & 0xFFFFFFFF, params.seed >> 32], np.uint32).view(np.int32)
    keys = draw_keys(*(jnp.array([int(word)], jnp.int32) for word in (*words, sample_index, position)))
    noise = np.asarray(gumbel(keys, jnp.arange(len(logits))[None, :]))[0]
    return int((kept_logits(logits, params) + noise).argmax())

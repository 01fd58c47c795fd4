"""What requests do to logits before a token is drawn, in float32: allowed tokens and grammar masks, bad words, tokens
that come too early, biases and penalties, in this order.

Letters: S rows, V vocabulary entries, W = ceil(V / 32) words of allowed bits.

What no row of the step asks for is not computed.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from jpaged.execution.batch import DrawBatch, RowFlag, RowParameters
from jpaged.execution.constraints import MAX_BAD_TOKEN_SEQUENCES, MAX_LATE_TOKEN_IDS, NO_TOKEN, Constraints
from jpaged.execution.rows import Rows
from jpaged.params import MAX_BAD_WORD_TOKENS

BLOCKED_TOKENS = MAX_BAD_TOKEN_SEQUENCES + MAX_LATE_TOKEN_IDS  # of a row at most
_HISTORY_TOKENS = 128  # of each row, counted at once
# In the counts: more than any history is long, and still a number if all tokens of a part add it.
_IN_PROMPT = (1 << 30) // _HISTORY_TOKENS


def asks_for_processing(parameters: RowParameters, batch: DrawBatch) -> Array:
    """Whether any row's logits change, bool []."""
    changes = is_masked(parameters, batch) | blocks_tokens(parameters, batch) | parameters.has(RowFlag.BIAS)
    return jnp.any(changes | has_penalties(parameters))


def is_masked(parameters: RowParameters, batch: DrawBatch) -> Array:
    """Which rows draw from a part of the vocabulary, bool [S]."""
    return parameters.has(RowFlag.ALLOWED) | batch.masked


def blocks_tokens(parameters: RowParameters, batch: DrawBatch) -> Array:
    """Which rows may have blocked tokens, bool [S]."""
    return parameters.has(RowFlag.BAD_WORDS) | _is_early(parameters, batch)


def has_penalties(parameters: RowParameters) -> Array:
    """Which rows have penalties that change anything, bool [S]."""
    additive = (parameters.presence_penalty != 0) | (parameters.frequency_penalty != 0)
    return additive | (parameters.repetition_penalty != 1)


def process(
    logits: Array, rows: Rows, constraints: Constraints, parameters: RowParameters, batch: DrawBatch, masks: Array
) -> Array:
    """Return the logits that tokens are drawn by, float32 [S, V].

    Args:
        logits: float32 [S, V].
        parameters: entries [S], of rows that draw nothing without flags and penalties.
        masks: uint32 [S, W], meaningful where the batch says so.
    """
    bias = parameters.has(RowFlag.BIAS)

    def block_and_bias(logits: Array) -> Array:
        # All at once: what is blocked stays so, whatever its bias.
        blocked = blocked_tokens(rows, constraints, parameters, batch)
        ids = jnp.concatenate([blocked, _mark_others(constraints.bias_ids[batch.row_ids], bias)], axis=1)
        summands = jnp.concatenate([jnp.full(blocked.shape, -jnp.inf), constraints.bias_values[batch.row_ids]], axis=1)
        return _add(logits, ids, summands)

    def penalise(logits: Array) -> Array:
        return _penalise(logits, _count_tokens(rows.tokens, parameters, batch, logits.shape[1]), parameters)

    logits = _where_any(
        is_masked(parameters, batch), lambda logits: keep_allowed(logits, constraints, parameters, batch, masks), logits
    )
    logits = _where_any(blocks_tokens(parameters, batch) | bias, block_and_bias, logits)
    return _where_any(has_penalties(parameters), penalise, logits)


def keep_allowed(
    logits: Array, constraints: Constraints, parameters: RowParameters, batch: DrawBatch, masks: Array
) -> Array:
    """-inf for tokens that a row's request or grammar does not allow, float32 [S, V]."""
    allowed = _bits_or_all(constraints.allowed_bits[batch.row_ids], parameters.has(RowFlag.ALLOWED))
    return jnp.where(_expand_bits(allowed & _bits_or_all(masks, batch.masked), logits.shape[1]), logits, -jnp.inf)


def blocked_tokens(rows: Rows, constraints: Constraints, parameters: RowParameters, batch: DrawBatch) -> Array:
    """The tokens that would complete a bad word or come too early, int32 [S, BLOCKED_TOKENS], padded by NO_TOKEN."""
    row_ids = batch.row_ids
    completing = _completing_tokens(constraints.bad_words[row_ids], rows.tokens, batch)
    return jnp.concatenate(
        [
            _mark_others(completing, parameters.has(RowFlag.BAD_WORDS)),
            _mark_others(constraints.late_ids[row_ids], _is_early(parameters, batch)),
        ],
        axis=1,
    )


def _where_any(rows: Array, change: Callable[[Array], Array], logits: Array) -> Array:
    """Change the logits if any row wants it."""
    return lax.cond(jnp.any(rows), change, lambda logits: logits, logits)


def _add(values: Array, token_ids: Array, summands: Array) -> Array:
    """Add to the values of tokens, [S, N]; NO_TOKEN adds to none."""
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(1,),
        scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter_add(values, token_ids[:, :, None], summands, dimensions, mode=mode)


def _is_early(parameters: RowParameters, batch: DrawBatch) -> Array:
    return parameters.has(RowFlag.LATE) & (batch.kv_lens < parameters.min_length)


def _bits_or_all(bits: Array, rows: Array) -> Array:
    """Bits [S, W] of some rows, all ones for the others."""
    return jnp.where(rows[:, None], bits, jnp.uint32(0xFFFFFFFF))


def _expand_bits(bits: Array, size: int) -> Array:
    """uint32 [S, W] -> bool [S, size]; token i is bit i % 32 of word i // 32."""
    expanded = bits[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return expanded.reshape(len(bits), -1)[:, :size] != 0


def _mark_others(token_ids: Array, rows: Array) -> Array:
    """Token ids [S, N] of some rows, NO_TOKEN for the others."""
    return jnp.where(rows[:, None], token_ids, NO_TOKEN)


def _completing_tokens(bad_words: Array, tokens: Array, batch: DrawBatch) -> Array:
    """Return the last token of each word whose other tokens end the row's history, else NO_TOKEN.

    Args:
        bad_words: int32 [S, N, MAX_BAD_WORD_TOKENS], padded in front.
        tokens: int32 [R + 1, M], the histories.

    Returns:
        int32 [S, N].
    """
    before = MAX_BAD_WORD_TOKENS - 1
    positions = batch.kv_lens[:, None] - before + jnp.arange(before)
    recent = tokens.at[batch.row_ids[:, None], positions].get(mode="clip")
    recent = jnp.where(positions >= 0, recent, NO_TOKEN - 1)  # before the first token: equals nothing
    heads, last_tokens = bad_words[:, :, :-1], bad_words[:, :, -1]
    ends_history = ((heads == NO_TOKEN) | (heads == recent[:, None, :])).all(axis=2)
    return jnp.where(ends_history, last_tokens, NO_TOKEN)


def _count_tokens(tokens: Array, parameters: RowParameters, batch: DrawBatch, size: int) -> Array:
    """Return for each row and token how often it was generated, and at least _IN_PROMPT more if it is in the prompt:
    int32 [S, V].

    Only rows with penalties are counted, and the prompt only for repetition penalties. The work grows with the longest
    such history, not with the longest possible one.
    """
    starts = jnp.where(parameters.repetition_penalty != 1, 0, parameters.prompt_length)
    stops = jnp.where(has_penalties(parameters), batch.kv_lens, 0)

    def count(index: Array, counts: Array) -> Array:
        positions = (starts + index * _HISTORY_TOKENS)[:, None] + jnp.arange(_HISTORY_TOKENS)
        ids = tokens.at[batch.row_ids[:, None], positions].get(mode="clip")
        ids = jnp.where(positions < stops[:, None], ids, NO_TOKEN)
        # A prompt's tokens are marked once each, or a few times where they meet in one part.
        unmarked = jnp.take_along_axis(counts, ids, axis=1, mode="clip") < _IN_PROMPT
        in_prompt = positions < parameters.prompt_length[:, None]
        return _add(counts, ids, jnp.where(in_prompt, jnp.where(unmarked, _IN_PROMPT, 0), 1))

    num_parts = -(-jnp.max(stops - starts) // _HISTORY_TOKENS)
    return lax.fori_loop(0, num_parts, count, jnp.zeros((len(stops), size), jnp.int32))


def _penalise(logits: Array, counts: Array, parameters: RowParameters) -> Array:
    """Repetition as in CTRL (Keskar et al. 2019) and transformers; frequency and presence as OpenAI defines them."""
    repetition = parameters.repetition_penalty[:, None]
    generated = counts & (_IN_PROMPT - 1)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts != 0, repeated, logits)
    logits -= parameters.frequency_penalty[:, None] * generated.astype(jnp.float32)
    return logits - jnp.where(generated > 0, parameters.presence_penalty[:, None], 0)

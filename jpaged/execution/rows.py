"""What each running row keeps on the device, so that the host sends only changes.

Letters: R rows and one scratch row; M tokens of the longest sequence; G KV groups; Q pages of the longest sequence.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jpaged.execution.batch import RowChanges, RowParameters, StepBatch, pack_parameters, unpack_parameters
from jpaged.step_plan import RowSampling


class Rows(NamedTuple):
    """The running state, donated to each step.

    Attributes:
        tokens: int32 [R + 1, M], each row's history: prompt and output.
        page_tables: int32 [G, R + 1, Q].
        parameters: sampling parameters, entries [R + 1].
    """

    tokens: Array
    page_tables: Array
    parameters: RowParameters


def make_rows(num_rows: int, max_model_len: int, pages_per_seq: int, scratch_page: int) -> Rows:
    """Return empty rows: every page table names the scratch page, every row is greedy."""
    all_rows = num_rows + 1
    greedy = jnp.asarray(pack_parameters(RowSampling()))
    return Rows(
        tokens=jnp.zeros((all_rows, max_model_len), jnp.int32),
        page_tables=jnp.full((1, all_rows, pages_per_seq), scratch_page, jnp.int32),
        parameters=jax.tree.map(lambda word: jnp.broadcast_to(word, all_rows), unpack_parameters(greedy)),
    )


def apply_changes(rows: Rows, changes: RowChanges) -> Rows:
    """Copy rows, all sources read first, then enter new pages and taken rows. Padding changes the scratch row only."""
    scratch_row = rows.tokens.shape[0] - 1
    rows = lax.cond(
        jnp.any(changes.copy_targets != scratch_row), lambda rows: _copy_rows(rows, changes), lambda rows: rows, rows
    )
    page_tables = rows.page_tables.at[changes.page_groups, changes.page_rows, changes.page_indices].set(
        changes.page_ids
    )
    parameters = jax.tree.map(
        lambda kept, new: kept.at[changes.taken_rows].set(new), rows.parameters, changes.taken_parameters
    )
    return rows._replace(page_tables=page_tables, parameters=parameters)


def _copy_rows(rows: Rows, changes: RowChanges) -> Rows:
    sources, targets = changes.copy_sources, changes.copy_targets
    return rows._replace(
        tokens=rows.tokens.at[targets].set(rows.tokens[sources]),
        page_tables=rows.page_tables.at[:, targets].set(rows.page_tables[:, sources]),
    )


def read_tokens(rows: Rows, batch: StepBatch, token_rows: Array, positions: Array) -> tuple[Rows, Array]:
    """Enter the tokens that the host knows into the histories, and return all of the step's tokens.

    Args:
        token_rows: int32 [T], each token's row.
        positions: int32 [T], each token's position in its sequence.

    Returns:
        the rows, and token ids int32 [T].
    """
    token_ids = jnp.where(batch.token_ids >= 0, batch.token_ids, rows.tokens[token_rows, positions])
    return rows._replace(tokens=rows.tokens.at[token_rows, positions].set(token_ids)), token_ids


def append_tokens(rows: Rows, batch: StepBatch, drawn: Array) -> Rows:
    """Write the drawn tokens, int32 [S], behind the histories of the rows that drew one.

    A sequence that has just reached the longest length has no place left for its last token, and needs none: the
    write falls outside and is dropped.
    """
    scratch_row = rows.tokens.shape[0] - 1
    target_rows = jnp.where(batch.samples, batch.row_ids, scratch_row)
    return rows._replace(tokens=rows.tokens.at[target_rows, batch.kv_lens].set(drawn, mode="drop"))


def enter_histories(rows: Rows, words: Array) -> Rows:
    """Write tokens that the device never computed into the histories.

    Args:
        words: int32 [3, N], each token's row, position and id; padding names a position that no row has.
    """
    token_rows, positions, token_ids = words
    return rows._replace(tokens=rows.tokens.at[token_rows, positions].set(token_ids, mode="drop"))

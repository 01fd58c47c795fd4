"""The one array that a step sends to the device: a plan, packed into int32 words and taken apart again under jit.

Letters: T tokens and S rows of the bucket; C row copies, N page table entries and R taken rows at most.
"""

from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jpaged.execution.buckets import Bucket
from jpaged.step_plan import RowSampling, StepPlan


class RowFlag(IntFlag):
    """What a row has beyond numbers; a row without a flag never reads what its place in `Constraints` holds."""

    ALLOWED = 1
    BIAS = 2
    BAD_WORDS = 4
    LATE = 8
    BEAM = 16


class RowParameters(NamedTuple):
    """Sampling parameters, one entry a row, as in RowSampling: float32 [S], then int32 [S]. `flags` is of RowFlag."""

    temperature: Array
    top_p: Array
    min_p: Array
    presence_penalty: Array
    frequency_penalty: Array
    repetition_penalty: Array
    top_k: Array
    seed_low: Array
    seed_high: Array
    sample_index: Array
    prompt_length: Array
    min_length: Array
    flags: Array

    def has(self, flag: RowFlag) -> Array:
        """Which rows have a flag, bool [S]."""
        return (self.flags & int(flag)) != 0


_FLOATS = RowParameters._fields[:6]
_NUM_PARAMETERS = len(RowParameters._fields)


def pack_parameters(sampling: RowSampling) -> NDArray[np.int32]:
    """The bits of RowParameters' fields, int32 [_NUM_PARAMETERS]."""
    floats = np.array([getattr(sampling, name) for name in _FLOATS], np.float32)
    seed_words = np.array([sampling.seed & 0xFFFFFFFF, sampling.seed >> 32], np.uint32).view(np.int32)
    rest = [sampling.sample_index, sampling.prompt_length, sampling.min_length, _flags(sampling)]
    return np.array([*floats.view(np.int32), sampling.top_k, *seed_words, *rest], np.int32)


def unpack_parameters(columns: Array) -> RowParameters:
    """Take int32 [_NUM_PARAMETERS, ...] apart; called under jit."""
    return RowParameters(
        *(
            jax.lax.bitcast_convert_type(column, jnp.float32) if name in _FLOATS else column
            for name, column in zip(RowParameters._fields, columns, strict=True)
        )
    )


def _flags(sampling: RowSampling) -> RowFlag:
    flags = RowFlag.BEAM if sampling.is_beam else RowFlag(0)
    if (constraints := sampling.constraints) is not None:
        flags |= RowFlag.ALLOWED if constraints.allowed_bits is not None else 0
        flags |= RowFlag.BIAS if constraints.logit_bias else 0
        flags |= RowFlag.BAD_WORDS if constraints.bad_words else 0
        flags |= RowFlag.LATE if constraints.late_token_ids else 0
    return flags


class RowChanges(NamedTuple):
    """What changes in the rows, in this order. Padding entries name the scratch row and the scratch page.

    Attributes:
        copy_sources, copy_targets: int32 [C], rows whose history and page table others take over.
        page_groups, page_rows, page_indices, page_ids: int32 [N], new entries of page tables.
        taken_rows: int32 [R].
        taken_parameters: entries [R], for `taken_rows`.
    """

    copy_sources: Array
    copy_targets: Array
    page_groups: Array
    page_rows: Array
    page_indices: Array
    page_ids: Array
    taken_rows: Array
    taken_parameters: RowParameters


class StepBatch(NamedTuple):
    """A plan on the device. Padding entries name the scratch row.

    Attributes:
        token_ids: int32 [T], negative where the row's own history holds the token.
        row_ids: int32 [S].
        cu_q_lens: int32 [S + 1]; sequence s computes tokens cu_q_lens[s] .. cu_q_lens[s + 1] of the flat batch.
        kv_lens: int32 [S], lengths with the new tokens; 0 for padding.
        samples: bool [S], whether a token is drawn.
        masked: bool [S], whether the step's masks hold one for this place.
        num_seqs, num_decode: int32 [].
        wants_logprobs: bool [].
        changes: what changes in the rows before the step.
    """

    token_ids: Array
    row_ids: Array
    cu_q_lens: Array
    kv_lens: Array
    samples: Array
    masked: Array
    num_seqs: Array
    num_decode: Array
    wants_logprobs: Array
    changes: RowChanges


def _slices(sizes: dict[str, int], start: int = 0) -> dict[str, slice]:
    slices: dict[str, slice] = {}
    for name, size in sizes.items():
        slices[name] = slice(start, start + size)
        start += size
    return slices


@dataclass(frozen=True)
class ChangesLayout:
    """How many row changes fit into a run of words, and where each field lies.

    Attributes:
        max_rows: rows taken, and row copies, at most.
        max_pages: new page table entries at most.
        scratch_row: the row that belongs to nobody.
        scratch_page: the page that belongs to nobody.
        start: index of the first word.
    """

    max_rows: int
    max_pages: int
    scratch_row: int
    scratch_page: int
    start: int = 0

    @cached_property
    def _slices(self) -> dict[str, slice]:
        rows, pages = self.max_rows, self.max_pages
        sizes = {"copy_sources": rows, "copy_targets": rows, "page_groups": pages, "page_rows": pages}
        sizes |= {"page_indices": pages, "page_ids": pages, "taken_rows": rows}
        return _slices(sizes | {"taken_parameters": _NUM_PARAMETERS * rows}, self.start)

    @property
    def stop(self) -> int:
        """Index of the word after the last."""
        return self._slices["taken_parameters"].stop

    def holds(self, plan: StepPlan) -> bool:
        return (
            len(plan.rows_taken) <= self.max_rows
            and len(plan.row_copies) <= self.max_rows
            and len(plan.new_pages) <= self.max_pages
        )

    def pack(self, words: NDArray[np.int32], plan: StepPlan) -> None:
        """Write a plan's changes, which must fit, into zeroed words."""
        view = {name: words[where] for name, where in self._slices.items()}
        for name in ("copy_sources", "copy_targets", "page_rows", "taken_rows"):
            view[name][:] = self.scratch_row
        view["page_ids"][:] = self.scratch_page
        _fill_columns(view, ("copy_sources", "copy_targets"), plan.row_copies)
        _fill_columns(view, ("page_groups", "page_rows", "page_indices", "page_ids"), plan.new_pages)
        parameters = view["taken_parameters"].reshape(_NUM_PARAMETERS, -1)
        for place, (row, sampling) in enumerate(plan.rows_taken):
            view["taken_rows"][place] = row
            parameters[:, place] = pack_parameters(sampling)

    def unpack(self, words: Array) -> RowChanges:
        """Take them out again; called under jit."""
        view = {name: words[where] for name, where in self._slices.items()}
        columns = view.pop("taken_parameters").reshape(_NUM_PARAMETERS, -1)
        return RowChanges(**view, taken_parameters=unpack_parameters(columns))


def _fill_columns(view: dict[str, NDArray[np.int32]], names: tuple[str, ...], entries: list[tuple[int, ...]]) -> None:
    """Write tuples as columns."""
    if entries:
        for name, column in zip(names, np.array(entries, np.int32).T, strict=True):
            view[name][: len(column)] = column


@dataclass(frozen=True)
class BatchLayout:
    """Where each field of a bucket's packed array lies.

    Attributes:
        bucket: the shape.
        page_size_tokens: tokens per page.
        scratch_row: the row that belongs to nobody.
        scratch_page: the page that belongs to nobody.
    """

    bucket: Bucket
    page_size_tokens: int
    scratch_row: int
    scratch_page: int

    @cached_property
    def _slices(self) -> dict[str, slice]:
        rows, tokens = self.bucket.num_rows, self.bucket.num_tokens
        sizes = {"token_ids": tokens, "row_ids": rows, "cu_q_lens": rows + 1, "kv_lens": rows, "samples": rows}
        sizes["masked"] = rows
        return _slices(sizes | {"numbers": 3})

    @cached_property
    def changes(self) -> ChangesLayout:
        rows, tokens = self.bucket.num_rows, self.bucket.num_tokens
        return ChangesLayout(
            max_rows=rows,
            max_pages=tokens // self.page_size_tokens + rows,  # each row ends in a page of its own
            scratch_row=self.scratch_row,
            scratch_page=self.scratch_page,
            start=self._slices["numbers"].stop,
        )

    @property
    def num_words(self) -> int:
        return self.changes.stop

    def pack(self, plan: StepPlan, with_changes: bool = True) -> NDArray[np.int32]:
        """Return the plan as int32 [num_words]; its row changes, if wanted, must fit."""
        words = np.zeros(self.num_words, np.int32)
        view = {name: words[where] for name, where in self._slices.items()}
        num_seqs = plan.num_seqs
        view["token_ids"][: plan.num_tokens] = plan.token_ids
        view["row_ids"][:] = self.scratch_row
        view["row_ids"][:num_seqs] = plan.row_ids
        view["cu_q_lens"][:] = plan.num_tokens
        view["cu_q_lens"][0] = 0
        counts = np.array(plan.counts, np.int32)
        np.cumsum(counts, out=view["cu_q_lens"][1 : num_seqs + 1])
        view["kv_lens"][:num_seqs] = np.array(plan.starts, np.int32) + counts
        view["samples"][:num_seqs] = plan.samples
        view["masked"][[place for place, _ in plan.masks]] = 1
        view["numbers"][:] = num_seqs, plan.num_decode, plan.wants_logprobs
        self.changes.pack(words, plan if with_changes else StepPlan(plan.step))
        return words

    def unpack(self, words: Array) -> StepBatch:
        """Take int32 [num_words] apart; called under jit."""
        view = {name: words[where] for name, where in self._slices.items()}
        num_seqs, num_decode, wants_logprobs = view.pop("numbers")
        samples, masked = view.pop("samples") != 0, view.pop("masked") != 0
        return StepBatch(
            **view,
            samples=samples,
            masked=masked,
            num_seqs=num_seqs,
            num_decode=num_decode,
            wants_logprobs=wants_logprobs != 0,
            changes=self.changes.unpack(words),
        )

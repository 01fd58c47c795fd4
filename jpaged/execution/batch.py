"""The one array that a step sends to the device: a plan, packed into int32 words and taken apart again under jit.

Letters: T tokens and S rows of the bucket; N = T // page size + S, the most pages a step can be first to write.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jpaged.execution.buckets import Bucket
from jpaged.step_plan import StepPlan


class RowParameters(NamedTuple):
    """Sampling parameters, one entry a row: float32 [S] and int32 or uint32 [S]."""

    temperature: Array
    top_p: Array
    min_p: Array
    top_k: Array
    seed_low: Array
    seed_high: Array
    sample_index: Array


_FLOATS = ("temperature", "top_p", "min_p")
_NUM_PARAMETERS = len(RowParameters._fields)


class StepBatch(NamedTuple):
    """A plan on the device. Padding entries name the scratch row and the scratch page.

    Attributes:
        token_ids: int32 [T], negative where the row's own history holds the token.
        row_ids: int32 [S].
        cu_q_lens: int32 [S + 1]; sequence s computes tokens cu_q_lens[s] .. cu_q_lens[s + 1] of the flat batch.
        kv_lens: int32 [S], lengths with the new tokens; 0 for padding.
        samples: bool [S], whether a token is drawn.
        num_seqs, num_decode: int32 [].
        new_page_groups, new_page_rows, new_page_indices, new_page_ids: int32 [N].
        taken_rows: int32 [S].
        taken_parameters: entries [S], for `taken_rows`.
    """

    token_ids: Array
    row_ids: Array
    cu_q_lens: Array
    kv_lens: Array
    samples: Array
    num_seqs: Array
    num_decode: Array
    new_page_groups: Array
    new_page_rows: Array
    new_page_indices: Array
    new_page_ids: Array
    taken_rows: Array
    taken_parameters: RowParameters


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
        new_pages = tokens // self.page_size_tokens + rows
        sizes = {
            "token_ids": tokens,
            "row_ids": rows,
            "cu_q_lens": rows + 1,
            "kv_lens": rows,
            "samples": rows,
            "counts": 2,
            "new_page_groups": new_pages,
            "new_page_rows": new_pages,
            "new_page_indices": new_pages,
            "new_page_ids": new_pages,
            "taken_rows": rows,
            "taken_parameters": _NUM_PARAMETERS * rows,
        }
        slices: dict[str, slice] = {}
        start = 0
        for name, size in sizes.items():
            slices[name] = slice(start, start + size)
            start += size
        return slices

    @property
    def num_words(self) -> int:
        return self._slices["taken_parameters"].stop

    def pack(self, plan: StepPlan) -> NDArray[np.int32]:
        """Return the plan as int32 [num_words]."""
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
        view["counts"][:] = num_seqs, plan.num_decode
        view["new_page_rows"][:] = self.scratch_row
        view["new_page_ids"][:] = self.scratch_page
        if plan.new_pages:
            columns = np.array(plan.new_pages, np.int32).T
            for name, column in zip(
                ("new_page_groups", "new_page_rows", "new_page_indices", "new_page_ids"), columns, strict=True
            ):
                view[name][: len(column)] = column
        view["taken_rows"][:] = self.scratch_row
        if plan.rows_taken:
            self._pack_taken(view["taken_rows"], view["taken_parameters"], plan)
        return words

    def _pack_taken(self, rows: NDArray[np.int32], words: NDArray[np.int32], plan: StepPlan) -> None:
        parameters = words.reshape(_NUM_PARAMETERS, -1)
        for place, (row, sampling) in enumerate(plan.rows_taken):
            rows[place] = row
            floats = np.array([sampling.temperature, sampling.top_p, sampling.min_p], np.float32)
            seed_words = np.array([sampling.seed & 0xFFFFFFFF, sampling.seed >> 32], np.uint32)
            parameters[:3, place] = floats.view(np.int32)
            parameters[3, place] = sampling.top_k
            parameters[4:6, place] = seed_words.view(np.int32)
            parameters[6, place] = sampling.sample_index

    def unpack(self, words: Array) -> StepBatch:
        """Take int32 [num_words] apart; called under jit."""
        view = {name: words[where] for name, where in self._slices.items()}
        parameters = view.pop("taken_parameters").reshape(_NUM_PARAMETERS, -1)
        counts = view.pop("counts")
        samples = view.pop("samples") != 0
        return StepBatch(
            **view,
            samples=samples,
            num_seqs=counts[0],
            num_decode=counts[1],
            taken_parameters=RowParameters(
                *(
                    jax.lax.bitcast_convert_type(words, jnp.float32 if name in _FLOATS else jnp.int32)
                    for name, words in zip(RowParameters._fields, parameters, strict=True)
                )
            ),
        )

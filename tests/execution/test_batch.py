"""A plan survives packing and unpacking; padding names the scratch row and page only."""

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.execution.batch import BatchLayout
from jpaged.execution.buckets import Bucket
from jpaged.step_plan import ON_DEVICE, RowSampling, StepPlan

SCRATCH_ROW, SCRATCH_PAGE = 4, 99
LAYOUT = BatchLayout(Bucket(12, 4), 4, SCRATCH_ROW, SCRATCH_PAGE)


def unpack(plan: StepPlan):
    return jax.tree.map(np.asarray, jax.jit(LAYOUT.unpack)(LAYOUT.pack(plan)))


def test_round_trip():
    sampling = RowSampling(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=2**64 - 3, sample_index=6)
    plan = StepPlan(
        step=3,
        sequence_ids=[10, 11, 12],
        row_ids=[2, 0, 3],
        starts=[9, 4, 0],
        counts=[1, 1, 5],
        samples=[True, True, False],
        num_decode=2,
        token_ids=[ON_DEVICE, 77, 1, 2, 3, 4, 5],
        wants_logprobs=True,
        rows_taken=[(3, sampling)],
        row_copies=[(2, 0), (0, 2)],
        new_pages=[(0, 0, 1, 55), (0, 3, 0, 8), (0, 3, 1, 7)],
    )
    batch = unpack(plan)
    assert batch.token_ids.tolist() == [-1, 77, 1, 2, 3, 4, 5, 0, 0, 0, 0, 0]
    assert batch.row_ids.tolist() == [2, 0, 3, SCRATCH_ROW]
    assert batch.cu_q_lens.tolist() == [0, 1, 2, 7, 7]
    assert batch.kv_lens.tolist() == [10, 5, 5, 0]
    assert batch.samples.tolist() == [True, True, False, False]
    assert (batch.num_seqs, batch.num_decode) == (3, 2)
    assert batch.wants_logprobs
    changes = batch.changes
    assert changes.copy_sources.tolist() == [2, 0, SCRATCH_ROW, SCRATCH_ROW]
    assert changes.copy_targets.tolist() == [0, 2, SCRATCH_ROW, SCRATCH_ROW]
    assert changes.page_groups.tolist() == [0] * 7
    assert changes.page_rows.tolist() == [0, 3, 3] + [SCRATCH_ROW] * 4
    assert changes.page_indices.tolist() == [1, 0, 1, 0, 0, 0, 0]
    assert changes.page_ids.tolist() == [55, 8, 7] + [SCRATCH_PAGE] * 4
    assert changes.taken_rows.tolist() == [3] + [SCRATCH_ROW] * 3
    parameters = jax.tree.map(lambda values: values[0], changes.taken_parameters)
    assert np.allclose([parameters.temperature, parameters.top_p, parameters.min_p], [0.7, 0.9, 0.05])
    assert (parameters.top_k, parameters.sample_index) == (40, 6)
    seed = int(np.uint32(parameters.seed_low)) | int(np.uint32(parameters.seed_high)) << 32
    assert seed == 2**64 - 3


def test_an_empty_plan_touches_nothing_but_scratch():
    batch = unpack(StepPlan(step=0))
    assert batch.num_seqs == 0 and not batch.samples.any()
    changes = batch.changes
    rows = [batch.row_ids, changes.page_rows, changes.taken_rows, changes.copy_sources, changes.copy_targets]
    assert set(np.concatenate(rows).tolist()) == {SCRATCH_ROW}
    assert set(changes.page_ids.tolist()) == {SCRATCH_PAGE}
    assert batch.cu_q_lens.tolist() == [0] * 5 and batch.kv_lens.tolist() == [0] * 4


def test_changes_that_do_not_fit_are_left_to_another_call():
    entry = (0, 1, 0, 5)
    assert LAYOUT.changes.holds(StepPlan(step=0, new_pages=[entry] * 7))
    assert not LAYOUT.changes.holds(StepPlan(step=0, new_pages=[entry] * 8))
    assert not LAYOUT.changes.holds(StepPlan(step=0, row_copies=[(0, 1)] * 5))
    words = LAYOUT.pack(StepPlan(step=0, new_pages=[entry] * 8), with_changes=False)
    assert set(np.asarray(LAYOUT.unpack(jnp.asarray(words)).changes.page_ids).tolist()) == {SCRATCH_PAGE}

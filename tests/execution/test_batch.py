"""A plan survives packing and unpacking; padding names the scratch row and page only."""

import jax
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
        rows_taken=[(3, sampling)],
        new_pages=[(0, 0, 1, 55), (0, 3, 0, 8), (0, 3, 1, 7)],
    )
    batch = unpack(plan)
    assert batch.token_ids.tolist() == [-1, 77, 1, 2, 3, 4, 5, 0, 0, 0, 0, 0]
    assert batch.row_ids.tolist() == [2, 0, 3, SCRATCH_ROW]
    assert batch.cu_q_lens.tolist() == [0, 1, 2, 7, 7]
    assert batch.kv_lens.tolist() == [10, 5, 5, 0]
    assert batch.samples.tolist() == [True, True, False, False]
    assert (batch.num_seqs, batch.num_decode) == (3, 2)
    assert batch.new_page_groups.tolist() == [0] * 7
    assert batch.new_page_rows.tolist() == [0, 3, 3] + [SCRATCH_ROW] * 4
    assert batch.new_page_indices.tolist() == [1, 0, 1, 0, 0, 0, 0]
    assert batch.new_page_ids.tolist() == [55, 8, 7] + [SCRATCH_PAGE] * 4
    assert batch.taken_rows.tolist() == [3] + [SCRATCH_ROW] * 3
    parameters = jax.tree.map(lambda values: values[0], batch.taken_parameters)
    assert np.allclose([parameters.temperature, parameters.top_p, parameters.min_p], [0.7, 0.9, 0.05])
    assert (parameters.top_k, parameters.sample_index) == (40, 6)
    seed = int(np.uint32(parameters.seed_low)) | int(np.uint32(parameters.seed_high)) << 32
    assert seed == 2**64 - 3


def test_an_empty_plan_touches_nothing_but_scratch():
    batch = unpack(StepPlan(step=0))
    assert batch.num_seqs == 0 and not batch.samples.any()
    assert set(batch.row_ids.tolist() + batch.new_page_rows.tolist() + batch.taken_rows.tolist()) == {SCRATCH_ROW}
    assert set(batch.new_page_ids.tolist()) == {SCRATCH_PAGE}
    assert batch.cu_q_lens.tolist() == [0] * 5 and batch.kv_lens.tolist() == [0] * 4

"""A plan survives packing and unpacking; padding names the scratch row and page only."""

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.execution.batch import BatchLayout, DrawLayout, RowFlag
from jpaged.execution.buckets import Bucket
from jpaged.execution.constraints import NO_TOKEN, ConstraintsLayout, make_constraints
from jpaged.step_plan import ON_DEVICE, RowConstraints, RowSampling, StepPlan

SCRATCH_ROW, SCRATCH_PAGE = 4, 99
LAYOUT = BatchLayout(Bucket(12, 4), 4, SCRATCH_ROW, SCRATCH_PAGE)
DRAW_LAYOUT = DrawLayout(4, SCRATCH_ROW)


def unpack(plan: StepPlan, layout: BatchLayout | DrawLayout = LAYOUT):
    return jax.tree.map(np.asarray, jax.jit(layout.unpack)(layout.pack(plan)))


def test_round_trip():
    sampling = RowSampling(
        temperature=0.7,
        top_p=0.9,
        top_k=2**31 - 1,
        min_p=0.05,
        seed=2**64 - 3,
        sample_index=6,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.2,
        prompt_length=17,
        min_length=20,
        is_beam=True,
        constraints=RowConstraints(bad_words=((1, 2),), late_token_ids=(3,)),
    )
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
        masks=[(1, np.zeros(1, np.uint32))],
        rows_taken=[(3, sampling)],
        row_copies=[(2, 0), (0, 2)],
        new_pages=[(0, 0, 1, 55), (0, 3, 0, 8), (0, 3, 1, 7)],
    )
    batch = unpack(plan)
    assert batch.token_ids.tolist() == [-1, 77, 1, 2, 3, 4, 5, 0, 0, 0, 0, 0]
    assert batch.row_ids.tolist() == [2, 0, 3, SCRATCH_ROW]
    assert batch.cu_q_lens.tolist() == [0, 1, 2, 7, 7]
    assert batch.kv_lens.tolist() == [10, 5, 5, 0]
    assert (batch.num_seqs, batch.num_decode) == (3, 2)
    changes = batch.changes
    assert changes.copy_sources.tolist() == [2, 0, SCRATCH_ROW, SCRATCH_ROW]
    assert changes.copy_targets.tolist() == [0, 2, SCRATCH_ROW, SCRATCH_ROW]
    assert changes.page_groups.tolist() == [0] * 7
    assert changes.page_rows.tolist() == [0, 3, 3] + [SCRATCH_ROW] * 4
    assert changes.page_indices.tolist() == [1, 0, 1, 0, 0, 0, 0]
    assert changes.page_ids.tolist() == [55, 8, 7] + [SCRATCH_PAGE] * 4
    assert changes.taken_rows.tolist() == [3] + [SCRATCH_ROW] * 3
    parameters = jax.tree.map(lambda values: values[0], changes.taken_parameters)
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert getattr(parameters, name) == np.float32(getattr(sampling, name)), name
    for name in ("top_k", "sample_index", "prompt_length", "min_length"):
        assert getattr(parameters, name) == getattr(sampling, name), name
    assert parameters.flags == RowFlag.BEAM | RowFlag.BAD_WORDS | RowFlag.LATE
    seed = int(np.uint32(parameters.seed_low)) | int(np.uint32(parameters.seed_high)) << 32
    assert seed == 2**64 - 3
    draws = unpack(plan, DRAW_LAYOUT)
    assert draws.indices.tolist() == [0, 1, 6, 0]
    assert draws.row_ids.tolist() == [2, 0, 3, SCRATCH_ROW]
    assert draws.kv_lens.tolist() == [10, 5, 5, 0]
    assert draws.samples.tolist() == [True, True, False, False]
    assert draws.masked.tolist() == [False, True, False, False]
    assert draws.wants_logprobs


def test_an_empty_plan_touches_nothing_but_scratch():
    batch = unpack(StepPlan(step=0))
    draws = unpack(StepPlan(step=0), DRAW_LAYOUT)
    assert batch.num_seqs == 0 and not draws.samples.any() and not draws.masked.any() and not draws.wants_logprobs
    assert set(draws.row_ids.tolist()) == {SCRATCH_ROW}
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


def test_constraints_enter_one_row_and_replace_what_was_there():
    vocabulary = 70
    layout = ConstraintsLayout(vocabulary)
    enter = jax.jit(layout.enter)
    bits = np.array([0xF000000F, 7, 0x3F], np.uint32)
    full = RowConstraints(bits, ((3, -2.5), (69, 1e4)), ((5, 6), (7, 8, 9)), (2, 11))
    rows = enter(make_constraints(4, vocabulary), layout.pack(2, full))
    assert rows.allowed_bits[2].tolist() == bits.tolist()
    assert rows.bias_ids[2, :3].tolist() == [3, 69, NO_TOKEN] and rows.bias_values[2, :2].tolist() == [-2.5, 1e4]
    assert rows.bad_words[2, :3, -4:].tolist() == [[-1, -1, 5, 6], [-1, 7, 8, 9], [-1] * 4]
    assert rows.late_ids[2, :3].tolist() == [2, 11, NO_TOKEN]
    for values in (rows.bias_ids, rows.bad_words, rows.late_ids):
        assert set(np.delete(np.asarray(values), 2, axis=0).ravel().tolist()) == {NO_TOKEN}
    again = enter(rows, layout.pack(2, RowConstraints(late_token_ids=(4,))))
    assert set(np.asarray(again.bias_ids[2]).tolist()) == {NO_TOKEN} and again.late_ids[2, :2].tolist() == [4, NO_TOKEN]

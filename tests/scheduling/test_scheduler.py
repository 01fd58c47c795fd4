"""The scheduler against a simulated device: outputs, books, limits, order, preemption."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jpaged.errors import CapacityError
from jpaged.scheduling.sequence import Sequence
from tests.fakes.loop import Loop, prompt
from tests.fakes.simulated_runner import generate


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_are_those_of_each_sequence_alone(overlap):
    loop = Loop(overlap=overlap)
    for salt in range(9):
        loop.add(prompt(3 + 5 * salt, salt), 2 + 3 * salt)
    loop.run()
    for salt, sequence in enumerate(loop.sequences):
        assert sequence.output_token_ids == generate(prompt(3 + 5 * salt, salt), 2 + 3 * salt)
        assert sequence.finish is not None and sequence.finish.reason == "length"
    assert loop.scheduler.pool.num_free == 64


@settings(max_examples=150)
@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 10)), min_size=1, max_size=12),
    num_pages=st.integers(13, 40),
    rows=st.integers(1, 6),
    budget=st.integers(1, 20),
    overlap=st.booleans(),
    aborts=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 60)), max_size=4),
    eos=st.frozensets(st.integers(0, 996), max_size=200),
)
def test_random_arrivals_aborts_and_shortage(requests, num_pages, rows, budget, overlap, aborts, eos):
    """Whatever the limits, every sequence that is not aborted generates what it would alone, and no page is lost."""
    loop = Loop(num_pages=num_pages, rows=rows, budget=budget, overlap=overlap)
    pending = sorted(enumerate(requests), key=lambda item: item[1][2])
    added: dict[int, Sequence] = {}
    aborted: set[int] = set()
    for step in range(5000):
        while pending and pending[0][1][2] <= step:
            index, (length, max_tokens, _) = pending.pop(0)
            added[index] = loop.add(prompt(length, index), max_tokens, eos)
        for index, when in aborts:
            if when == step and index in added and added[index].finish is None:
                loop.scheduler.abort(added[index].group)
                aborted.add(index)
                loop.scheduler.check_invariants()
        loop.step()
        if not pending and not loop.scheduler.has_work and not loop.in_flight:
            break
    else:
        raise AssertionError("the work does not end")
    assert loop.scheduler.pool.num_free == num_pages
    for index, (length, max_tokens, _) in enumerate(requests):
        if index not in aborted:
            assert added[index].output_token_ids == generate(prompt(length, index), max_tokens, eos)
    # Between two ends of sequences each other one is sent back at most once.
    assert sum(loop.scheduler.preemptions.values()) <= len(requests) * len(requests)


def test_a_plan_respects_rows_and_budget_and_puts_decode_rows_first():
    loop = Loop(rows=3, budget=10, num_pages=200)
    for salt in range(6):
        loop.add(prompt(25, salt), 10)
    loop.run()
    for plan in loop.plans:
        assert plan.num_tokens <= 10 and plan.num_seqs <= 3
        assert all(count > 1 for count in plan.counts[plan.num_decode :])
    assert any(0 < plan.num_decode < plan.num_seqs for plan in loop.plans), "prefill and decode share steps"


def test_pages_are_taken_when_a_token_needs_them_and_not_before():
    loop = Loop(page_size=4, overlap=False, rows=1)
    sequence = loop.add(prompt(3), 8)
    pages_after_step = []
    while loop.scheduler.has_work:
        loop.step()
        pages_after_step.append(len(sequence.table.pages))
    # 3 prompt tokens, then one more token a step; the last token drawn is never computed.
    assert pages_after_step == [1, 1, 2, 2, 2, 2, 3, 0]


def test_a_long_prompt_delays_no_decode_row():
    loop = Loop(rows=4, budget=8, num_pages=400, overlap=False)
    for salt in range(3):
        loop.add(prompt(2, salt), 40)
    loop.step()
    loop.add(prompt(100, 9), 4)
    for _ in range(12):
        loop.step()
    assert all(plan.num_decode == 3 for plan in loop.plans[1:13])
    assert all(plan.counts[3] == 5 for plan in loop.plans[1:13]), "the prompt takes the rest of the budget"


def test_the_oldest_progresses_when_decode_rows_could_eat_the_budget():
    loop = Loop(rows=4, budget=2, num_pages=400, overlap=False)
    oldest = loop.add(prompt(50, 1), 2)
    for salt in range(3):
        loop.add(prompt(1, salt), 100)
    loop.run()
    finished_at = next(step for step, plan in enumerate(loop.plans) if oldest.sequence_id not in plan.sequence_ids)
    assert finished_at <= 52


def test_the_newest_gives_way_and_nobody_thrashes():
    """A pool of 1.2 x one request and 8 requests: all finish, in order, with few preemptions."""
    loop = Loop(num_pages=12, page_size=4, rows=8, budget=16)
    for salt in range(8):
        loop.add(prompt(20, salt), 20)
    loop.run()
    assert [s.output_token_ids for s in loop.sequences] == [generate(prompt(20, salt), 20) for salt in range(8)]
    assert 0 < sum(loop.scheduler.preemptions.values()) <= 8
    assert loop.groups[0].num_preemptions == 0, "the oldest never gives way"


def test_what_can_never_fit_is_refused_alone():
    loop = Loop(num_pages=4, page_size=4)
    with pytest.raises(CapacityError, match=r"needs 5 pages of 4 tokens for 1 x 18 tokens .* the pool has 4"):
        loop.add(prompt(10), 8)
    fits = loop.add(prompt(9), 8)  # 17 tokens, of which the last is never computed
    loop.run()
    assert fits.output_token_ids == generate(prompt(9), 8)


def test_the_token_in_flight_of_an_ended_sequence_is_dropped():
    expected = generate(prompt(5), 30)
    eos = frozenset({expected[3]})
    loop = Loop(overlap=True)
    sequence = loop.add(prompt(5), 30, eos)
    loop.run()
    assert sequence.output_token_ids == expected[: expected.index(expected[3]) + 1]
    assert sum(plan.samples.count(True) for plan in loop.plans) == len(sequence.output_token_ids) + 1
    assert loop.scheduler.pool.num_used == 0

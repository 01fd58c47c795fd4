"""The comparison of pages with contiguous reservations: small cases that can be followed by hand, and real lengths."""

import pytest

from scripts.reservation import (
    CONTIGUOUS,
    Limits,
    read_lengths,
    rounding_floor,
    serve_contiguous,
    serve_paged,
)


@pytest.mark.parametrize(
    ("policy", "num_prompt", "num_output", "slots"),
    [
        ("to the maximum length", 10, 25, 2048),
        ("to the next power of two", 10, 25, 10 + 32),
        ("to the next power of two", 10, 32, 10 + 32),
        ("to the next power of two", 10, 1, 10 + 1),
        ("to the next power of two", 1000, 1030, 2048),
        ("to the true length", 10, 25, 35),
    ],
)
def test_what_each_policy_reserves(policy, num_prompt, num_output, slots):
    assert CONTIGUOUS[policy](num_prompt, num_output, 2048) == slots


def test_the_floor_counts_the_last_pages_empty_slots_over_a_life():
    # 3, 4 and 5 tokens held, in pages of 4: 4 + 4 + 8 slots for 12 tokens.
    assert rounding_floor([(3, 3)], 4) == pytest.approx(1 - 12 / 16)
    assert rounding_floor([(4, 1)], 4) == 0


def test_one_request_takes_a_step_for_each_output_token_and_one_for_each_further_chunk():
    limits = Limits(memory_slots=64, max_length=16, max_batched_tokens=4)
    for served in (
        serve_contiguous([(6, 3)], CONTIGUOUS["to the true length"], limits),
        serve_paged([(6, 3)], 4, limits),
    ):
        assert served.steps == 1 + 3
    # Slots held step by step: 4, 6, 7, 8 of 9; and of 1, 2, 2, 2 pages of 4.
    assert serve_contiguous([(6, 3)], CONTIGUOUS["to the true length"], limits).waste == pytest.approx(1 - 25 / 36)
    assert serve_paged([(6, 3)], 4, limits).waste == pytest.approx(1 - 25 / 28)


def test_reservations_bound_how_many_run_at_once():
    limits = Limits(memory_slots=32, max_length=16)
    lengths = [(4, 4)] * 8
    served = {name: serve_contiguous(lengths, policy, limits) for name, policy in CONTIGUOUS.items()}
    # 16 slots each: two at a time, 4 rounds of 4 steps. 8 slots each: four at a time, 2 rounds.
    assert (served["to the maximum length"].rows, served["to the maximum length"].steps) == (2, 16)
    assert (served["to the true length"].rows, served["to the true length"].steps) == (4, 8)
    assert served["to the next power of two"] == served["to the true length"]


def test_real_lengths_waste_no_more_than_rounding_and_need_the_fewest_steps():
    lengths, limits = read_lengths(300), Limits(memory_slots=16 * 1024)
    paged = serve_paged(lengths, 16, limits)
    contiguous = {name: serve_contiguous(lengths, policy, limits) for name, policy in CONTIGUOUS.items()}
    assert abs(paged.waste - rounding_floor(lengths, 16)) < 0.003
    best = contiguous["to the true length"]
    assert paged.rows > best.rows > contiguous["to the next power of two"].rows
    assert paged.steps < best.steps < contiguous["to the maximum length"].steps
    assert paged.waste < 0.05 < 0.3 < best.waste


def test_the_floor_of_the_real_lengths():
    lengths = read_lengths(1000)
    assert len(lengths) == 1000 and rounding_floor(lengths, 16) == pytest.approx(0.0192, abs=0.0001)

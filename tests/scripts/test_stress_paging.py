"""Some episodes of the stress test: random operations on pages and scheduler, contents and books checked."""

import random

import pytest

from jpaged.step_plan import StepPlan
from scripts.stress_paging import PagingEpisode, SchedulerEpisode
from tests.fakes.plan_checks import check_plan


@pytest.mark.parametrize("seed", range(6))
def test_pages_under_random_operations(seed):
    counts = PagingEpisode(random.Random(seed), check_every=1).run(1000)
    operations = [count for name, count in counts.items() if "(" not in name]
    assert sum(operations) == 1000 and len(operations) >= 10


@pytest.mark.parametrize("seed", [1, 3, 13, 17, 209, 217])
def test_the_scheduler_under_random_operations(seed):
    counts = SchedulerEpisode(random.Random(seed), check_every=10).run(3000)
    assert counts["scheduler.step"] > 1000 and counts["scheduler.add"] > 100


@pytest.mark.parametrize(
    "moves",
    [
        {"swap_outs": [(1, 5), (2, 5)]},
        {"swap_ins": [(1, 5)], "page_copies": [(2, 5)]},
        {"new_pages": [(0, 1, 2, 7), (0, 1, 2, 8)]},
        {"row_copies": [(0, 3), (1, 3)]},
    ],
    ids=lambda moves: " ".join(moves),
)
def test_a_plan_that_writes_something_twice_is_noticed(moves):
    with pytest.raises(AssertionError, match="twice"):
        check_plan(StepPlan(0, **moves))
    check_plan(
        StepPlan(0, swap_outs=[(1, 5), (1, 6)], new_pages=[(0, 1, 2, 7), (0, 1, 3, 7)], row_copies=[(0, 3), (0, 4)])
    )

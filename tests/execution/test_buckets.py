import pytest

from jpaged.execution.buckets import Bucket, choose_bucket, make_buckets


def test_the_list_is_short_and_ends_with_the_budget_at_full_rows():
    buckets = make_buckets(512, 64)
    assert [(b.num_tokens, b.num_rows) for b in buckets] == [
        (8, 8),
        (16, 16),
        (32, 32),
        (64, 8),
        (64, 64),
        (128, 64),
        (256, 64),
        (512, 8),
        (512, 64),
    ]


@pytest.mark.parametrize("budget", [1, 2, 7, 8, 9, 63, 64, 100, 513, 2048])
@pytest.mark.parametrize("rows", [1, 3, 8, 40, 64, 256])
def test_every_step_that_the_limits_allow_has_a_bucket_that_holds_it(budget, rows):
    buckets = make_buckets(budget, rows)
    for num_rows in range(1, min(budget, rows) + 1):
        for num_tokens in {num_rows, min(num_rows + 5, budget), budget}:
            bucket = choose_bucket(buckets, num_tokens, num_rows)
            assert bucket.num_tokens >= num_tokens and bucket.num_rows >= num_rows


def test_one_row_does_not_pay_for_all():
    buckets = make_buckets(512, 64)
    assert choose_bucket(buckets, 1, 1) == Bucket(8, 8)
    assert choose_bucket(buckets, 9, 9) == Bucket(16, 16)
    assert choose_bucket(buckets, 40, 2) == Bucket(64, 8)
    assert choose_bucket(buckets, 65, 64) == Bucket(128, 64)


def test_one_row_alone_may_have_a_shape_of_its_own():
    buckets = make_buckets(512, 64, one_row_alone=True)
    assert buckets == [Bucket(1, 1), *make_buckets(512, 64)]
    assert choose_bucket(buckets, 1, 1) == Bucket(1, 1)
    assert choose_bucket(buckets, 2, 1) == choose_bucket(buckets, 2, 2) == Bucket(8, 8)

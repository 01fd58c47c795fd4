from jpaged.decoding.stopping import Finish, StopRules

RULES = StopRules(eos_token_ids=frozenset({2, 7}), stop_token_ids=frozenset({7, 9}), max_length=10)


def test_goes_on_below_the_limit():
    assert RULES.check(5, 9) is None


def test_any_end_of_sequence_token_stops():
    assert RULES.check(2, 3) == Finish("stop", by_token=True)


def test_a_stop_token_is_reported_even_if_it_is_also_an_eos():
    assert RULES.check(7, 3) == Finish("stop", 7, by_token=True)
    assert RULES.check(9, 10) == Finish("stop", 9, by_token=True)


def test_the_limit_ends_with_any_other_token():
    assert RULES.check(5, 10) == Finish("length")


def test_ignored_eos_is_an_ordinary_token():
    assert StopRules(frozenset(), frozenset(), 10).check(2, 3) is None


def test_a_token_stops_nothing_before_the_least_length():
    rules = StopRules(frozenset({2}), frozenset({7}), max_length=10, min_length=6)
    assert [rules.check(token_id, 6) for token_id in (2, 7)] == [None, None]  # the sixth token is the last of the least
    assert [rules.check(token_id, 7) for token_id in (2, 7)] == [Finish("stop", None, True), Finish("stop", 7, True)]

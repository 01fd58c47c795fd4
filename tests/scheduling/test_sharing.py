"""Shared pages against a simulated device: samples, beams, prefixes, swapping, all mixed; outputs and books."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jpaged.decoding.beam_search import BeamSearch
from jpaged.scheduling.sequence import Sequence
from tests.fakes.loop import Loop, prompt
from tests.fakes.simulated_runner import beam_search, generate


def make_search(width: int, max_tokens: int, eos: frozenset[int] = frozenset(), **settings) -> BeamSearch:
    return BeamSearch(width, max_tokens, eos, **settings)


def check_outputs(loop: Loop, group_sequences: list[Sequence], expected_prompt, max_tokens, eos=frozenset()) -> None:
    for sequence in group_sequences:
        assert sequence.output_token_ids == generate(expected_prompt, max_tokens, eos, sequence.index)


def test_samples_share_the_prompt_which_is_computed_once():
    loop = Loop(num_pages=40, page_size=4, rows=8, budget=32)
    loop.add(prompt(18), 6, n=4)
    loop.run()
    check_outputs(loop, loop.sequences, prompt(18), 6)
    # 17 tokens once, then for each sample its own last prompt token and 5 of its 6 drawn ones.
    assert loop.runner.num_computed_tokens == 17 + 4 * (1 + 5)
    # 4 full pages shared; 23 computed tokens a sample: 2 pages of its own each.
    assert loop.peak_pages == 4 + 4 * 2


def test_only_the_partly_filled_page_is_copied_and_the_last_owner_writes_in_place():
    loop = Loop(num_pages=40, page_size=4, rows=8, budget=32)
    loop.add(prompt(18), 3, n=4)
    loop.run()
    copies = [copy for plan in loop.plans for copy in plan.page_copies]
    assert len(copies) == 3 and len({source for source, _ in copies}) == 1


def test_a_prompt_that_ends_with_a_page_copies_and_shares_rightly():
    for length in (1, 3, 4, 5, 8):
        loop = Loop(num_pages=60, page_size=4, rows=8)
        loop.add(prompt(length), 9, n=3)
        loop.run()
        check_outputs(loop, loop.sequences, prompt(length), 9)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.6, 1.0, 1.4])
def test_beams_equal_a_search_on_plain_lists(early_stopping, length_penalty):
    eos = frozenset(range(0, 997, 9))
    settings = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    loop = Loop(num_pages=100, page_size=4, rows=10, budget=32)
    searches = []
    for salt, width in enumerate((2, 4, 8)):
        search = make_search(width, 12, eos, **settings)
        loop.add(prompt(5 + 6 * salt, salt), 12, beams=search)
        searches.append((search, beam_search(prompt(5 + 6 * salt, salt), make_search(width, 12, eos, **settings))))
    loop.run()
    for search, expected in searches:
        assert search.finished == expected and search.is_done
    assert loop.scheduler.pool.num_free == 100


def test_beams_take_no_more_pages_than_their_tails():
    loop = Loop(num_pages=100, page_size=4, rows=4, budget=64)
    loop.add(prompt(41), 16, beams=make_search(4, 16))
    loop.run()
    shared, tail = 10, -(-(41 + 15 - 40) // 4)
    assert loop.peak_pages <= shared + 4 * (tail + 1)
    assert loop.runner.num_computed_tokens <= 41 + 4 * 15, "nothing is computed twice"


def test_a_second_request_uses_the_pages_of_the_first():
    loop = Loop(num_pages=64, enable_prefix_caching=True, overlap=False)
    first = loop.add(prompt(18), 6)
    loop.run()
    computed = loop.runner.num_computed_tokens
    again = loop.add(prompt(18), 6)
    loop.run()
    assert again.output_token_ids == first.output_token_ids
    assert again.group.num_cached_tokens == 16
    assert loop.runner.num_computed_tokens - computed == 2 + 5


def test_a_chats_next_turn_hits_the_answer():
    loop = Loop(num_pages=64, enable_prefix_caching=True)
    first = loop.add(prompt(10), 12)
    loop.run()
    turn = prompt(10) + first.output_token_ids + [5, 6, 7]
    second = loop.add(turn, 4)
    loop.run()
    assert second.group.num_cached_tokens == 20  # 21 of the 22 tokens have KV: 5 full pages
    assert second.output_token_ids == generate(turn, 4)


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_prefix_lengths_around_a_page_and_a_full_hit(length):
    loop = Loop(num_pages=64, enable_prefix_caching=True)
    for _ in range(3):
        sequence = loop.add(prompt(length), 5)
        loop.run()
        assert sequence.output_token_ids == generate(prompt(length), 5)
    assert sequence.group.num_cached_tokens == (length - 1) // 4 * 4


def test_requests_that_arrive_together_compute_a_new_prefix_once():
    loop = Loop(num_pages=200, rows=8, budget=16, enable_prefix_caching=True)
    prompts = [[*prompt(40), salt, 2, 3] for salt in range(8)]
    for tokens in prompts:
        loop.add(tokens, 4)
    loop.run()
    for sequence, tokens in zip(loop.sequences, prompts, strict=True):
        assert sequence.output_token_ids == generate(tokens, 4)
    assert loop.runner.num_computed_tokens == 43 + 7 * 3 + 8 * 3


def test_who_waits_for_a_prefix_computes_it_when_the_leader_goes_away():
    loop = Loop(num_pages=200, rows=8, budget=8, enable_prefix_caching=True)
    leader = loop.add(prompt(40), 4)
    follower = loop.add([*prompt(39), 5], 4)
    loop.step()
    assert follower.row < 0
    loop.scheduler.abort(leader.group)
    loop.run()
    assert follower.output_token_ids == generate([*prompt(39), 5], 4)


def test_another_salt_or_no_wish_to_read_never_hits():
    loop = Loop(num_pages=64, enable_prefix_caching=True)
    loop.add(prompt(20), 3, cache_keys=("a",))
    loop.run()
    other = loop.add(prompt(20), 3, cache_keys=("b",))
    loop.run()
    unread = loop.add(prompt(20), 3, cache_keys=("a",), reads_cache=False)
    loop.run()
    same = loop.add(prompt(20), 3, cache_keys=("a",))
    loop.run()
    assert [s.group.num_cached_tokens for s in (other, unread, same)] == [0, 0, 16]


def test_a_weak_digest_serves_no_wrong_text():
    loop = Loop(num_pages=200, enable_prefix_caching=True)
    assert loop.scheduler.cache is not None
    loop.scheduler.cache._digest = lambda content: bytes([sum(content) % 3])
    for salt in range(12):
        tokens = prompt(9 + salt, salt % 4)
        sequence = loop.add(tokens, 6)
        loop.run()
        assert sequence.output_token_ids == generate(tokens, 6)


def test_evicted_pages_come_back_from_the_host_tier():
    loop = Loop(num_pages=12, num_host_pages=40, enable_prefix_caching=True, overlap=False)
    for salt in range(4):
        loop.add(prompt(32, salt), 4)
        loop.run()
    before = loop.runner.num_computed_tokens
    again = loop.add(prompt(32, 0), 4)
    loop.run()
    assert again.output_token_ids == generate(prompt(32, 0), 4)
    assert again.group.num_cached_tokens == 28 and loop.runner.num_computed_tokens - before == 4 + 3


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_pool_for_one_request_and_eight_requests(preemption):
    loop = Loop(num_pages=12, rows=8, num_host_pages=100, preemption=preemption)
    for salt in range(8):
        loop.add(prompt(20, salt), 20)
    loop.run()
    for salt, sequence in enumerate(loop.sequences):
        assert sequence.output_token_ids == generate(prompt(20, salt), 20)
    counts = loop.scheduler.preemptions
    assert 0 < counts[preemption] <= 8 and sum(counts.values()) == counts[preemption]
    if preemption == "swap":
        assert loop.runner.num_computed_tokens == 8 * 39, "nothing is computed twice"
    assert loop.scheduler.host_pool.num_used == 0


def test_a_full_host_tier_means_recompute():
    loop = Loop(num_pages=12, rows=8, num_host_pages=2, preemption="swap")
    for salt in range(8):
        loop.add(prompt(20, salt), 20)
    loop.run()
    assert loop.scheduler.preemptions["recompute"] > 0


def test_priority_decides_who_runs_and_who_gives_way():
    loop = Loop(num_pages=12, rows=8, policy="priority", overlap=False)
    low = loop.add(prompt(16, 1), 20, priority=5)
    loop.step()
    high = loop.add(prompt(16, 2), 20, priority=1)
    loop.run()
    assert high.group.num_preemptions == 0 and low.group.num_preemptions >= 1
    assert high.output_token_ids == generate(prompt(16, 2), 20)
    assert low.output_token_ids == generate(prompt(16, 1), 20)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [20, 200])
def test_beams_that_give_way_with_their_first_token_in_flight_share_the_prompt_again(caching, budget):
    loop = Loop(num_pages=23, page_size=2, rows=8, budget=budget, preemption="recompute", enable_prefix_caching=caching)
    searches = [make_search(4, 3), make_search(4, 3)]
    loop.add(prompt(11, 3), 3, beams=searches[0])
    loop.step()
    loop.add(prompt(30, 4), 3, beams=searches[1])
    loop.run(500)
    assert searches[0].finished == beam_search(prompt(11, 3), make_search(4, 3))
    assert searches[1].finished == beam_search(prompt(30, 4), make_search(4, 3))


@pytest.mark.parametrize("seed", range(40))
def test_a_flush_while_beams_run_and_give_way_leaves_nobody_waiting(seed):
    """Names that are given up must not keep others waiting for pages that nobody computes."""
    generator = random.Random(seed)
    loop = Loop(num_pages=30, page_size=2, rows=8, budget=12, enable_prefix_caching=True, preemption="recompute")
    for place in range(6):
        search = make_search(3, 6) if place % 2 else None
        loop.add(prompt(14, place // 3), 6, beams=search)
    for _ in range(200):
        loop.step()
        if generator.random() < 0.2:
            loop.scheduler.books.flush_prefix_cache()
            loop.scheduler.check_invariants()
    loop.run(500)
    assert not loop.scheduler.books.being_computed
    follower = loop.add(prompt(14, 0), 3)
    loop.run(200)
    assert follower.output_token_ids == generate(prompt(14, 0), 3)


def test_a_pinned_prefix_stays():
    loop = Loop(num_pages=20, enable_prefix_caching=True, max_pinned_pages=8)
    loop.add(prompt(16), 1)
    loop.run()
    assert loop.scheduler.books.pin("system", prompt(16), ()) == 4
    for salt in range(1, 5):
        loop.add(prompt(30, salt), 10)
    loop.run()
    again = loop.add(prompt(17), 3)
    loop.run()
    assert again.group.num_cached_tokens == 16
    assert loop.scheduler.books.unpin("system") and not loop.scheduler.books.unpin("system")
    loop.scheduler.check_invariants()


REQUEST = st.fixed_dictionaries(
    {
        "shared": st.sampled_from([0, 3, 8, 15, 20]),
        "base": st.integers(0, 1),
        "own": st.integers(1, 12),
        "max_tokens": st.integers(1, 12),
        "when": st.integers(0, 12),
        "n": st.integers(1, 3),
        "width": st.sampled_from([0, 0, 2, 3]),
        "priority": st.integers(0, 2),
        "reads_cache": st.booleans(),
    }
)


@settings(max_examples=200)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=10),
    num_pages=st.integers(34, 60),
    num_host_pages=st.sampled_from([0, 10, 80]),
    rows=st.integers(3, 8),
    budget=st.integers(3, 24),
    overlap=st.booleans(),
    caching=st.booleans(),
    preemption=st.sampled_from(["swap", "recompute"]),
    policy=st.sampled_from(["fcfs", "priority"]),
    aborts=st.sets(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=3),
    eos=st.frozensets(st.integers(0, 996), max_size=150),
)
def test_everything_mixed(
    requests, num_pages, num_host_pages, rows, budget, overlap, caching, preemption, policy, aborts, eos
):
    """Whatever is shared, copied, cached, swapped or dropped: each request gets what it would get alone."""
    loop = Loop(
        num_pages=num_pages,
        rows=rows,
        budget=budget,
        overlap=overlap,
        num_host_pages=num_host_pages,
        enable_prefix_caching=caching,
        preemption=preemption,
        policy=policy,
    )
    texts = [prompt(r["shared"], 50 + r["base"]) + prompt(r["own"], place) for place, r in enumerate(requests)]
    pending = sorted(range(len(requests)), key=lambda place: requests[place]["when"])
    added: dict[int, tuple[list[Sequence], BeamSearch | None]] = {}
    aborted: set[int] = set()
    for step in range(5000):
        while pending and requests[pending[0]]["when"] <= step:
            place = pending.pop(0)
            r = requests[place]
            search = make_search(r["width"], r["max_tokens"], eos) if r["width"] else None
            first = loop.add(
                texts[place],
                r["max_tokens"],
                eos,
                n=1 if search else r["n"],
                beams=search,
                priority=r["priority"],
                reads_cache=r["reads_cache"],
            )
            added[place] = (list(first.group.live), search)
        for place, when in aborts:
            if when == step and place in added and added[place][0][0].group.live:
                loop.scheduler.abort(added[place][0][0].group)
                aborted.add(place)
                loop.scheduler.check_invariants()
        loop.step()
        if not pending and not loop.scheduler.has_work and not loop.in_flight:
            break
    else:
        raise AssertionError("the work does not end")
    assert loop.scheduler.pool.num_available == num_pages and loop.scheduler.pool.num_used == 0
    loop.scheduler.plan()
    assert loop.scheduler.host_pool.num_used == 0
    for place, (sequences, search) in added.items():
        r = requests[place]
        if place in aborted:
            continue
        if search is not None:
            assert search.finished == beam_search(texts[place], make_search(r["width"], r["max_tokens"], eos))
        else:
            check_outputs(loop, sequences, texts[place], r["max_tokens"], eos)

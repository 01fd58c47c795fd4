"""Page tables that share: fork, copy on write, and the order in which pages go back."""

import pytest

from jpaged.errors import CapacityError
from jpaged.paging.page_pool import PagePool
from jpaged.paging.page_table import PageTable

PAGE_SIZE = 4


def make_table(pool: PagePool, num_tokens: int) -> PageTable:
    table = PageTable(pool, PAGE_SIZE)
    table.grow(num_tokens)
    return table


def test_a_page_comes_with_its_first_token():
    pool = PagePool(10)
    table = PageTable(pool, PAGE_SIZE)
    assert [len(table.grow(num_tokens)) for num_tokens in range(1, 10)] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert table.capacity_tokens == 12 and pool.num_used == 3
    assert table.num_missing_pages(12) == 0 and table.num_missing_pages(13) == 1 and table.num_missing_pages(1) < 0


def test_a_fork_shares_every_page_and_takes_none():
    pool = PagePool(10)
    table = make_table(pool, 9)
    fork = table.fork()
    assert fork.pages == table.pages and fork.pages is not table.pages and pool.num_used == 3
    assert [pool.refcount(page) for page in table.pages] == [2, 2, 2]
    fork.grow(13)
    assert len(fork.pages) == 4 and len(table.pages) == 3, "tables grow on their own"


def test_the_first_write_to_a_shared_page_copies_it_and_the_last_owner_writes_in_place():
    pool = PagePool(10)
    table = make_table(pool, 6)
    forks = [table.fork(), table.fork()]
    for fork, owners_left in zip(forks, (2, 1), strict=True):
        old = table.pages[1]
        assert fork.shared_page(6) == old
        index, source, new = fork.replace_shared_page(6)
        assert (index, source) == (1, old) and new not in table.pages and fork.pages == [table.pages[0], new]
        assert fork.shared_page(7) is None and pool.refcount(new) == 1 and pool.refcount(old) == owners_left
    assert table.shared_page(6) is None, "nobody else is left"
    assert table.shared_page(3) == table.pages[0] and pool.refcount(table.pages[0]) == 3, "full pages stay shared"
    assert pool.num_used == 4


def test_a_write_behind_the_last_page_copies_nothing():
    table = make_table(PagePool(10), 8)
    fork = table.fork()
    assert fork.shared_page(8) is None and fork.shared_page(7) == table.pages[1]


def test_a_cached_page_that_a_table_shares_is_copied_only_while_others_own_it():
    pool = PagePool(4)
    table = make_table(pool, 8)
    for page in table.pages:
        pool.keep(page)
    fork = table.fork()
    table.release()
    assert pool.num_cached == 0 and fork.shared_page(7) is None
    fork.release()
    assert pool.num_cached == 2 and pool.num_available == 4


def test_a_copy_that_finds_no_page_changes_nothing():
    pool = PagePool(2)
    table = make_table(pool, 6)
    fork = table.fork()
    with pytest.raises(CapacityError, match="1 pages are needed, 0 of 2 are free"):
        fork.replace_shared_page(6)
    assert fork.pages == table.pages and [pool.refcount(page) for page in table.pages] == [2, 2]
    pool.check_invariants()


def test_the_end_of_a_prefix_is_given_away_before_its_beginning():
    evicted: list[int] = []
    pool = PagePool(5, on_evict=evicted.append)
    first, second = make_table(pool, 10), make_table(pool, 8)
    for page in first.pages + second.pages:
        pool.keep(page)
    expected = first.pages[::-1] + second.pages[::-1]
    first.release()
    second.release()
    assert first.pages == [] and pool.num_cached == 5
    assert pool.allocate(4) and evicted == expected[:4], "the table that ended first goes first, its last page ahead"


def test_pages_used_last_are_used_again_first():
    pool = PagePool(100)
    table = make_table(pool, 12)
    pages = list(table.pages)
    table.release()
    assert sorted(make_table(pool, 12).pages) == sorted(pages)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_forks_may_end_in_any_order(order):
    pool = PagePool(10)
    tables = [make_table(pool, 10)]
    tables += [tables[0].fork(), tables[0].fork()]
    tables[1].replace_shared_page(9)
    tables[2].grow(14)
    for place in order:
        tables[place].release()
        pool.check_invariants()
    assert pool.num_free == 10


def test_a_table_can_take_over_references():
    pool = PagePool(4)
    table = PageTable(pool, PAGE_SIZE, pool.allocate(2))
    assert table.capacity_tokens == 8
    table.release()
    assert pool.num_free == 4

"""The pool and the table under random operations, with the invariants checked after each."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jpaged.errors import CapacityError
from jpaged.paging.page_pool import PagePool
from jpaged.paging.page_table import PageTable

NUM_PAGES, PAGE_SIZE = 12, 4


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.tables: list[tuple[PageTable, int]] = []
        self.shared: list[int] = []

    @rule(tokens=st.integers(1, 20))
    def start(self, tokens: int) -> None:
        self._grow(PageTable(self.pool, PAGE_SIZE), tokens)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.integers(0, 9))
    def append(self, data: st.DataObject, more: int) -> None:
        table, tokens = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self._grow(table, tokens + more)

    def _grow(self, table: PageTable, tokens: int) -> None:
        missing = table.num_missing_pages(tokens)
        if missing > self.pool.num_free:
            with pytest.raises(CapacityError):
                table.grow(tokens)
            table.release()  # all or nothing: only what it had before
            return
        before = list(table.pages)
        new = table.grow(tokens)
        assert len(new) == max(missing, 0) and table.pages == before + new
        assert tokens <= table.capacity_tokens < tokens + PAGE_SIZE
        self.tables.append((table, tokens))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        table.release()
        assert table.pages == []

    @precondition(lambda self: any(table.pages for table, _ in self.tables))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from([page for table, _ in self.tables for page in table.pages]))
        self.pool.share(page)
        self.shared.append(page)

    @precondition(lambda self: self.shared)
    @rule()
    def unshare(self) -> None:
        self.pool.release(self.shared.pop())

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_invariants()
        owners = [page for table, _ in self.tables for page in table.pages] + self.shared
        for page in range(NUM_PAGES):
            assert self.pool.refcount(page) == owners.count(page)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_pool_that_is_short_says_what_to_do_and_takes_nothing():
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(
        CapacityError, match="3 pages are needed, 2 of 3 are free; raise num_pages or lower max_num_seqs"
    ):
        pool.allocate(3)
    assert pool.num_free == 2


def test_releasing_a_free_page_is_a_bug_that_is_caught():
    pool = PagePool(2)
    [page] = pool.allocate(1)
    pool.release(page)
    with pytest.raises(AssertionError, match="more often than it was taken"):
        pool.release(page)


def test_sharing_a_free_page_is_a_bug_that_is_caught():
    with pytest.raises(AssertionError, match="is free"):
        PagePool(1).share(0)

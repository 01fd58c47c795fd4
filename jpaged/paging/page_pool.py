"""The pages of one tier: which are free, and how many owners each of the others has."""

from jpaged.errors import CapacityError


class PagePool:
    """A free list with reference counts. Every operation costs the same for a thousand pages or a million.

    A page is free (refcount 0) or owned by one or more page tables.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._refcounts = [0] * num_pages
        # A stack, so that the pages used last, still warm in caches, are used again first.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one owner. Raises CapacityError, and takes none, if there are fewer."""
        if count > len(self._free):
            raise CapacityError(
                f"{count} pages are needed, {len(self._free)} of {self.num_pages} are free;"
                " raise num_pages or lower max_num_seqs"
            )
        first = len(self._free) - count
        pages = self._free[first:]
        del self._free[first:]
        for page in pages:
            self._refcounts[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Add an owner to a page that has one."""
        assert self._refcounts[page] > 0, f"page {page} is free and cannot be shared"
        self._refcounts[page] += 1

    def release(self, page: int) -> None:
        """Drop an owner; the page is free when the last one is gone."""
        count = self._refcounts[page] - 1
        assert count >= 0, f"page {page} is released more often than it was taken"
        self._refcounts[page] = count
        if count == 0:
            self._free.append(page)

    def check_invariants(self) -> None:
        """Assert that every page is either free or owned, never both, never neither."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        for page, count in enumerate(self._refcounts):
            assert count >= 0, f"page {page} has refcount {count}"
            assert (count == 0) == (page in free), f"page {page}: refcount {count}, on the free list: {page in free}"

"""The pages of one tier: which are free, which are kept for their contents, and how many owners the others have."""

from collections import OrderedDict
from collections.abc import Callable

from jpaged.errors import CapacityError


class PagePool:
    """A free list with reference counts. Every operation costs the same for a thousand pages or a million.

    A page is owned (refcount above 0), cached (no owner, but its contents are worth keeping), or free. Cached pages are
    given away, the least recently used first, when the free ones run out; `on_evict` is called with each before.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] | None = None) -> None:
        self.num_pages = num_pages
        self.on_evict = on_evict
        self._refcounts = [0] * num_pages
        # A stack, so that the pages used last, still warm in caches, are used again first.
        self._free = list(range(num_pages - 1, -1, -1))
        self._keep = bytearray(num_pages)  # 1 for a page that is cached when its last owner goes
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could give: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages with an owner."""
        return self.num_pages - len(self._free) - len(self._cached)

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one owner. Raises CapacityError, and takes none, if there are fewer."""
        if count > self.num_available:
            raise CapacityError(
                f"{count} pages are needed, {self.num_available} of {self.num_pages} are free;"
                " raise num_pages or lower max_num_seqs"
            )
        while len(self._free) < count:
            self._evict()
        first = len(self._free) - count
        pages = self._free[first:]
        del self._free[first:]
        for page in pages:
            self._refcounts[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Add an owner to a page that has one, or that is cached."""
        count = self._refcounts[page]
        if count == 0:
            assert page in self._cached, f"page {page} is free and cannot be shared"
            del self._cached[page]
        self._refcounts[page] = count + 1

    def release(self, page: int) -> None:
        """Drop an owner; when the last one is gone, the page is cached if it is to be kept, else free."""
        count = self._refcounts[page] - 1
        assert count >= 0, f"page {page} is released more often than it was taken"
        self._refcounts[page] = count
        if count == 0:
            if self._keep[page]:
                self._cached[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """Keep an owned page's contents beyond its last owner."""
        assert self._refcounts[page] > 0, f"page {page} has no owner, so its contents are nobody's"
        self._keep[page] = 1

    def forget(self, page: int) -> None:
        """The page's contents are not worth keeping (any more)."""
        self._keep[page] = 0
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def _evict(self) -> None:
        page, _ = self._cached.popitem(last=False)
        self._keep[page] = 0
        if self.on_evict is not None:
            self.on_evict(page)
        self._free.append(page)

    def check_invariants(self) -> None:
        """Assert that every page is in exactly one state."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert not free & set(self._cached), "a page is free and cached"
        for page, count in enumerate(self._refcounts):
            assert count >= 0, f"page {page} has refcount {count}"
            idle = page in free or page in self._cached
            assert (count == 0) == idle, f"page {page}: refcount {count}, idle: {idle}"
            assert self._keep[page] or page not in self._cached, f"page {page} is cached for nothing"
            assert not self._keep[page] or page not in free, f"page {page} is free, but to be kept"

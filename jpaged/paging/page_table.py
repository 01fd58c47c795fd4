"""Where one sequence's tokens live: its ordered list of page ids."""

from jpaged.paging.page_pool import PagePool


class PageTable:
    """Grows page by page as tokens are about to be written; owns one reference to each of its pages."""

    __slots__ = ("_pool", "page_size_tokens", "pages")

    def __init__(self, pool: PagePool, page_size_tokens: int, pages: list[int] | None = None) -> None:
        """`pages` may be given by a caller that hands over its references."""
        self._pool = pool
        self.page_size_tokens = page_size_tokens
        self.pages: list[int] = [] if pages is None else pages

    @property
    def capacity_tokens(self) -> int:
        return len(self.pages) * self.page_size_tokens

    def num_missing_pages(self, num_tokens: int) -> int:
        """Pages to allocate before `num_tokens` tokens fit; at most 0 if they fit already."""
        return -(-num_tokens // self.page_size_tokens) - len(self.pages)

    def grow(self, num_tokens: int) -> list[int]:
        """Allocate pages until `num_tokens` tokens fit; return the new ones. Raises CapacityError as the pool does."""
        new = self._pool.allocate(max(self.num_missing_pages(num_tokens), 0))
        self.pages += new
        return new

    def fork(self) -> "PageTable":
        """Return a table that shares every page, the partly filled one too."""
        for page in self.pages:
            self._pool.share(page)
        return PageTable(self._pool, self.page_size_tokens, list(self.pages))

    def shared_page(self, position: int) -> int | None:
        """The page that a write at `position` would change for others too: it must be copied before; else `None`."""
        index = position // self.page_size_tokens
        return self.pages[index] if index < len(self.pages) and self.is_shared(index) else None

    def is_shared(self, index: int) -> bool:
        """Whether the page at an index of the table has other owners."""
        return self._pool.refcount(self.pages[index]) > 1

    def replace_shared_page(self, position: int) -> tuple[int, int, int]:
        """Put a new page in the place of the shared one at `position`; return (index, old page, new page).

        The caller has the contents copied before anything is written.
        """
        index = position // self.page_size_tokens
        old = self.pages[index]
        [new] = self._pool.allocate(1)
        self._pool.release(old)
        self.pages[index] = new
        return index, old, new

    def release(self) -> None:
        """Give every page back; the table is empty after it.

        The last page goes first: of pages that are cached, the end of a prefix is then given away before its beginning.
        """
        for page in reversed(self.pages):
            self._pool.release(page)
        self.pages.clear()

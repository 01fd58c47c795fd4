"""Where one sequence's tokens live: its ordered list of page ids."""

from jpaged.paging.page_pool import PagePool


class PageTable:
    """Grows page by page as tokens are about to be written; owns one reference to each of its pages."""

    __slots__ = ("_page_size_tokens", "_pool", "pages")

    def __init__(self, pool: PagePool, page_size_tokens: int) -> None:
        self._pool = pool
        self._page_size_tokens = page_size_tokens
        self.pages: list[int] = []

    @property
    def capacity_tokens(self) -> int:
        return len(self.pages) * self._page_size_tokens

    def num_missing_pages(self, num_tokens: int) -> int:
        """Pages to allocate before `num_tokens` tokens fit; at most 0 if they fit already."""
        return -(-num_tokens // self._page_size_tokens) - len(self.pages)

    def grow(self, num_tokens: int) -> list[int]:
        """Allocate pages until `num_tokens` tokens fit; return the new ones. Raises CapacityError as the pool does."""
        new = self._pool.allocate(max(self.num_missing_pages(num_tokens), 0))
        self.pages += new
        return new

    def release(self) -> None:
        """Give every page back; the table is empty after it."""
        for page in self.pages:
            self._pool.release(page)
        self.pages.clear()

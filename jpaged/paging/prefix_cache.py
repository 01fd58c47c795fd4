"""Pages that can be used again: full pages, named by everything that their contents depend on.

A page's KV depends on its own tokens and on all tokens before it, so its name is a chained digest: SHA-256 over the
parent's digest and the token ids, with the extra keys (salt, adapter, KV dtype) at the root. The digest only finds
the page; tokens and parent are compared on a hit, so that a collision can never serve wrong text.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jpaged.paging.page_pool import PagePool

Digest = Callable[[bytes], bytes]
NOWHERE = -1


def sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


@dataclass(slots=True, eq=False)
class CachedPage:
    """A named page. It is on the device (`page`), in the host tier (`host_page`), or in both for a moment.

    `parent` is the entry before it or, at the root, the extra keys. `ready_step` is the step that writes the page; a
    plan may use it from the next step on.
    """

    digest: bytes
    parent: "CachedPage | tuple[str, ...]"
    token_ids: tuple[int, ...]
    page: int = NOWHERE
    host_page: int = NOWHERE
    ready_step: int = -1


class PrefixCache:
    """Finds, publishes and gives away named pages of a device pool and, if there is one, a host pool."""

    def __init__(
        self, pool: PagePool, page_size_tokens: int, host_pool: PagePool | None = None, digest: Digest = sha256
    ) -> None:
        self._pool = pool
        self._host_pool = host_pool
        self._page_size_tokens = page_size_tokens
        self._digest = digest
        self._by_digest: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._by_host_page: dict[int, CachedPage] = {}
        # (device page, host page): what the next step must copy out before anything else.
        self.demotions: list[tuple[int, int]] = []
        pool.on_evict = self._on_evict
        if host_pool is not None:
            host_pool.on_evict = self._on_host_evict

    def __len__(self) -> int:
        return len(self._by_digest)

    def digests(self, token_ids: list[int], keys: tuple[str, ...], known: list[bytes]) -> list[bytes]:
        """Extend `known`, the digests of a sequence's first full pages, to all of its full pages; return it."""
        size = self._page_size_tokens
        for index in range(len(known), len(token_ids) // size):
            parent = known[-1] if known else "\0".join(keys).encode()
            known.append(self._digest(parent + array("I", token_ids[index * size : (index + 1) * size]).tobytes()))
        return known

    def match(
        self, token_ids: list[int], keys: tuple[str, ...], digests: Iterable[bytes], step: int
    ) -> list[CachedPage]:
        """Return the longest chain of named pages that begins the sequence; only those written before `step`."""
        size = self._page_size_tokens
        chain: list[CachedPage] = []
        parent: CachedPage | tuple[str, ...] = keys
        for index, digest in enumerate(digests):
            entry = self._by_digest.get(digest)
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            if entry is None or entry.ready_step >= step or not _is(entry, parent, tokens):
                break
            chain.append(entry)
            parent = entry
        return chain

    def is_being_written(self, digest: bytes, step: int) -> bool:
        """Whether a page of that name is written in `step` or later, so that a plan for `step` cannot use it yet."""
        entry = self._by_digest.get(digest)
        return entry is not None and entry.ready_step >= step

    def publish(
        self,
        chain: list[CachedPage],
        pages: list[int],
        token_ids: list[int],
        keys: tuple[str, ...],
        digests: list[bytes],
        step: int,
    ) -> None:
        """Name a sequence's full pages, which `step` writes or an earlier one has written.

        `chain` holds the entries that stand for the sequence's first pages; it is extended to one for each digest. A
        page whose name is taken already stays nameless, the first one serves; at a collision the chain ends.
        """
        size = self._page_size_tokens
        for index in range(len(chain), len(digests)):
            parent = chain[-1] if chain else keys
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            entry = self._by_digest.get(digests[index])
            if entry is None:
                entry = CachedPage(digests[index], parent, tokens, ready_step=step)
                self._by_digest[entry.digest] = entry
                self._settle(entry, pages[index])
            elif not _is(entry, parent, tokens):
                return
            elif entry.page == NOWHERE:  # it was in the host tier only
                self._settle(entry, pages[index])
                entry.ready_step = step
            chain.append(entry)

    def promote(self, entry: CachedPage, page: int, step: int) -> int:
        """A named page of the host tier is copied to device page `page` in `step`; return its host page, which the
        caller owns now and releases once the copy has been planned."""
        assert self._host_pool is not None and entry.page == NOWHERE
        host_page = entry.host_page
        self._host_pool.share(host_page)
        self._leave_host(entry)
        self._settle(entry, page)
        entry.ready_step = step
        return host_page

    def flush(self) -> None:
        """Forget all names; pages that nobody owns are free then."""
        for entry in list(self._by_digest.values()):
            self._drop(entry)
        self.demotions = []

    def _settle(self, entry: CachedPage, page: int) -> None:
        entry.page = page
        self._by_page[page] = entry
        self._pool.keep(page)

    def _leave_host(self, entry: CachedPage) -> None:
        assert self._host_pool is not None
        del self._by_host_page[entry.host_page]
        self._host_pool.forget(entry.host_page)
        entry.host_page = NOWHERE

    def _drop(self, entry: CachedPage) -> None:
        del self._by_digest[entry.digest]
        if entry.page != NOWHERE:
            del self._by_page[entry.page]
            self._pool.forget(entry.page)
        if entry.host_page != NOWHERE:
            self._leave_host(entry)

    def _on_evict(self, page: int) -> None:
        """The device pool takes a cached page back: demote it to the host tier if there is room, else forget it."""
        entry = self._by_page.pop(page)
        entry.page = NOWHERE
        if entry.host_page != NOWHERE:
            return  # it is there already: somebody computed it again
        if self._host_pool is None or not self._host_pool.num_available:
            del self._by_digest[entry.digest]
            return
        [host_page] = self._host_pool.allocate(1)
        entry.host_page = host_page
        self._by_host_page[host_page] = entry
        self._host_pool.keep(host_page)
        self._host_pool.release(host_page)  # cached there: it has a name and no owner
        self.demotions.append((page, host_page))

    def _on_host_evict(self, host_page: int) -> None:
        entry = self._by_host_page.pop(host_page)
        entry.host_page = NOWHERE
        if entry.page == NOWHERE:
            del self._by_digest[entry.digest]

    def check_invariants(self) -> None:
        """Assert that names and pages agree."""
        for digest, entry in self._by_digest.items():
            assert entry.digest == digest and len(entry.token_ids) == self._page_size_tokens
            assert entry.page != NOWHERE or entry.host_page != NOWHERE, "a name without a page"
        for where, attribute in ((self._by_page, "page"), (self._by_host_page, "host_page")):
            for page, entry in where.items():
                assert getattr(entry, attribute) == page and self._by_digest.get(entry.digest) is entry
        homes = sum((e.page != NOWHERE) + (e.host_page != NOWHERE) for e in self._by_digest.values())
        assert homes == len(self._by_page) + len(self._by_host_page), "a page is lost"


def _is(entry: CachedPage, parent: CachedPage | tuple[str, ...], token_ids: tuple[int, ...]) -> bool:
    """Whether an entry stands for these tokens behind this parent.

    A parent that was given away and computed again is another entry with the same contents; its children are linked to
    the new one then.
    """
    if entry.token_ids != token_ids:
        return False
    if entry.parent is not parent:
        if not _is_same_prefix(entry.parent, parent):
            return False
        entry.parent = parent
    return True


def _is_same_prefix(one: CachedPage | tuple[str, ...], other: CachedPage | tuple[str, ...]) -> bool:
    """Compare two chains down to their roots, or to where they meet."""
    while isinstance(one, CachedPage) and isinstance(other, CachedPage):
        if one is other:
            return True
        if one.token_ids != other.token_ids:
            return False
        one, other = one.parent, other.parent
    return one == other

"""Real pools, page tables and a prefix cache over memory made of lists: what is read back is compared with what was
written.

A slot holds a number that stands for a token's KV: it depends on the token, on all tokens before it and on the extra
keys, as KV does. So a page in a wrong place, a missing copy or a hit on other text shows at once. Every operation is a
plan of its own, and its moves are carried out in a plan's order: out to the host tier, in from it, copies, writes.
"""

from collections import Counter

from jpaged.decoding.stopping import StopRules
from jpaged.paging.page_pool import PagePool
from jpaged.paging.page_table import PageTable
from jpaged.paging.prefix_cache import CachedPage, Digest, PrefixCache, sha256
from jpaged.scheduling.preemption import distinct_pages, swap_in, swap_out
from jpaged.scheduling.sequence import Sequence, SequenceGroup
from jpaged.step_plan import RowSampling

Keys = tuple[str, ...]
_RULES = StopRules(frozenset(), frozenset(), 10**9)
_GREEDY = RowSampling()
_GARBAGE = -1


def kv_of(token_ids: list[int] | tuple[int, ...], before: int) -> list[int]:
    """What stands for the KV of tokens that follow a token whose own is `before`."""
    values: list[int] = []
    for token in token_ids:
        before = hash((before, token))
        values.append(before)
    return values


class PagedMemory:
    """Groups of sequences in a device pool and a host pool. Operations return `False` where there is no room."""

    def __init__(
        self, num_pages: int, num_host_pages: int, page_size_tokens: int, digest: Digest = sha256, max_pins: int = 3
    ) -> None:
        self.page_size_tokens = page_size_tokens
        self.pool = PagePool(num_pages)
        self.host_pool = PagePool(num_host_pages)
        self.cache = PrefixCache(self.pool, page_size_tokens, self.host_pool if num_host_pages else None, digest)
        self.device = [[_GARBAGE] * page_size_tokens for _ in range(num_pages)]
        self.host = [[_GARBAGE] * page_size_tokens for _ in range(num_host_pages)]
        self.groups: list[SequenceGroup] = []
        self.kv: dict[int, list[int]] = {}  # by sequence id: one number for each token
        self.pins: list[list[int]] = []
        self.max_pins = max_pins
        self.step = 0
        # What must be found on the device, whatever the cache says: a page for each name, until it is given away.
        self.page_of_name: dict[int, int] = {}  # a name is the last token's KV
        self._name_of_page: dict[int, int] = {}
        self._num_groups = self._num_sequences = 0

    @property
    def running(self) -> list[SequenceGroup]:
        return [group for group in self.groups if not group.is_swapped]

    @property
    def swapped(self) -> list[SequenceGroup]:
        return [group for group in self.groups if group.is_swapped]

    # -- operations --------------------------------------------------------------------------------------------------

    def start(self, token_ids: list[int], keys: Keys = (), reads_cache: bool = True) -> SequenceGroup | None:
        """A new group of one sequence, on cached pages where there are any."""
        if -(-len(token_ids) // self.page_size_tokens) > self.pool.num_available:
            return None
        self._num_groups += 1
        group = SequenceGroup(self._num_groups, token_ids, _RULES, cache_keys=keys)
        sequence = self._new_sequence(group)
        self.kv[sequence.sequence_id] = kv_of(token_ids, hash(keys))
        sequence.num_planned_tokens = 0
        if reads_cache:
            self._use_hits(sequence, self.match(token_ids, keys)[: (len(token_ids) - 1) // self.page_size_tokens])
        self.groups.append(group)
        assert self._write(sequence), "there was room"
        self.publish(sequence)
        self.step += 1
        return group

    def append(self, sequence: Sequence, token_ids: list[int], publishes: bool = True) -> bool:
        """More tokens for one sequence; a page that it shares is copied before."""
        sequence.token_ids += token_ids
        kv = self.kv[sequence.sequence_id]
        kv += kv_of(token_ids, kv[-1])
        if not self._write(sequence):
            del sequence.token_ids[len(sequence.token_ids) - len(token_ids) :], kv[len(kv) - len(token_ids) :]
            return False
        if publishes:
            self.publish(sequence)
        self.step += 1
        return True

    def fork(self, sequence: Sequence) -> Sequence:
        """Another sequence of the group with the same tokens on the same pages."""
        fork = self._new_sequence(sequence.group)
        fork.become_fork_of(sequence, sequence.num_planned_tokens)
        fork.token_ids = list(sequence.token_ids)
        self.kv[fork.sequence_id] = list(self.kv[sequence.sequence_id])
        return fork

    def end(self, sequence: Sequence) -> None:
        sequence.table.release()
        sequence.group.live.remove(sequence)
        del self.kv[sequence.sequence_id]
        if not sequence.group.live:
            self.groups.remove(sequence.group)

    def swap_out(self, group: SequenceGroup) -> bool:
        if len(distinct_pages(group)) > self.host_pool.num_available:
            return False
        self._move_out(swap_out(group, self.host_pool, self.page_size_tokens))
        self.step += 1
        return True

    def swap_in(self, group: SequenceGroup) -> bool:
        if len(distinct_pages(group)) > self.pool.num_available:
            return False
        moves, host_tables = swap_in(group, self.pool, self.page_size_tokens)
        self._given_away([page for _, page in moves])
        for host_page, page in moves:
            self.device[page] = list(self.host[host_page])
        for table in host_tables:
            table.release()
        self.step += 1
        return True

    def publish(self, sequence: Sequence) -> None:
        """Name the sequence's full pages; the step that is planned now writes the newest of them."""
        keys = sequence.group.cache_keys
        digests, first = self.cache.digests(sequence.token_ids, keys, sequence.digests), len(sequence.chain)
        self.cache.publish(sequence.chain, sequence.table.pages, sequence.token_ids, keys, digests, self.step)
        self._note_names(sequence, range(first, len(digests)))

    def match(self, token_ids: list[int], keys: Keys = ()) -> list[CachedPage]:
        """Look tokens up, and check that every hit holds them."""
        size, kv = self.page_size_tokens, kv_of(token_ids, hash(keys))
        hits = self.cache.match(token_ids, keys, self.cache.digests(token_ids, keys, []), self.step)
        for index, hit in enumerate(hits):
            expected = kv[index * size : (index + 1) * size]
            assert hit.page >= 0 or hit.host_page >= 0, "a hit is nowhere"
            assert hit.page < 0 or self.device[hit.page] == expected, "a hit on the device holds other text"
            assert hit.host_page < 0 or self.host[hit.host_page] == expected, "a hit in the host tier holds other text"
        return hits

    def num_pages_that_must_hit(self, token_ids: list[int], keys: Keys = ()) -> int:
        """Pages at the tokens' beginning that have been named and not been given away since."""
        size, kv = self.page_size_tokens, kv_of(token_ids, hash(keys))
        for index in range(len(token_ids) // size):
            if kv[(index + 1) * size - 1] not in self.page_of_name:
                return index
        return len(token_ids) // size

    def pin(self, token_ids: list[int], keys: Keys = ()) -> bool:
        """Own the pages of a prefix that are on the device."""
        pages = [hit.page for hit in self.match(token_ids, keys) if hit.page >= 0]
        if not pages or len(self.pins) >= self.max_pins:
            return False
        for page in pages:
            self.pool.share(page)
        self.pins.append(pages)
        return True

    def unpin(self, place: int) -> None:
        for page in reversed(self.pins.pop(place)):
            self.pool.release(page)

    def evict(self, count: int) -> bool:
        """Take pages, overwrite them, and give them back: the oldest cached ones lose their contents."""
        if count > self.pool.num_available:
            return False
        pages = self.pool.allocate(count)
        self._given_away(pages)
        for page in pages:
            self.device[page] = [_GARBAGE] * self.page_size_tokens
            self.pool.release(page)
        self.step += 1
        return True

    def flush(self) -> None:
        self.cache.flush()
        self.page_of_name.clear()
        self._name_of_page.clear()
        for group in self.groups:  # their entries are nobody's now
            for sequence in group.live:
                sequence.chain.clear()

    def end_all(self) -> None:
        """End everything and forget all names; every page must be free after it."""
        for group in list(self.groups):
            for sequence in list(group.live):
                self.end(sequence)
        while self.pins:
            self.unpin(0)
        self.flush()

    # -- checks ------------------------------------------------------------------------------------------------------

    def check_counts(self) -> None:
        """What is cheap enough for every operation: each page is in one state, by number."""
        for pool in (self.pool, self.host_pool):
            assert min(pool.num_free, pool.num_cached, pool.num_used) >= 0, "a count is below zero"
            assert pool.num_free + pool.num_cached + pool.num_used == pool.num_pages, "a page is lost"

    def check_invariants(self) -> None:
        """Assert that books, owners and contents agree."""
        self.pool.check_invariants()
        self.host_pool.check_invariants()
        self.cache.check_invariants()
        assert not self.cache.demotions
        owners: Counter[int] = Counter(page for pages in self.pins for page in pages)
        host_owners: Counter[int] = Counter()
        for group in self.groups:
            for sequence in group.live:
                (host_owners if group.is_swapped else owners).update(sequence.table.pages)
                self._check_contents(sequence, self.host if group.is_swapped else self.device)
        for pool, counts in ((self.pool, owners), (self.host_pool, host_owners)):
            for page in range(pool.num_pages):
                assert pool.refcount(page) == counts[page], f"page {page} has owners that nobody knows"
        for entry in self.cache._by_digest.values():
            expected = self._kv_of_entry(entry)
            assert entry.page < 0 or self.device[entry.page] == expected, "a named page holds other text"
            assert entry.host_page < 0 or self.host[entry.host_page] == expected, "a named page holds other text"

    def _check_contents(self, sequence: Sequence, memory: list[list[int]]) -> None:
        kv = self.kv[sequence.sequence_id]
        assert len(kv) == len(sequence.token_ids) == sequence.num_planned_tokens
        stored = [number for page in sequence.table.pages for number in memory[page]]
        assert 0 <= len(stored) - len(kv) < self.page_size_tokens, "a page came before its first token, or too late"
        assert stored[: len(kv)] == kv, "a sequence's pages hold other text"

    def _kv_of_entry(self, entry: CachedPage) -> list[int]:
        pages = [entry.token_ids]
        while isinstance(entry.parent, CachedPage):
            entry = entry.parent
            pages.append(entry.token_ids)
        kv = [hash(entry.parent)]
        for token_ids in reversed(pages):
            kv = kv_of(token_ids, kv[-1])
        return kv

    # -- how the pages move ------------------------------------------------------------------------------------------

    def _new_sequence(self, group: SequenceGroup) -> Sequence:
        self._num_sequences += 1
        table = PageTable(self.pool, self.page_size_tokens)
        sequence = Sequence(self._num_sequences, group, len(group.live), _GREEDY, table)
        group.live.append(sequence)
        return sequence

    def _use_hits(self, sequence: Sequence, hits: list[CachedPage]) -> None:
        """Begin a table with cached pages, as a scheduler does: hold those on the device, copy the others in."""
        for hit in hits:
            if hit.page >= 0:
                self.pool.share(hit.page)
        read: list[int] = []
        copies: list[tuple[int, int]] = []
        pages, chain = sequence.table.pages, sequence.chain
        for hit in hits:
            if hit.page < 0:
                [page] = self.pool.allocate(1)
                self._given_away([page])
                if hit.host_page < 0:  # it had to leave the host tier for the page that came there just now
                    self.pool.release(page)
                    break
                read.append(self.cache.promote(hit, page, self.step))
                copies.append((read[-1], page))
            pages.append(hit.page)
            chain.append(hit)
        for hit in hits[len(pages) :]:
            if hit.page >= 0:
                self.pool.release(hit.page)
        for host_page, page in copies:
            self.device[page] = list(self.host[host_page])
        for host_page in read:
            self.host_pool.release(host_page)
        sequence.num_planned_tokens = sequence.table.capacity_tokens
        self._note_names(sequence, range(len(pages)))

    def _write(self, sequence: Sequence) -> bool:
        """Write a sequence's tokens that have no KV yet."""
        size, table = self.page_size_tokens, sequence.table
        start, end = sequence.num_planned_tokens, len(sequence.token_ids)
        shared = table.shared_page(start) if start < end else None
        if max(table.num_missing_pages(end), 0) + (shared is not None) > self.pool.num_available:
            return False
        if shared is not None:
            index, old, new = table.replace_shared_page(start)
            self._given_away([new])
            self.device[new] = list(self.device[old])
            del sequence.chain[index:]
        self._given_away(table.grow(end))
        kv = self.kv[sequence.sequence_id]
        for position in range(start, end):
            page = table.pages[position // size]
            assert self.pool.refcount(page) == 1 and page not in self._name_of_page, "others read this page"
            self.device[page][position % size] = kv[position]
        sequence.num_planned_tokens = end
        return True

    def _note_names(self, sequence: Sequence, indices: range) -> None:
        """Full pages of a sequence have been published; where a name is taken, the first page serves."""
        kv = self.kv[sequence.sequence_id]
        for index in indices:
            name, page = kv[(index + 1) * self.page_size_tokens - 1], sequence.table.pages[index]
            if name not in self.page_of_name:
                self.page_of_name[name] = page
                self._name_of_page[page] = name

    def _given_away(self, pages: list[int]) -> None:
        """Pages have been allocated: what was named there is copied out, before anything is written."""
        demotions, self.cache.demotions = self.cache.demotions, []
        self._move_out(demotions)
        for page in pages:
            name = self._name_of_page.pop(page, None)
            if name is not None:
                del self.page_of_name[name]

    def _move_out(self, moves: list[tuple[int, int]]) -> None:
        for page, host_page in moves:
            self.host[host_page] = list(self.device[page])

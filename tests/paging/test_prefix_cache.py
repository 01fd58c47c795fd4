"""The prefix cache over both tiers, under random operations: a hit gives back exactly what was written."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.paging.prefix_cache import sha256
from jpaged.scheduling.sequence import Sequence, SequenceGroup
from tests.fakes.paged_memory import PagedMemory

PAGE_SIZE = 2
# Few different texts and keys, so that texts often begin the same.
TEXTS = st.builds(lambda base, length: base[:length], st.sampled_from(([1] * 9, [1] * 4 + [0] * 5)), st.integers(1, 9))
TAILS = st.builds(lambda token, length: [token] * length, st.integers(0, 1), st.integers(1, 4))
KEYS = st.sampled_from([(), (), (), ("salt",)])


def weak_digest(content: bytes) -> bytes:
    """Three names for everything."""
    return bytes([sum(content) % 3])


class CacheMachine(RuleBasedStateMachine):
    """Checks everything after every operation; `digest` and the sizes differ between its subclasses."""

    digest = staticmethod(sha256)
    host_pages = st.integers(0, 8)

    @initialize(data=st.data(), num_pages=st.integers(6, 14))
    def begin(self, data: st.DataObject, num_pages: int) -> None:
        self.memory = PagedMemory(num_pages, data.draw(self.host_pages), PAGE_SIZE, self.digest)

    def pick(self, data: st.DataObject, groups: list[SequenceGroup]) -> Sequence:
        return data.draw(st.sampled_from([sequence for group in groups for sequence in group.live]))

    @rule(tokens=TEXTS, keys=KEYS, reads=st.booleans())
    def start(self, tokens: list[int], keys: tuple[str, ...], reads: bool) -> None:
        self.memory.start(tokens, keys, reads)

    @precondition(lambda self: self.memory.running)
    @rule(data=st.data(), tokens=TAILS, publishes=st.booleans())
    def append(self, data: st.DataObject, tokens: list[int], publishes: bool) -> None:
        self.memory.append(self.pick(data, self.memory.running), tokens, publishes)

    @precondition(lambda self: self.memory.running)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.memory.publish(self.pick(data, self.memory.running))
        self.memory.step += 1

    @precondition(lambda self: self.memory.groups)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.memory.fork(self.pick(data, self.memory.groups))

    @precondition(lambda self: self.memory.groups)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.memory.end(self.pick(data, self.memory.groups))

    @precondition(lambda self: self.memory.running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        self.memory.swap_out(data.draw(st.sampled_from(self.memory.running)))

    @precondition(lambda self: self.memory.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        self.memory.swap_in(data.draw(st.sampled_from(self.memory.swapped)))

    @rule(tokens=TEXTS, keys=KEYS)
    def match(self, tokens: list[int], keys: tuple[str, ...]) -> None:
        self.check_match(tokens, keys)

    @rule(tokens=TEXTS, keys=KEYS)
    def pin(self, tokens: list[int], keys: tuple[str, ...]) -> None:
        self.memory.pin(tokens, keys)

    @precondition(lambda self: self.memory.pins)
    @rule(place=st.integers(0, 2))
    def unpin(self, place: int) -> None:
        self.memory.unpin(place % len(self.memory.pins))

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        self.memory.evict(count)

    @rule(now=st.sampled_from([False] * 9 + [True]))
    def flush(self, now: bool) -> None:
        """Seldom: what comes after it has to begin anew."""
        if now:
            self.memory.flush()

    @invariant()
    def everything_agrees(self) -> None:
        if hasattr(self, "memory"):
            self.memory.check_counts()
            self.memory.check_invariants()
            for group in self.memory.groups:
                for sequence in group.live:
                    self.check_match(sequence.token_ids, group.cache_keys)

    def check_match(self, tokens: list[int], keys: tuple[str, ...]) -> None:
        """`PagedMemory.match` compares the contents of hits; here nothing may be missed either."""
        hits, expected = self.memory.match(tokens, keys), self.memory.num_pages_that_must_hit(tokens, keys)
        on_device = next((index for index, hit in enumerate(hits) if hit.page < 0), len(hits))
        assert on_device == expected if not self.memory.host_pool.num_pages else len(hits) >= expected

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            memory = self.memory
            memory.end_all()
            assert memory.pool.num_free == memory.pool.num_pages, "a page is lost"
            assert memory.host_pool.num_free == memory.host_pool.num_pages, "a page of the host tier is lost"
            assert len(memory.cache) == 0


class WithoutHostTier(CacheMachine):
    host_pages = st.just(0)


class WithWeakDigests(CacheMachine):
    """Where names collide all the time, less is found, but never anything wrong."""

    digest = staticmethod(weak_digest)

    def check_match(self, tokens: list[int], keys: tuple[str, ...]) -> None:
        self.memory.match(tokens, keys)


STEPS = settings(max_examples=150, stateful_step_count=40)
TestCache, TestCacheWithoutHostTier, TestCacheWithWeakDigests = (
    machine.TestCase for machine in (CacheMachine, WithoutHostTier, WithWeakDigests)
)
for case in (TestCache, TestCacheWithoutHostTier, TestCacheWithWeakDigests):
    case.settings = STEPS
del case

"""Random operations on everything that owns pages, without a device; stops at the first thing that does not add up.

    python scripts/stress_paging.py --operations 1000000 [--seed 0]

Half of the operations go to the page pools, page tables and the prefix cache directly (start, append, fork, free, swap
out and in, pin, unpin, evict, publish, match, flush), the others to the scheduler (add, abort, plan, commit, pin,
unpin, flush) over a simulated device. Slots hold what was written, so wrong text is found as well as wrong books.
Counts are checked after every operation, everything else after every `--check-every`. At the end of an episode all
requests have ended and every page must be free.

Prints a table and, last, one JSON line. Exits with 1 and the seed if an invariant is violated or a page is lost.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from jpaged.decoding.beam_search import BeamSearch
from jpaged.decoding.stopping import StopRules
from jpaged.errors import CapacityError
from jpaged.paging.prefix_cache import sha256
from jpaged.scheduling.scheduler import Scheduler, SchedulerConfig
from jpaged.scheduling.sequence import Sequence, SequenceGroup
from jpaged.step_plan import RowSampling, StepPlan, StepResult
from tests.fakes.paged_memory import PagedMemory
from tests.fakes.plan_checks import check_plan
from tests.fakes.simulated_runner import SimulatedRunner, beam_search, generate

EPISODE_OPERATIONS = 5000
WEAK_SHARE = 0.3  # of the episodes, in which names collide all the time
GREEDY = RowSampling()


def weak_digest(content: bytes) -> bytes:
    return content[-4:]


def main() -> None:
    arguments = parse_arguments()
    counts: Counter[str] = Counter()
    seed, done, start = arguments.seed, 0, time.perf_counter()
    seconds = {"paging": 0.0, "scheduler": 0.0}
    while done < arguments.operations:
        operations = min(EPISODE_OPERATIONS, arguments.operations - done)
        kind, episode = [("paging", PagingEpisode), ("scheduler", SchedulerEpisode)][seed % 2]
        episode_start = time.perf_counter()
        try:
            counts += episode(random.Random(seed), arguments.check_every).run(operations)
        except Exception:
            print(f"failed in the episode of --seed {seed} --operations {operations}", file=sys.stderr)
            raise
        seconds[kind] += time.perf_counter() - episode_start
        seed, done = seed + 1, done + operations
    elapsed = time.perf_counter() - start
    table = Table("operation", "count", title=f"{done:,} operations, no page lost")
    for name, count in sorted(counts.items()):
        table.add_row(name, f"{count:,}")
    Console().print(table)
    print(
        json.dumps(
            {
                "operations": done,
                "operations_per_second": round(done / elapsed),
                "seconds": round(elapsed, 1),
                "seconds_by_kind": {kind: round(value, 1) for kind, value in seconds.items()},
                "violations": 0,
                "pages_lost": 0,
                "counts": dict(sorted(counts.items())),
            }
        )
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first episode; each next one adds 1")
    parser.add_argument("--check-every", type=int, default=50, help="operations between full checks")
    return parser.parse_args()


class Episode:
    """Draws operations by weight. One that finds no room, or nothing to work on, returns `False` and does not count."""

    prefix = ""

    def __init__(self, generator: random.Random, check_every: int) -> None:
        self.random = generator
        self.check_every = check_every
        self.counts: Counter[str] = Counter()

    def run(self, operations: int) -> Counter[str]:
        weights = self.weights()
        kinds, cumulative = list(weights), list(accumulate(weights.values()))
        done = 0
        while done < operations:
            [kind] = self.random.choices(kinds, cum_weights=cumulative)
            if getattr(self, kind)() is False:
                continue
            self.counts[kind] += 1
            self.check_counts()
            done += 1
            if done % self.check_every == 0:
                self.check_invariants()
        self.finish()
        return Counter({f"{self.prefix}.{kind}": count for kind, count in self.counts.items()})

    def weights(self) -> Mapping[str, float]:
        raise NotImplementedError

    def check_counts(self) -> None:
        raise NotImplementedError

    def check_invariants(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    def text(self, longest: int) -> list[int]:
        """A prompt that often begins like others do: one of four bases, and sometimes a tail of its own."""
        base = self.random.randrange(4)
        shared = [base] * self.random.randint(1, longest)
        if self.random.random() < 0.6:
            own = self.random.randint(0, longest - len(shared))
            shared += [self.random.randrange(2) for _ in range(own)]
        return shared

    def keys(self) -> tuple[str, ...]:
        return ("salt",) if self.random.random() < 0.2 else ()


class PagingEpisode(Episode):
    """On the pools, tables and the cache themselves."""

    prefix = "paging"

    def __init__(self, generator: random.Random, check_every: int) -> None:
        super().__init__(generator, check_every)
        digest = weak_digest if generator.random() < WEAK_SHARE else sha256
        num_host_pages = generator.choice([0, 12, 40, 40])
        self.memory = PagedMemory(generator.randint(10, 40), num_host_pages, generator.choice([1, 2, 4]), digest)

    def weights(self) -> Mapping[str, float]:
        return dict(
            start=12, append=30, fork=12, free=18, swap_out=5, swap_in=6, pin=4, unpin=4, evict=4, publish=6
        ) | {
            "match": 10,
            "flush": 1,
        }

    def start(self) -> bool:
        return self.memory.start(self.text(24), self.keys(), self.random.random() < 0.8) is not None

    def append(self) -> bool:
        tokens = [self.random.randrange(2)] * self.random.randint(1, 5)
        sequence = self._pick(self.memory.running)
        return sequence is not None and self.memory.append(sequence, tokens, self.random.random() < 0.7)

    def fork(self) -> bool:
        sequence = self._pick([group for group in self.memory.groups if len(group.live) < 8])
        return sequence is not None and self.memory.fork(sequence) is not None

    def free(self) -> bool:
        sequence = self._pick(self.memory.groups)
        if sequence is not None:
            self.memory.end(sequence)
        return sequence is not None

    def swap_out(self) -> bool:
        groups = self.memory.running
        return bool(groups) and self.memory.swap_out(self.random.choice(groups))

    def swap_in(self) -> bool:
        groups = self.memory.swapped
        return bool(groups) and self.memory.swap_in(self.random.choice(groups))

    def pin(self) -> bool:
        return self.memory.pin(self.text(12), self.keys())

    def unpin(self) -> bool:
        if not self.memory.pins:
            return False
        self.memory.unpin(self.random.randrange(len(self.memory.pins)))
        return True

    def evict(self) -> bool:
        return self.memory.evict(self.random.randint(1, 8))

    def publish(self) -> bool:
        sequence = self._pick(self.memory.running)
        if sequence is None:
            return False
        self.memory.publish(sequence)
        self.memory.step += 1
        return True

    def match(self) -> None:
        self.memory.match(self.text(24), self.keys())

    def flush(self) -> None:
        self.memory.flush()

    def check_counts(self) -> None:
        self.memory.check_counts()

    def check_invariants(self) -> None:
        self.memory.check_invariants()

    def finish(self) -> None:
        self.memory.check_invariants()
        self.memory.end_all()
        self.memory.check_invariants()
        for pool in (self.memory.pool, self.memory.host_pool):
            assert pool.num_free == pool.num_pages, f"{pool.num_pages - pool.num_free} pages are lost"

    def _pick(self, groups: list[SequenceGroup]) -> Sequence | None:
        return self.random.choice(self.random.choice(groups).live) if groups else None


@dataclass(slots=True)
class Request:
    """What was asked, to be compared with what came."""

    group: SequenceGroup
    sequences: list[Sequence]
    max_tokens: int


class SchedulerEpisode(Episode):
    """Through the scheduler: requests of all kinds over a device made of lists."""

    prefix = "scheduler"
    max_width, max_pinned_pages = 3, 4
    eos = frozenset(range(0, 997, 200))

    def __init__(self, generator: random.Random, check_every: int) -> None:
        super().__init__(generator, check_every)
        size, rows = generator.choice([2, 4]), generator.randint(4, 8)
        num_host_pages = generator.choice([0, 6, 20, 100])
        caching = generator.random() < 0.8
        self.config = SchedulerConfig(
            num_pages=generator.randint(20, 40),
            page_size_tokens=size,
            max_num_seqs=rows,
            max_num_batched_tokens=generator.randint(4, 32),
            policy=generator.choice(["fcfs", "priority"]),
            num_host_pages=num_host_pages,
            max_pinned_pages=self.max_pinned_pages if caching else 0,
            enable_prefix_caching=caching,
            preemption=generator.choice(["swap", "recompute"]),
        )
        self.scheduler = Scheduler(self.config)
        if self.scheduler.cache is not None and generator.random() < WEAK_SHARE:
            self.scheduler.cache._digest = weak_digest
        self.runner = SimulatedRunner(self.config.num_pages, size, rows, num_host_pages)
        self.depth = generator.choice([1, 2])  # steps in flight; 2 with overlap
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: list[Request] = []
        self.num_groups = 0
        self.pins: list[str] = []

    def weights(self) -> Mapping[str, float]:
        pins = dict(pin=1, unpin=1, flush=0.2) if self.config.enable_prefix_caching else {}
        return {"add": 30, "abort": 1, "step": 200, **pins}

    def add(self) -> bool:
        if len(self.requests) > 16:
            return False
        kind = self.random.random()
        width = 1 if kind < 0.6 else self.random.randint(2, self.max_width)
        # Up to what fits alone: few fit together.
        pages = (self.config.num_pages - self.config.max_pinned_pages - 1) // width
        longest = self.random.randint(2, pages) * self.config.page_size_tokens
        prompt = self.text(longest // 2)
        max_tokens = self.random.randint(1, longest - len(prompt))
        search = self._search(width, max_tokens) if kind > 0.8 else None
        self.scheduler.check_fits(len(prompt), len(prompt) + max_tokens, width)
        self.num_groups += 1
        rules = StopRules(frozenset() if search else self.eos, frozenset(), len(prompt) + max_tokens)
        group = SequenceGroup(
            self.num_groups,
            prompt,
            rules,
            width=width,
            priority=self.random.randrange(3),
            beams=search,
            cache_keys=self.keys(),
            reads_cache=self.random.random() < 0.9,
        )
        for index in range(width if search is None else 1):
            sampling = replace(GREEDY, sample_index=index)
            table, sequence_id = self.scheduler.new_page_table(), self.scheduler.new_sequence_id()
            group.live.append(Sequence(sequence_id, group, index, sampling, table))
        self.requests.append(Request(group, list(group.live), max_tokens))
        self.scheduler.add(group)
        return True

    def abort(self) -> bool:
        if not self.requests:
            return False
        self.scheduler.abort(self.requests.pop(self.random.randrange(len(self.requests))).group)
        return True

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan is not None:
            check_plan(plan)
            self.counts["(page copies)"] += len(plan.page_copies)
            self.counts["(pages swapped out)"] += len(plan.swap_outs)
            self.counts["(pages swapped in)"] += len(plan.swap_ins)
            self.in_flight.append((plan, self.runner.run(plan)))
        if not self.in_flight:
            return False
        if plan is None or len(self.in_flight) >= self.depth:
            self.scheduler.commit(*self.in_flight.popleft())
            self._check_finished()
        return True

    def pin(self) -> bool:
        name = f"prefix {self.random.randrange(4)}"
        if self.scheduler.books.is_pinned(name):
            return False
        try:
            self.scheduler.books.pin(name, self.text(16), self.keys())
        except CapacityError:
            return False
        self.pins.append(name)
        return True

    def unpin(self) -> bool:
        return bool(self.pins) and self.scheduler.books.unpin(self.pins.pop(self.random.randrange(len(self.pins))))

    def flush(self) -> None:
        self.scheduler.books.flush_prefix_cache()

    def check_counts(self) -> None:
        for pool in (self.scheduler.pool, self.scheduler.host_pool):
            assert min(pool.num_free, pool.num_cached, pool.num_used) >= 0, "a count is below zero"
            assert pool.num_free + pool.num_cached + pool.num_used == pool.num_pages, "a page is lost"

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()

    def finish(self) -> None:
        """Let everything end by itself; what is left after it must be nothing."""
        for kind, count in self.scheduler.preemptions.items():
            self.counts[f"(preemptions by {kind})"] += count
        self.counts["(prompt tokens found in the cache)"] += self.scheduler.prefix_hits_tokens
        for _ in range(20_000):
            if not self.scheduler.has_work and not self.in_flight:
                break
            self.step()
        assert not self.scheduler.has_work and not self.requests, "the work does not end"
        self.scheduler.books.flush_prefix_cache(with_pins=True)
        assert self.scheduler.plan() is None
        self.scheduler.check_invariants()
        for pool in (self.scheduler.pool, self.scheduler.host_pool):
            assert pool.num_free == pool.num_pages, f"{pool.num_pages - pool.num_free} pages are lost"

    def _search(self, width: int, max_tokens: int) -> BeamSearch:
        return BeamSearch(width, max_tokens, self.eos)

    def _check_finished(self) -> None:
        """Requests that have ended got what each would get alone."""
        for request in [request for request in self.requests if not request.group.live]:
            self.requests.remove(request)
            group = request.group
            if group.beams is not None:
                alone = beam_search(group.prompt_token_ids, self._search(group.width, request.max_tokens))
                assert group.beams.finished == alone, "beams differ from a search of their own"
                continue
            for sequence in request.sequences:
                alone = generate(group.prompt_token_ids, request.max_tokens, self.eos, sequence.index)
                assert sequence.output_token_ids == alone, "an output differs from that of the request alone"


if __name__ == "__main__":
    main()

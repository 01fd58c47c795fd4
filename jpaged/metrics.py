"""What an engine tells of itself."""

from dataclasses import dataclass

from jpaged.request import RequestOutput


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot.

    Attributes:
        pages_total, pages_free, pages_used: of the device pool; the scratch page is not counted.
        pages_cached: pages that no sequence owns but whose contents may be used again; they are given away when the
            free ones run out.
        pages_pinned: pages that are kept until they are unpinned; they count as used.
        host_pages_total, host_pages_used, host_pages_cached: of the host tier.
        rows_running, rows_waiting: sequences in a row, and sequences that wait for one.
        preemptions: how often a request had to give its pages back, since the start.
        preemptions_swap, preemptions_recompute: of them, by copying the pages to the host tier and by dropping them.
        prefix_cache_queries_tokens, prefix_cache_hits_tokens: prompt tokens looked up in the prefix cache, and found.
        steps: steps dispatched since the start.
        buckets: compiled shapes.
        compilations: programs compiled before the engine was ready; those read back from the cache do not count.
        compilations_after_ready: programs compiled, or read back from the cache, after that; 0 unless there is a bug.
        kv_utilisation: token slots in use over token slots allocated, averaged over steps; 0 before the first.
        step_seconds, step_host_seconds, step_gap_seconds: turns of the loop since the start, of them what the host
            worked, and at most how long the device waited for it.
        ready_seconds: from the start of the engine until it was ready.
    """

    pages_total: int
    pages_free: int
    pages_used: int
    pages_cached: int
    pages_pinned: int
    host_pages_total: int
    host_pages_used: int
    host_pages_cached: int
    rows_running: int
    rows_waiting: int
    preemptions: int
    preemptions_swap: int
    preemptions_recompute: int
    prefix_cache_queries_tokens: int
    prefix_cache_hits_tokens: int
    steps: int
    buckets: int
    compilations: int
    compilations_after_ready: int
    kv_utilisation: float
    step_seconds: float
    step_host_seconds: float
    step_gap_seconds: float
    ready_seconds: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where one turn of the engine's loop went, in seconds.

    Attributes:
        plan, dispatch, commit: the host's work; commit makes text, too.
        wait: for the device.
        gap: at most how long the device had nothing to do before the step that this turn dispatched, while there was
            work; 0 if the step before it was still running.
    """

    plan: float
    dispatch: float
    wait: float
    commit: float
    gap: float

    @property
    def host(self) -> float:
        return self.plan + self.dispatch + self.commit

    @property
    def total(self) -> float:
        return self.host + self.wait


class Observer:
    """What an engine reports as it happens, from its own thread; this one takes no notice.

    Subclasses must be quick: the engine waits for them.
    """

    def step_done(self, times: StepTimes, num_tokens: int) -> None:
        """A step of `num_tokens` tokens is booked, in a turn of the loop that took `times`."""

    def token_followed(self, seconds: float) -> None:
        """A sequence got a token this long after the one before."""

    def request_finished(self, output: RequestOutput) -> None:
        """A request ended by itself; aborted requests are not reported."""

"""The engine's metrics in Prometheus' words."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jpaged.metrics import EngineStats, Observer, StepTimes
from jpaged.request import RequestOutput

_FROM_1_MS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_FROM_10_MS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_FROM_100_US = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class PrometheusObserver(Observer):
    """Counts and times what the engine reports, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._cached_tokens = self._counter("cached_tokens", "Of them, tokens that did not have to be computed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated for finished requests.")
        self._success = self._counter("request_success", "Finished requests.", ("finish_reason",))
        self._first_token = self._seconds("time_to_first_token", "From arrival to the first token.", _FROM_10_MS)
        self._inter_token = self._seconds("inter_token_latency", "Between tokens of a sequence.", _FROM_1_MS)
        self._queue = self._seconds("request_queue", "From arrival to the first step.", _FROM_10_MS)
        self._prefill = self._seconds("request_prefill", "From the first step to the first token.", _FROM_10_MS)
        self._decode = self._seconds("request_decode", "From the first token to the last.", _FROM_10_MS)
        self._step = self._seconds("step", "One turn of the engine's loop.", _FROM_1_MS)
        self._step_host = self._seconds("step_host", "Its part spent on the host.", _FROM_100_US)
        self._step_gap = self._seconds("step_gap", "At most how long the device waited for it.", _FROM_100_US)
        self._step_tokens = Histogram(
            "jpaged_step_tokens", "Tokens computed in a step.", registry=self.registry, buckets=_STEP_TOKENS
        )

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """Read the gauges from an engine whenever they are asked for."""
        self.registry.register(_StatsCollector(stats))

    def step_done(self, times: StepTimes, num_tokens: int) -> None:
        self._step.observe(times.total)
        self._step_host.observe(times.host)
        self._step_gap.observe(times.gap)
        self._step_tokens.observe(num_tokens)

    def token_followed(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def request_finished(self, output: RequestOutput) -> None:
        times = output.times
        assert times.first_scheduled is not None and times.first_token is not None and times.finished is not None
        self._prompt_tokens.inc(len(output.prompt_token_ids))
        self._cached_tokens.inc(output.num_cached_tokens)
        self._generation_tokens.inc(sum(len(completion.token_ids) for completion in output.outputs))
        self._success.labels(output.outputs[0].finish_reason).inc()
        self._first_token.observe(times.first_token - times.arrival)
        self._queue.observe(times.first_scheduled - times.arrival)
        self._prefill.observe(times.first_token - times.first_scheduled)
        self._decode.observe(times.finished - times.first_token)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"jpaged_{name}", text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"jpaged_{name}_seconds", text, registry=self.registry, buckets=buckets)


class _StatsCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = {
            "num_requests_running": ("Sequences in a row.", stats.rows_running),
            "num_requests_waiting": ("Sequences that wait for a row.", stats.rows_waiting),
            "kv_cache_usage_ratio": ("Used pages over all pages.", stats.pages_used / stats.pages_total),
            "kv_pages_free": ("Free pages of the device pool.", stats.pages_free),
            "kv_pages_used": ("Pages that sequences own.", stats.pages_used),
            "kv_pages_cached": ("Pages kept for their contents.", stats.pages_cached),
            "kv_pages_pinned": ("Pages of pinned prefixes.", stats.pages_pinned),
            "host_tier_pages": ("Pages in the host tier.", stats.host_pages_used + stats.host_pages_cached),
            "compilations_after_ready": ("Programs compiled while serving.", stats.compilations_after_ready),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"jpaged_{name}", text, value=value)
        preemptions = CounterMetricFamily("jpaged_preemptions", "Requests that gave their pages back.", labels=["kind"])
        preemptions.add_metric(["swap"], stats.preemptions_swap)
        preemptions.add_metric(["recompute"], stats.preemptions_recompute)
        yield preemptions
        for name, text, value in (
            ("queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries_tokens),
            ("hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits_tokens),
        ):
            yield CounterMetricFamily(f"jpaged_prefix_cache_{name}_tokens", text, value=value)

"""What `/metrics` shows: the engine's gauges and counters, and what the server measures of each request.

Owns one collector registry per app and the names, which are vLLM's under the `hybridserve:` prefix. Label values are bounded.
Observed from the event loop alone, so nothing here locks.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hybridserve.engine.messages import EngineInfo, EngineStats

_PREFIX = "hybridserve:"
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40, 80)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(2**power for power in range(20))

#: Name -> help text and where the value is.
_Sources: TypeAlias = dict[str, tuple[str, Callable[[EngineStats], float]]]

_GAUGES: _Sources = {
    "num_requests_running": ("Requests that compute.", lambda stats: stats.num_running),
    "num_requests_waiting": ("Requests that wait for a place.", lambda stats: stats.num_waiting),
    "kv_cache_usage_perc": ("Share of blocks in use, 1 is all.", lambda stats: _share(stats.blocks_used, stats.blocks_total)),
    "blocks_used": ("Blocks that running requests hold.", lambda stats: stats.blocks_used),
    "blocks_cached": ("Blocks that only the prefix index holds.", lambda stats: stats.blocks_cached),
    "blocks_total": ("Blocks that the arena could hold.", lambda stats: stats.blocks_total),
    "state_slots_used": ("State slots that running requests hold.", lambda stats: stats.slots_used),
    "state_slots_cached": ("State checkpoints in the prefix index.", lambda stats: stats.slots_cached),
    "state_slots_total": ("State slots that the arena could hold.", lambda stats: stats.slots_total),
    "superpages_free": ("Superpages that no group has taken.", lambda stats: stats.superpages_free),
    "superpages_total": ("Superpages of the arena.", lambda stats: stats.superpages_total),
}
_COUNTERS: _Sources = {
    "engine_steps": ("Passes of the engine loop.", lambda stats: stats.num_steps),
    "num_preemptions": ("Requests put back to waiting because memory ran out.", lambda stats: stats.num_preemptions),
    "prompt_tokens": ("Prompt tokens of admitted requests.", lambda stats: stats.num_prompt_tokens),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix index.", lambda stats: stats.num_prompt_tokens),
    "prefix_cache_hits": ("Prompt tokens that a prefix hit saved.", lambda stats: stats.num_cached_tokens),
    "checkpoints_written": ("States kept for later hits.", lambda stats: stats.num_checkpoints_written),
    "generation_tokens": ("Tokens generated.", lambda stats: stats.num_generated_tokens),
}


class Histogram:
    """Counts per bucket, observed in less than a microsecond."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Buckets as Prometheus wants them, and the sum."""
        total, buckets = 0, []
        for bound, count in zip((*map(float, self._bounds), float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return buckets, self._sum


class Metrics(Collector):
    """All metrics of one server."""

    def __init__(self, model_name: str, info: EngineInfo, ended: "Counter[str] | None" = None) -> None:
        """`ended` counts the connections and streams that a limit has ended, by its name."""
        self.ended: Counter[str] = Counter() if ended is None else ended
        self._labels = {"model_name": model_name, "engine": "0"}
        self._info = info
        self._stats = EngineStats()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.time_to_first_token_s = Histogram(_FIRST_TOKEN_S)
        self.inter_token_latency_s = Histogram(_TOKEN_S)
        self.e2e_latency_s = Histogram(_REQUEST_S)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.finished: Counter[str] = Counter()  # by finish reason
        self.rejected: Counter[str] = Counter()  # by error code
        self.responses: Counter[str] = Counter()  # by HTTP status

    def render(self, stats: EngineStats | None) -> bytes:
        """The page in Prometheus' text format. Without `stats` (a dead engine) the last sample is shown."""
        self._stats = stats or self._stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._engine_families()
        yield from self._histogram_families()
        yield self._counter("request_success", "Finished requests.", "finished_reason", self.finished)
        yield self._counter("admission_rejections", "Requests refused with 503.", "reason", self.rejected)
        yield self._counter("limits_reached", "Connections and streams that a limit has ended.", "limit", self.ended)
        yield self._counter("http_responses", "HTTP responses.", "status", self.responses)
        by_reason = self._stats.prompt_tokens_by_reason
        yield self._counter("prompt_tokens_by_reason", "What became of each prompt token.", "reason", by_reason)
        yield self._cache_config()

    def _engine_families(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=names)
            gauge.add_metric(values, read(self._stats))
            yield gauge
        for name, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=names)
            counter.add_metric(values, read(self._stats))
            yield counter
        state = GaugeMetricFamily(_PREFIX + "state_bytes", "Bytes of state that running requests hold.", labels=names)
        state.add_metric(values, self._stats.slots_used * self._info.state_nbytes_per_sequence)
        yield state

    def _histogram_families(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self.time_to_first_token_s),
            ("inter_token_latency_seconds", "Between tokens of one sequence.", self.inter_token_latency_s),
            ("e2e_request_latency_seconds", "From arrival to the last token.", self.e2e_latency_s),
            ("request_prompt_tokens", "Prompt tokens of one sequence.", self.prompt_tokens),
            ("request_generation_tokens", "Generated tokens of one sequence.", self.generation_tokens),
        ):
            buckets, total = histogram.cumulative()
            family = HistogramMetricFamily(_PREFIX + name, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), buckets, total)
            yield family

    def _counter(self, name: str, text: str, label: str, counts: "Counter[str] | dict[str, int]") -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=[*self._labels, label])
        for value, count in sorted(counts.items()):
            family.add_metric([*self._labels.values(), value], count)
        return family

    def _cache_config(self) -> Metric:
        config = {
            "block_size": str(self._info.block_size),
            "match_unit": str(self._info.match_unit),
            "superpage_nbytes": str(self._info.superpage_nbytes),
            "num_superpages": str(self._info.num_superpages),
        }
        family = GaugeMetricFamily(_PREFIX + "cache_config_info", "The cache plan.", labels=[*self._labels, *config])
        family.add_metric([*self._labels.values(), *config.values()], 1)
        return family


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0

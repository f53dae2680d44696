"""The metrics in Prometheus' text format. Threads of the HTTP server; the only user of prometheus_client."""

import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from stoker_worker.metrics import declared as of
from stoker_worker.metrics.counting import Metrics
from stoker_worker.metrics.declared import Metric
from stoker_worker.metrics.live import LiveFigures
from stoker_worker.metrics.looking import Look
from stoker_worker.metrics.tally import Histogram, Labels
from stoker_worker.ports import StoreUse

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Value = tuple[Metric, Labels, float]


def exposition(metrics: Metrics, live: LiveFigures, look: Look, *, is_ready: bool) -> bytes:
    """Everything that is known now; what is not known yet is left out."""
    registry = CollectorRegistry()
    registry.register(_Collected(metrics, [*_of_worker(look, live, is_ready), *_of_memory(look)]))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, metrics: Metrics, values: Iterable[Value]) -> None:
        jobs, steps = metrics.jobs(), metrics.steps()
        self._families: dict[Metric, Family] = {}
        for (metric, labels), count in (jobs.counters | steps.counters).items():
            self._add(metric, labels, count)
        for (metric, labels), histogram in (jobs.histograms | steps.histograms).items():
            self._add(metric, labels, histogram)
        for metric, labels, value in values:
            self._add(metric, labels, value)

    def collect(self) -> Iterator[Family]:
        for metric in of.DECLARED:
            if metric in self._families:
                yield self._families[metric]

    def _add(self, metric: Metric, labels: Labels, value: float | Histogram) -> None:
        family = self._families.setdefault(metric, _family(metric))
        if isinstance(value, Histogram):
            assert isinstance(family, HistogramMetricFamily)
            bounds = [*map(str, metric.buckets), "+Inf"]
            family.add_metric(labels, list(zip(bounds, accumulate(value.counts), strict=True)), value.total)
        else:
            assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
            family.add_metric(labels, value)


def _family(metric: Metric) -> Family:
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    family: Family = kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
    return family


def _of_worker(look: Look, live: LiveFigures, is_ready: bool) -> Iterator[Value]:
    state = look.state
    yield of.BUILD, (_version("stoker"), platform.python_version(), _version("mlx")), 1
    yield of.STARTED, (), look.started_at
    yield of.READY, (), is_ready
    yield of.STANDBY, (), look.is_standing_by
    yield of.TOKENS_PER_S, (), live.tokens_per_s
    yield of.RUNNING, (), state.in_batch
    for stage in of.IN_FLIGHT.values:
        yield of.IN_FLIGHT, (stage,), state.stages.get(stage, 0)
    yield of.STEP_AGE, (), state.step_age_s
    yield of.REDIS_UP, (), look.is_redis_up
    yield of.REDIS_AWAY, (), state.redis_away_total_s
    yield of.DATA_LOST, (), state.data_loss.times
    yield of.DATA_LOST_JOBS, (), state.data_loss.jobs
    yield of.SUSPENDED, (), state.is_suspended
    for queue in look.queues if isinstance(look.queues, list) else ():
        yield of.WAITING, (queue.name,), queue.waiting
        yield of.OLDEST_WAIT, (queue.name,), queue.oldest_wait_s
    if (redis := look.redis) is not None:
        for name, waiting in redis.waiting_without_worker.items():
            yield of.UNHEARD, (name,), waiting
        for metric in of.REDIS_SERVER:
            if (value := redis.figures.get(metric.name.removeprefix(of.PREFIX))) is not None:
                yield metric, (), value
    if (serving := state.serving) is not None:
        yield of.MODEL, (serving.model, serving.mode, str(serving.context_tokens)), 1
        yield of.MAX_BATCH, (), serving.max_batch
        yield of.OCCUPANCY, (), state.in_batch / serving.max_batch


def _of_memory(look: Look) -> Iterator[Value]:
    if (kv := look.state.kv) is not None:
        used = kv.used
        yield of.KV_BLOCKS, ("used",), used
        yield of.KV_BLOCKS, ("free",), kv.total - used
        yield of.KV_USAGE, (), used / kv.total if kv.total else 0.0
        yield of.PREEMPTIONS, (), kv.preemptions
    if isinstance(store := look.store, StoreUse):
        yield of.STORE_BYTES, (), store.disk_bytes
        yield of.STORE_MAX, (), store.disk_max_bytes
        yield of.STORE_FREE, (), store.disk_free_bytes
        yield of.STORE_DISK, (), store.disk_size_bytes
        yield of.RAM_BYTES, (), store.ram_bytes
        yield of.RAM_MAX, (), store.ram_max_bytes
        if (shared := store.shared) is not None:
            yield of.SHARED_UP, (), not shared.away_s
            yield of.SHARED_WRITTEN, (), shared.written_bytes
            yield of.SHARED_READ, (), shared.read_bytes


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"

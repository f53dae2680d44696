"""The metrics in Prometheus' text format: the counts, and figures looked up for a scrape. HTTP server's threads."""

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stoker_worker.metrics.counters import Metrics
from stoker_worker.metrics.health import Look
from stoker_worker.ports import KVMemory, RedisUse, Serving, StoreUse

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

REDIS_SERVER = {
    "redis_memory_used_bytes": "Memory that the Redis server uses for its data.",
    "redis_memory_max_bytes": "Its limit (maxmemory); 0: none.",
    "redis_aof_enabled": "Whether it keeps an append-only file.",
    "redis_aof_last_write_status": "Whether its last write to that file succeeded.",
    "redis_rdb_last_bgsave_status": "Whether its last snapshot succeeded.",
    "redis_rdb_last_save_timestamp_seconds": "When it took its last snapshot, in Unix time.",
}
"""From the server's INFO, as far as it has them; the names are those of Prometheus' redis_exporter."""


def exposition(metrics: Metrics, look: Look, *, tokens_per_s: float, is_ready: bool) -> bytes:
    """Everything that is known now; what is not known yet is left out."""
    return generate_latest(_Shown(metrics, look, tokens_per_s, is_ready))


class _Shown(Collector):
    def __init__(self, metrics: Metrics, look: Look, tokens_per_s: float, is_ready: bool) -> None:
        self._metrics = metrics
        self._look = look
        self._tokens_per_s = tokens_per_s
        self._is_ready = is_ready

    def collect(self) -> Iterator[Metric]:
        look = self._look
        yield from self._metrics.registry.collect()
        yield _info("build", "Always 1.", version=_version("stoker"), python=platform.python_version(),
                    mlx=_version("mlx"))  # fmt: skip
        yield GaugeMetricFamily(
            "process_start_time_seconds", "When the worker was started, in Unix time.", look.started_at
        )
        yield _gauge("ready", "Whether /readyz answers with 200.", self._is_ready)
        yield _gauge(
            "standby", "Whether it waits, by --standby, for the name, queue or store of another worker.",
            look.is_standing_by,
        )  # fmt: skip
        yield from self._jobs()
        if look.state.serving is not None:
            yield from _batch(look.state.serving, look.state.in_batch)
        if look.state.kv is not None:
            yield from _kv_memory(look.state.kv)
        if isinstance(look.store, StoreUse):
            yield from _store(look.store)
        yield from self._redis()
        if look.redis is not None:
            yield from _redis_server(look.redis)

    def _jobs(self) -> Iterator[Metric]:
        state, queues = self._look.state, self._look.queues
        yield _gauge("tokens_per_second", "Tokens generated per second, over the last 10 seconds.", self._tokens_per_s)
        yield _gauge("num_requests_running", "Jobs in the batch.", state.in_batch)
        yield _gauges(
            "jobs_in_flight",
            "Claimed jobs. Memory: an agent's memory is loaded or saved. Waiting: for a place in the batch.",
            "stage",
            {stage: state.stages.get(stage, 0) for stage in ("memory", "waiting", "prefill", "decode")},
        )
        yield _gauge(
            "engine_step_age_seconds", "How long the step under way has taken; 0 while there is no work.",
            state.step_age_s,
        )  # fmt: skip
        if isinstance(queues, list):
            yield _gauges(
                "num_requests_waiting", "Jobs that wait in the queue.", "queue", {q.name: q.waiting for q in queues}
            )
            yield _gauges(
                "queue_oldest_wait_seconds", "How long the queue's oldest job has waited.", "queue",
                {q.name: q.oldest_wait_s for q in queues},
            )  # fmt: skip

    def _redis(self) -> Iterator[Metric]:
        state = self._look.state
        yield _gauge("redis_up", "Whether Redis answers, and has the last heartbeat.", self._look.is_redis_up)
        yield _counter("redis_away_seconds", "Time without a heartbeat that reached Redis.", state.redis_away_total_s)
        yield _counter(
            "redis_data_lost", "How often this worker has noticed that Redis had lost data.", state.data_loss.times
        )
        yield _counter("redis_data_lost_jobs", "Jobs that it had in flight then.", state.data_loss.jobs)
        yield _gauge("suspended", "Whether workers are suspended, by `rq suspend`.", state.is_suspended)


def _batch(serving: Serving, in_batch: int) -> Iterator[Metric]:
    yield _info("model", "Always 1, once the model is loaded.", model_name=serving.model, mode=serving.mode,
                max_model_len=str(serving.context_tokens))  # fmt: skip
    yield _gauge("max_num_seqs", "Most jobs in flight at once.", serving.max_batch)
    yield _gauge("batch_occupancy_ratio", "Jobs in the batch, as a share of the most.", in_batch / serving.max_batch)


def _kv_memory(kv: KVMemory) -> Iterator[Metric]:
    used = kv.used
    blocks = {"used": used, "free": kv.total - used}
    yield _gauges("kv_cache_blocks", "Blocks of 256 tokens of KV memory.", "state", blocks)
    yield _gauge(
        "kv_cache_usage_perc", "Used part of the KV memory; 1 is all of it.", used / kv.total if kv.total else 0.0
    )
    yield _counter(
        "num_preemptions", "Sequences that left the batch for a while, for want of KV memory.", kv.preemptions
    )


def _store(store: StoreUse) -> Iterator[Metric]:
    yield _gauge("store_bytes", "Bytes of the agents' memory on disk.", store.disk_bytes)
    yield _gauge("store_max_bytes", "The limit of that.", store.disk_max_bytes)
    yield _gauge("store_free_bytes", "Free bytes of the store's file system, at most 5 s old.", store.disk_free_bytes)
    yield _gauge("store_disk_bytes", "Size of the store's file system.", store.disk_size_bytes)
    yield _gauge("ram_cache_bytes", "Bytes of agents' caches in RAM.", store.ram_bytes)
    yield _gauge("ram_cache_max_bytes", "The limit of that.", store.ram_max_bytes)
    if (shared := store.shared) is not None:
        yield _gauge("shared_store_up", "Whether the shared store answers; only if there is one.", not shared.away_s)
        yield _counter(
            "shared_store_written_bytes", "Bytes of caches written to the shared store.", shared.written_bytes
        )
        yield _counter("shared_store_read_bytes", "Bytes of caches read from the shared store.", shared.read_bytes)


def _redis_server(redis: RedisUse) -> Iterator[Metric]:
    yield _gauges(
        "num_requests_without_worker",
        "Jobs that wait in queues of this Redis server that no live worker listens to: the 100 queues with most.",
        "queue",
        redis.waiting_without_worker,
    )
    for name, text in REDIS_SERVER.items():
        if (value := redis.figures.get(name)) is not None:
            yield _gauge(name, text, value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"stoker_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"stoker_{name}", text, value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"stoker_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _info(name: str, text: str, **labels: str) -> Metric:
    family = GaugeMetricFamily(f"stoker_{name}_info", text, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"

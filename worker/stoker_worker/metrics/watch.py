"""Serves `/metrics`, `/healthz` and `/readyz` of a running worker on a loopback port, with a thread for each request.

A request waits for no stage of the worker: it reads counts, asks Redis on a connection of its own, and looks at the
store at most every five seconds.
"""

import logging
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stoker_shared.errors import RedisUnavailable
from stoker_shared.http_guard import LimitedHead, LimitedThreads, host_name, is_private_name
from stoker_worker.metrics.counters import Metrics, Rates
from stoker_worker.ports import KVMemory, QueueDepth, Serving, SharedUse, StoreUse, WorkerState

log = logging.getLogger(__name__)

STORE_EVERY_S: Final = 5.0
"""Time between two looks at the store, each of which reads a few hundred folders."""

_LEAST_FREE_BYTES: Final = 2**20

NOT_READY_AFTER_LOSS_S: Final = 180.0
"""Long enough for a monitor to see it, and shorter than the five minutes after which a worker that is not ready raises
an alarm: this one still works."""


@dataclass(frozen=True)
class Look:
    """The worker at one moment.

    Attributes:
        store, queues: or the error of reading them; ``None`` while they are not open yet.
        is_standing_by: it waits for another worker's name, queue or store.
        started_at: Unix time at which the worker was started.
        shared: ``None``: there is no shared store.
    """

    state: WorkerState
    store: StoreUse | OSError | None
    queues: list[QueueDepth] | RedisUnavailable | None
    is_standing_by: bool = False
    started_at: float = 0.0
    shared: SharedUse | None = None

    @property
    def is_redis_up(self) -> bool:
        return isinstance(self.queues, list) and self.state.redis_away_s == 0

    def obstacles(self, stuck_after_s: float) -> list[str]:
        """Why the worker is not ready, as /readyz prints it; empty if it is ready."""
        found = []
        if self.queues is None:
            found.append("the worker does not hold its queues yet")
        elif isinstance(self.queues, RedisUnavailable):
            found.append(str(self.queues))
        elif self.state.redis_away_s > 0:
            found.append(f"no heartbeat has reached Redis for {self.state.redis_away_s:.1f} s")
        if (loss := self.state.data_loss).ago_s < NOT_READY_AFTER_LOSS_S:
            since_start = f"losses since the start: {loss.times}, jobs in flight then: {loss.jobs}"
            shown = f"shown for {NOT_READY_AFTER_LOSS_S:.0f} s"
            found.append(f"Redis lost data {loss.ago_s:.0f} s ago; {since_start} ({shown})")
        if isinstance(self.store, OSError):
            found.append(f"the store cannot be used: {self.store}")
        elif self.store is not None and self.store.disk_free_bytes < _LEAST_FREE_BYTES:
            found.append("the store's disk is full")
        if self.shared is not None and self.shared.away_s > 0:
            found.append(f"the shared store has not answered for {self.shared.away_s:.0f} s; jobs with memory wait")
        if self.state.serving is None:
            found.append("the model is not loaded")
        if self.state.step_age_s > stuck_after_s:
            found.append(f"the engine has been in one step for {self.state.step_age_s:.0f} s")
        return found


def exposition(metrics: Metrics, look: Look, *, tokens_per_s: float, is_ready: bool) -> bytes:
    """The text of /metrics; values that are not known yet are left out."""
    return generate_latest(_Shown(metrics, look, tokens_per_s, is_ready))


@dataclass(frozen=True)
class _Shown(Collector):
    metrics: Metrics
    look: Look
    tokens_per_s: float
    is_ready: bool

    def collect(self) -> Iterator[Metric]:
        look = self.look
        yield from self.metrics.registry.collect()
        yield _info("build", "Always 1.", version=_version("stoker"), python=platform.python_version(),
                    mlx=_version("mlx"))  # fmt: skip
        yield GaugeMetricFamily(
            "process_start_time_seconds", "When the worker was started, in Unix time.", look.started_at
        )
        yield _gauge("ready", "1 if /readyz answers with 200.", self.is_ready)
        yield _gauge(
            "standby", "1 if it waits, by --standby, for the name, queue or store of another worker.",
            look.is_standing_by,
        )  # fmt: skip
        yield from self._jobs()
        if look.state.serving is not None:
            yield from _batch(look.state.serving, look.state.in_batch)
        if look.state.kv is not None:
            yield from _kv_memory(look.state.kv)
        if isinstance(look.store, StoreUse):
            yield from _store(look.store)
        if look.shared is not None:
            yield from _shared_store(look.shared)
        yield from self._redis()

    def _jobs(self) -> Iterator[Metric]:
        state, queues = self.look.state, self.look.queues
        yield _gauge("tokens_per_second", "Tokens generated per second, over the last 10 seconds.", self.tokens_per_s)
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
        state = self.look.state
        yield _gauge("redis_up", "1 if Redis answers, and has the last heartbeat.", self.look.is_redis_up)
        yield _counter("redis_away_seconds", "Time without a heartbeat that reached Redis.", state.redis_away_total_s)
        yield _counter(
            "redis_data_lost", "How often this worker has noticed that Redis had lost data.", state.data_loss.times
        )
        yield _counter("redis_data_lost_jobs", "Jobs that it had in flight then.", state.data_loss.jobs)
        yield _gauge("suspended", "1 if workers are suspended, by `rq suspend`.", state.is_suspended)


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


def _shared_store(shared: SharedUse) -> Iterator[Metric]:
    yield _gauge("shared_store_up", "1 if the shared store answers; only if there is one.", not shared.away_s)
    yield _counter("shared_store_written_bytes", "Bytes of caches written to the shared store.", shared.written_bytes)
    yield _counter("shared_store_read_bytes", "Bytes of caches read from the shared store.", shared.read_bytes)


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


HOST: Final = "127.0.0.1"
_PLAIN: Final = "text/plain; charset=utf-8"


class Watch:
    """Shows a running worker. Its HTTP server starts first, so that a worker that stands by or loads its model has a
    health check too.

    Attributes:
        metrics: for the stages.
        is_standby: it waits while another worker has its name, queue or store.
        state, store, queues: read these parts of the worker; set when the parts are made.
        shared_store: the same; without I/O, because the heartbeat calls it.
    """

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.is_standby = False
        self.state: Callable[[], WorkerState] = WorkerState
        self.store: Callable[[], StoreUse] | None = None
        self.queues: Callable[[], list[QueueDepth]] | None = None
        self.shared_store: Callable[[], SharedUse | None] = lambda: None
        self._rates = Rates(self.metrics)
        self._lock = threading.Lock()
        self._store_seen: StoreUse | OSError | None = None
        self._look_at = 0.0
        self._started_at = time.time()

    def figures(self) -> dict[str, Any]:
        """The worker's figures for its heartbeat, which also times the log's line of rates."""
        return self._rates.now(self.state(), self.shared_store())

    def look(self) -> Look:
        queues = self._queues()
        is_standing_by = self.is_standby and queues is None
        return Look(self.state(), self._store(), queues, is_standing_by, self._started_at, self.shared_store())

    def _queues(self) -> list[QueueDepth] | RedisUnavailable | None:
        try:
            return None if self.queues is None else self.queues()
        except RedisUnavailable as error:
            return error

    def _store(self) -> StoreUse | OSError | None:
        with self._lock:
            if self.store is not None and time.monotonic() >= self._look_at:
                try:
                    self._store_seen = self.store()
                except OSError as error:
                    self._store_seen = error
                self._look_at = time.monotonic() + STORE_EVERY_S
            return self._store_seen

    @contextmanager
    def served(self, port: int, *, stuck_after_s: float) -> Iterator[int]:
        """Serve as long as the context lasts; yields the port.

        Args:
            port: 0 for any that is free.
            stuck_after_s: report not ready after a step of the engine this long.

        Raises:
            OSError: it cannot listen on the port.
        """
        with _Server((HOST, port), _WatchRequests) as server:
            server.watch, server.stuck_after_s = self, stuck_after_s
            port = int(server.server_address[1])
            threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
            log.info("metrics at http://%s:%d/metrics, health at /healthz and /readyz", HOST, port)
            try:
                yield port
            finally:
                server.shutdown()

    def page(self, path: str, *, stuck_after_s: float) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body of the answer."""
        if path == "/healthz":
            return HTTPStatus.OK, _PLAIN, b"the process is up\n"
        if path not in ("/readyz", "/metrics"):
            return HTTPStatus.NOT_FOUND, _PLAIN, b"there are /metrics, /healthz and /readyz\n"
        look = self.look()
        obstacles = look.obstacles(stuck_after_s)
        if path == "/readyz":
            status = HTTPStatus.SERVICE_UNAVAILABLE if obstacles else HTTPStatus.OK
            return status, _PLAIN, "".join(f"{line}\n" for line in obstacles or ["ready"]).encode()
        body = exposition(self.metrics, look, tokens_per_s=self._rates.tokens_per_s(), is_ready=not obstacles)
        return HTTPStatus.OK, CONTENT_TYPE, body


class _Server(LimitedThreads, HTTPServer):
    watch: Watch
    stuck_after_s: float


class _WatchRequests(LimitedHead, BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        try:
            status, content_type, body = self._answer()
        except Exception as error:  # a scrape must not hide the reason in a broken connection
            log.exception("no answer to %s", self.path)
            status, content_type = HTTPStatus.INTERNAL_SERVER_ERROR, _PLAIN
            body = f"{type(error).__name__}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self) -> tuple[HTTPStatus, str, bytes]:
        if not is_private_name(host_name(self.headers.get("Host", ""))):
            return HTTPStatus.FORBIDDEN, _PLAIN, b"the Host is a name that a web site can have\n"
        path = self.path.partition("?")[0]
        return self.server.watch.page(path, stuck_after_s=self.server.stuck_after_s)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a line for each scrape would hide the others."""

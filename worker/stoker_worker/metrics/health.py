"""One look at a running worker, for a scrape or a health check, and whether it is ready. Threads of the HTTP server."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stoker_shared.errors import RedisUnavailable
from stoker_worker.ports import QueueDepth, RedisUse, SharedUse, StoreUse, WorkerState

STORE_EVERY_S: Final = 5.0
"""A look at the store reads a few hundred folders."""

_LEAST_FREE_BYTES: Final = 2**20

NOT_READY_AFTER_LOSS_S: Final = 180.0
"""Some looks of a monitor, and shorter than the five minutes after which a worker that is not ready raises an alarm:
this one works."""


@dataclass(frozen=True)
class Look:
    """
    Attributes:
        store, queues: or the error that came instead; ``None`` while the worker has not got that far.
        redis: ``None`` as well while the server is away.
        is_standing_by: it waits for another worker's name or store.
        started_at: when the worker was started, in Unix time.
        shared: of the shared store, if there is one.
    """

    state: WorkerState
    store: StoreUse | OSError | None
    queues: list[QueueDepth] | RedisUnavailable | None
    redis: RedisUse | None = None
    is_standing_by: bool = False
    started_at: float = 0.0
    shared: SharedUse | None = None

    @property
    def is_redis_up(self) -> bool:
        return isinstance(self.queues, list) and self.state.redis_away_s == 0

    def obstacles(self, stuck_after_s: float) -> list[str]:
        """Why the worker is not ready, in the words of /readyz; empty if it is ready."""
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


class Looking:
    """Where to look.

    Attributes:
        is_standby: whether it waits while another worker has its name or store.
        state, store, queues, redis: set as these parts of the worker are made.
        shared_store: without I/O, if there is one; the heartbeat looks there.
    """

    def __init__(self) -> None:
        self.is_standby = False
        self.state: Callable[[], WorkerState] = WorkerState
        self.store: Callable[[], StoreUse] | None = None
        self.queues: Callable[[], list[QueueDepth]] | None = None
        self.redis: Callable[[], RedisUse] | None = None
        self.shared_store: Callable[[], SharedUse] | None = None
        self._lock = threading.Lock()
        self._store_seen: StoreUse | OSError | None = None
        self._look_at = 0.0
        self._started_at = time.time()

    def now(self) -> Look:
        queues = self._queues()
        redis = self._redis() if isinstance(queues, list) else None
        is_standing_by = self.is_standby and queues is None
        shared = None if self.shared_store is None else self.shared_store()
        return Look(self.state(), self._store(), queues, redis, is_standing_by, self._started_at, shared)

    def _queues(self) -> list[QueueDepth] | RedisUnavailable | None:
        try:
            return None if self.queues is None else self.queues()
        except RedisUnavailable as error:
            return error

    def _redis(self) -> RedisUse | None:
        try:
            return None if self.redis is None else self.redis()
        except RedisUnavailable:  # since the look at the queues
            return None

    def _store(self) -> StoreUse | OSError | None:
        with self._lock:
            if self.store is not None and time.monotonic() >= self._look_at:
                try:
                    self._store_seen = self.store()
                except OSError as error:
                    self._store_seen = error
                self._look_at = time.monotonic() + STORE_EVERY_S
            return self._store_seen

"""How long a worker that was told to stop waits for the jobs in flight. Main thread; `request` any thread.

Owns when the stop turns from "let them finish" into "cut them short". Does not end the threads: the worker does.
"""

import logging
import threading
import time
from typing import Final

from stoker_worker.pipeline.engine_thread import EngineThread
from stoker_worker.pipeline.fetcher import Fetcher
from stoker_worker.pipeline.finisher import Finisher
from stoker_worker.pipeline.heartbeat import Heartbeat
from stoker_worker.ports import QueuePort

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.05
_AWAY_S: Final = 1.0
"""A stop waits no longer than this for a Redis that is away."""


class Draining:
    """Waits until nothing is in flight any more: a burst is done, or a stop has been carried out."""

    def __init__(
        self,
        queue: QueuePort,
        fetcher: Fetcher,
        engine: EngineThread,
        finisher: Finisher,
        heartbeat: Heartbeat,
        *,
        grace_s: float,
    ) -> None:
        """
        Args:
            grace_s: how long running jobs may go on after the first request.
        """
        self._queue = queue
        self._fetcher = fetcher
        self._engine = engine
        self._finisher = finisher
        self._heartbeat = heartbeat
        self._grace_s = grace_s
        self._requests: list[None] = []  # a list grows in one step: a signal handler takes no lock
        self._drain_until: float | None = None

    def request(self) -> None:
        """Once: let running jobs finish. Twice: at once. Any thread, and signal handlers."""
        self._requests.append(None)

    @property
    def is_requested(self) -> bool:
        return bool(self._requests) or self._heartbeat.deposed.is_set()

    def wait(self) -> None:
        """Until the fetcher has left: by itself, or told to."""
        while not self._fetcher.left.wait(_LOOK_S):
            if not (self._finisher.is_alive() and (self._fetcher.is_alive() or self._fetcher.left.is_set())):
                log.error("a fetcher or finisher thread has died: the jobs in flight are left to recovery")
                self._fetcher.leave()
                return
            self._look()

    def join(self, *threads: threading.Thread) -> None:
        """Until the threads have ended. They may still be waiting for a reply of Redis."""
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_S)
                self._hang_up_if_away()

    def _hang_up_if_away(self) -> bool:
        is_away = self._heartbeat.redis_away_s() > _AWAY_S
        if is_away:
            self._queue.hang_up()
        return is_away

    def _look(self) -> None:
        engine_died = self._engine.error is not None or not self._engine.is_alive()
        at_once = len(self._requests) > 1 or self._heartbeat.deposed.is_set() or engine_died
        if self._drain_until is None:
            if not (self._requests or at_once):
                return
            grace_s = 0.0 if at_once else self._grace_s
            log.info("stopping: no new claims, %g s for running jobs; a second signal ends at once", grace_s)
            self._drain_until = time.monotonic() + grace_s
            self._fetcher.drain()
            self._finisher.hurry()
        if engine_died:
            self._engine.hand_over_waiting()
        if self._hang_up_if_away() or at_once or time.monotonic() > self._drain_until:
            self._fetcher.cancel_all("stopping")
            self._finisher.abandon()
        if self._fetcher.claims_no_more.is_set() and len(self._queue.in_flight()) <= self._finisher.n_to_give_back():
            self._fetcher.leave()

"""The fetcher thread: the loop that decides what this worker works on.

Owns claims, withdrawals, timeouts and recovery: everything between the queue and the loader. Touches neither disk nor
MLX. A job goes on through loader.py, engine_thread.py and finisher.py, each with threads of its own.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from stoker_shared.errors import RedisUnavailable
from stoker_worker.events import Outage, log_job
from stoker_worker.periodic import Periodic
from stoker_worker.pipeline.engine_thread import EngineThread
from stoker_worker.pipeline.job import Job
from stoker_worker.pipeline.loader import Loader
from stoker_worker.pipeline.wakefulness import Wakefulness, keep_awake_command
from stoker_worker.ports import (
    NOT_COUNTED,
    Busy,
    CacheStorePort,
    CancelReason,
    ClaimedJob,
    MetricsPort,
    QueuePort,
)

log = logging.getLogger(__name__)


class Leaving:
    """Decides when the worker leaves by itself: never, unless a limit is given."""

    def __init__(self, *, burst: bool = False, max_jobs: int | None = None, max_idle_s: float | None = None) -> None:
        """
        Args:
            burst: leave as soon as the queues are empty and nothing is in flight.
            max_jobs: claim only so many, and leave when they have ended.
            max_idle_s: leave when there was nothing to do for so long.
        """
        self._burst = burst
        self._jobs_left = max_jobs
        self._max_idle_s = max_idle_s
        self._idle_since: float | None = None

    def room(self, free: int) -> int:
        """How many of the `free` places may be filled."""
        return free if self._jobs_left is None else min(free, self._jobs_left)

    def claimed(self, n_jobs: int) -> None:
        if self._jobs_left is not None:
            self._jobs_left -= n_jobs

    def is_time(self, *, is_idle: bool, is_empty: Callable[[], bool]) -> bool:
        """
        Args:
            is_idle: nothing is in flight and nothing could be claimed.
            is_empty: asks Redis whether the queues are empty; they are not while they are suspended with jobs in them.
        """
        if not is_idle:
            self._idle_since = None
            return False
        if self._jobs_left == 0:
            log.info("leaving: as many jobs as --max-jobs allows have ended")
            return True
        now = time.monotonic()
        self._idle_since = now if self._idle_since is None else self._idle_since
        waited = self._max_idle_s is not None and now - self._idle_since >= self._max_idle_s
        if not (self._burst or waited) or not is_empty():
            return False
        if waited:
            log.info("leaving: nothing to do for %g s", self._max_idle_s)
        return True


_READ_AHEAD_JOBS = 2
"""For each place in the batch, the caches of so many jobs are read ahead."""

_READ_AHEAD_S = 1.0
"""Pause between two looks at the waiting jobs while the model loads."""

_GATHER_S = 0.005
"""Pause after a job has ended: jobs often end together, and one claim for all their places costs less."""


class Fetcher(threading.Thread):
    """Claims only as many jobs as fit, and cancels those that timed out or were withdrawn. Before `serve` it only
    recovers the jobs of dead workers, and has the first jobs' caches read."""

    def __init__(
        self,
        queue: QueuePort,
        store: CacheStorePort,
        engine: EngineThread,
        loader: Loader,
        *,
        max_in_flight: int,
        poll_s: float,
        recover_s: float,
        leaving: Leaving,
        metrics: MetricsPort = NOT_COUNTED,
        outage: Outage | None = None,
    ) -> None:
        """
        Args:
            max_in_flight: provisional, until `serve` sets it.
            poll_s: longest wait between two looks into the queue.
            recover_s: time between two recoveries of dead workers' jobs.
            outage: told when Redis is away.
        """
        super().__init__(name="fetcher", daemon=True)
        self._queue = queue
        self._store = store
        self._engine = engine
        self._loader = loader
        self._max_in_flight = max_in_flight
        self._poll_s = poll_s
        self._recover = Periodic(recover_s)
        self._look_ahead = Periodic(_READ_AHEAD_S)
        self._watch = Periodic(0.5)
        self._tidy = Periodic(1.0)
        self._leaving = leaving
        self._metrics = metrics
        self._outage = outage or Outage("Redis")
        self._wakefulness = Wakefulness(keep_awake_command())
        self._pinned: tuple[frozenset[str], frozenset[str], bool] = (frozenset(), frozenset(), False)
        self._look_again = False
        self._serves = threading.Event()
        self._draining = threading.Event()
        self.has_looked = threading.Event()  # for dead workers, whatever came of it
        self.claims_no_more = threading.Event()
        self.left = threading.Event()

    def run(self) -> None:
        while not self.left.is_set():
            self._cancel_overdue()
            try:
                self._tick()
            except Exception as error:
                if isinstance(error, RedisUnavailable):  # running jobs go on
                    self._outage.met(error)
                else:  # one odd entry in Redis must not end the loop that watches all the others
                    log.exception("unexpected error in the fetch loop; retrying")
                self._recover.make_due()  # a claim may be in doubt: look before the next one, or order is lost
                self._look_again = False
                self.left.wait(max(self._poll_s, 0.5))
            self.has_looked.set()
            self._wakefulness.look(has_jobs=bool(self._queue.in_flight()))
            if self._queue.wait_for_release(0.0 if self._look_again else self._poll_s):
                time.sleep(_GATHER_S)
        self._wakefulness.end()

    def serve(self, max_in_flight: int) -> None:
        """Claim jobs from now on: the model is loaded, and the next stages run. Main thread."""
        self._max_in_flight = max_in_flight
        self._serves.set()

    def drain(self) -> None:
        """Claim nothing more; `claims_no_more` is set when the last claim has ended. Any thread."""
        self._draining.set()

    def leave(self) -> None:
        """End, even with jobs in flight. Any thread."""
        self.left.set()

    def cancel_all(self, reason: CancelReason) -> None:
        """Any thread."""
        for job in self._queue.in_flight():
            job.cancel.set(reason)

    def _tick(self) -> None:
        self._look_again = False
        self._pin(*self._pinned[:2], is_all=False)  # until a claim has ended well: jobs may come in, and start
        idle = not self._queue.in_flight()
        if self._draining.is_set():
            self.claims_no_more.set()
            self._queue.leave()
        elif self._engine.error is None:
            if (self._recover.is_due() or self._queue.has_dead()) and (recovered := self._queue.recover()):
                log.warning("%d jobs of a dead worker are back in the queue", recovered)
                self._metrics.recovered(recovered)
            if not self._serves.is_set():
                if self._look_ahead.is_due():
                    self._read_ahead()
                return
            idle = not self._claim() and idle
        self._cancel_withdrawn()
        if listened_to := self._queue.listened_to():
            self._queue.tell(self._engine.texts(listened_to))
        if self._tidy.is_due() and self._queue.tidy():
            self._tidy.make_due()
            self._look_again = True
        if self._leaving.is_time(is_idle=idle, is_empty=self._queue.is_empty):
            self.leave()

    def _claim(self) -> bool:
        """True if any job was claimed."""
        in_flight = self._queue.in_flight()
        room = self._leaving.room(max(0, self._max_in_flight - len(in_flight)))
        busy = replace(busy_beside(in_flight), memory_is_away=self._store.is_away())
        claimed = self._queue.claim(room, busy)
        self._leaving.claimed(len(claimed))
        # Before the loader gets a job: the caches that it reads must not be evicted until the job has ended.
        running = busy_beside(self._queue.in_flight()).agents
        self._pin(running, self._queue.waiting_agents(), is_all=self._queue.knows_all())
        for job in claimed:
            waited_s = round(max(0.0, job.claimed_at - job.enqueued_at), 3)
            moved = {} if job.moved_from is None else {"moved_from": job.moved_from}
            log_job("claimed", job.job_id, agent=job.request.agent_id, queue=job.queue, waited=waited_s, **moved)
            self._loader.put(Job(job))
        if n_moved := sum(job.moved_from is not None for job in claimed):
            self._metrics.moved_in(n_moved)
        self._read_ahead()
        # A job that could take a free place may wait behind those that were read.
        self._look_again = room > len(claimed) and self._queue.has_unread()
        return bool(claimed)

    def _read_ahead(self) -> None:
        self._store.read_ahead(self._queue.next_agents(_READ_AHEAD_JOBS * self._max_in_flight))

    def _pin(self, running: frozenset[str], waiting: frozenset[str], *, is_all: bool) -> None:
        pinned = (running, waiting, is_all)
        if pinned != self._pinned:
            self._pinned = pinned
            self._store.pin(running, waiting, is_all=is_all)

    def _cancel_overdue(self) -> None:
        now = time.monotonic()
        for job in self._queue.in_flight():
            if job.deadline is not None and now > job.deadline:
                job.cancel.set("timed out")

    def _cancel_withdrawn(self) -> None:
        if self._watch.is_due() and self._queue.in_flight():
            for job in self._queue.withdrawn(self._engine.progress()):
                job.cancel.set("withdrawn")


def busy_beside(in_flight: Collection[ClaimedJob]) -> Busy:
    """The agents in use. While a job writes an agent's memory, other jobs of the agent wait for the result of that."""
    return Busy().beside(job.memory_use for job in in_flight)

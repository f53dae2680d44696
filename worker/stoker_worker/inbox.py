"""The inbox thread: the loop that decides what this worker works on. READ THIS FIRST.

Owns admission, withdrawals, timeouts and recovery: everything between Redis and the loader. Touches neither disk nor
MLX. The rest of a job's way is loader.py, engine_loop.py and finaliser.py, each a thread of its own.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue

from redis.exceptions import RedisError

from stoker_worker.admission import Admission
from stoker_worker.every import Every
from stoker_worker.ports import CancelReason, ClaimedJob, QueuePort

log = logging.getLogger(__name__)

_GATHER_S = 0.005
"""After a job has ended others often do too: one claim for all of them costs Redis and the engine less."""


class Inbox(threading.Thread):
    """Claims only what fits, watches what runs, and lets go of what has ended."""

    def __init__(
        self,
        queue: QueuePort,
        admission: Admission,
        *,
        to_loader: Callable[[ClaimedJob], None],
        protect: Callable[[frozenset[str]], None],
        progress: Callable[[], Mapping[str, int]],
        poll_s: float,
        recover_s: float,
        burst: bool,
    ) -> None:
        """
        Args:
            protect: told the agents with work queued or running, whenever they change.
            progress: tokens generated so far, by job id.
            poll_s: longest wait between two looks into the queue.
            recover_s: time between two looks for what dead workers left.
            burst: end when the queues are empty and nothing is in flight.
        """
        super().__init__(name="inbox", daemon=True)
        self._queue = queue
        self._admission = admission
        self._to_loader = to_loader
        self._protect = protect
        self._at_work = (frozenset[str](), frozenset[str]())
        self._progress = progress
        self._poll_s = poll_s
        self._recover = Every(recover_s)
        self._watch = Every(0.5)
        self._tidy = Every(1.0)
        self._burst = burst
        self._goes_on = False
        self._ended: SimpleQueue[ClaimedJob] = SimpleQueue()
        self._draining = threading.Event()
        self.idle = threading.Event()

    def run(self) -> None:
        while not self.idle.is_set():
            try:
                self._tick()
            except RedisError as error:  # what is running goes on
                log.warning("Redis is away (%s)", type(error).__name__)
                self._recover.make_due()  # a claim may be in doubt: look before the next one, or order is lost
                time.sleep(max(self._poll_s, 0.5))
            except Exception:  # one odd entry in Redis must not end the loop that watches all the others
                log.exception("the inbox met something it cannot handle")
                time.sleep(max(self._poll_s, 0.5))
            self._release_ended(wait_s=0.0 if self._goes_on else self._poll_s)

    def _tick(self) -> None:
        self._goes_on = False
        if self._draining.is_set() and not self._admission.jobs:
            self.idle.set()  # decided before anything asks Redis: a stop ends also when Redis is away
            return
        if not self._draining.is_set():
            if self._recover.is_due():
                self._recover_orphans()
            claimed = self._queue.claim(self._admission.room, self._admission.busy)
            self._admission.admit(claimed)
            self._protect_agents()
            for job in claimed:
                self._to_loader(job)
            # Whoever could have a place that is free may stand behind those that were read.
            self._goes_on = self._admission.room > 0 and self._queue.has_unread()
        self._stop_what_must_not_go_on()
        if self._tidy.is_due() and self._queue.tidy():
            self._tidy.make_due()
            self._goes_on = True
        if self._burst and not self._admission.jobs and self._queue.is_empty():
            self.idle.set()

    # --- called from other threads ---

    def ended(self, job: ClaimedJob) -> None:
        """The finaliser has done with a job: its slot and its agent are free."""
        self._ended.put(job)

    def drain(self) -> None:
        """Claim nothing more; `idle` is set once all that is in flight has ended."""
        self._draining.set()

    def leave(self) -> None:
        """End at once, whatever is in flight."""
        self.idle.set()

    def cancel_all(self, reason: CancelReason) -> None:
        for job in self._admission.jobs:
            job.cancel.set(reason)

    # --- steps ---

    def _recover_orphans(self) -> None:
        if recovered := self._queue.recover():
            log.warning("%d jobs of a dead worker are back in the queue", recovered)

    def _protect_agents(self) -> None:
        """Before the loader has a job: nothing of what it reads may be evicted until the job has ended."""
        at_work = (self._admission.busy.agents, self._queue.waiting_agents())
        if at_work != self._at_work:
            self._at_work = at_work
            self._protect(at_work[0] | at_work[1])

    def _stop_what_must_not_go_on(self) -> None:
        now = time.monotonic()
        for job in self._admission.jobs:
            if job.deadline is not None and now > job.deadline:
                job.cancel.set("timed out")
        if self._watch.is_due() and self._admission.jobs:
            for job in self._queue.withdrawn(self._admission.jobs, self._progress()):
                job.cancel.set("withdrawn")

    def _release_ended(self, wait_s: float) -> None:
        try:
            self._admission.release(self._ended.get(timeout=wait_s))
            time.sleep(_GATHER_S)
            while True:
                self._admission.release(self._ended.get_nowait())
        except Empty:
            pass

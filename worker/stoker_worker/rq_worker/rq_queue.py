"""The queue adapter, `QueuePort` in RQ's terms: which jobs this worker has taken out of its queues.

Owns that list, and what is asked about its jobs. Does not decide what to claim or when (admission), and does not know
what a job computes. Claiming, watching and recovery run on the inbox thread, ending on the finaliser threads. No lock
is held while Redis is asked: what is just being ended is noted, so that heartbeat and recovery leave it alone.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.suspension import is_suspended

from stoker_shared.errors import OwnershipLost, RequestError
from stoker_shared.wire import FIELD_STREAM
from stoker_worker.every import Every
from stoker_worker.ports import Busy, ClaimedJob, RowProgress, Serving
from stoker_worker.rq_worker.aftermath import Aftermath
from stoker_worker.rq_worker.backlog import Backlog
from stoker_worker.rq_worker.behind_runs import BehindRuns
from stoker_worker.rq_worker.callbacks import Callbacks
from stoker_worker.rq_worker.claiming import Claiming
from stoker_worker.rq_worker.ender import JobEnder
from stoker_worker.rq_worker.handle import RqHandle
from stoker_worker.rq_worker.housekeeping import Housekeeping
from stoker_worker.rq_worker.identity import RqIdentity
from stoker_worker.rq_worker.lease import Lease
from stoker_worker.rq_worker.ownership import Ownership
from stoker_worker.rq_worker.progress_meta import ProgressMeta
from stoker_worker.rq_worker.pulse import Pulse
from stoker_worker.rq_worker.recovery import Recovery
from stoker_worker.rq_worker.requeue import InFlight, Requeue
from stoker_worker.rq_worker.starter import JobStarter
from stoker_worker.rq_worker.streams import JobStreams

log = logging.getLogger(__name__)

_LOADING = RowProgress("loading")


class RqQueue:
    """Every job this worker has taken out of its queues."""

    def __init__(
        self, connection: Redis, identity: RqIdentity, lease: Lease, callbacks: Callbacks, pulse: Pulse
    ) -> None:
        self._connection = connection
        self._identity = identity
        self._pulse = pulse
        self._lease = lease
        self._queues = identity.queue_names()
        self._callbacks = callbacks
        self._starter = JobStarter(connection, identity, lease, callbacks=callbacks, refuse=self._refuse)
        self._ownership = Ownership(connection, lease, worker_name=identity.name)
        self._aftermath = Aftermath(connection, self._queues)
        self._ender = JobEnder(connection, identity, self._ownership, self._aftermath)
        self._recovery = Recovery(connection, self._queues, worker_name=identity.name)
        self._requeue = Requeue(connection, lease)
        self._housekeeping = Housekeeping(connection, self._queues, lease, self._aftermath, name=identity.name)
        self._look_if_suspended = Every(0.25)
        self._suspended = False
        self._in_doubt = False
        self._progress = ProgressMeta(connection)
        self._streams = JobStreams(connection)
        self._in_flight: dict[str, ClaimedJob] = {}
        self._stop_asked: set[str] = set()
        self._ending: set[str] = set()  # executions
        behind_runs = BehindRuns(self._ownership, self._requeue, self._starter, self._in_flight)
        backlogs = {name: Backlog(connection, name) for name in self._queues}
        self._claiming = Claiming(
            backlogs, lease, self._starter, behind_runs, self._in_flight, give_back=self._give_back_unstarted
        )
        identity.on_stop_job = self._ask_stop

    # --- inbox thread ---

    def claim(self, limit: int, busy: Busy) -> list[ClaimedJob]:
        self._claiming.has_unread = False
        self._identity.settle_state()
        if self._look_if_suspended.is_due():
            self._suspended = is_suspended(self._connection)
        if self._suspect_runs() or self._suspended:
            return []
        if self._in_doubt:  # what the last claim left has to be back in the queue first, or order is lost
            if not self._holds_all_queues():
                return []
            self.recover()
        self._in_doubt = True
        claimed: list[ClaimedJob] = []
        try:
            self._claiming.claim(limit, busy, claimed)
        except Exception as error:
            if not claimed:
                raise
            # What was started is ours and runs; the rest is put back before the next claim.
            log.warning("a claim broke off (%s: %s)", type(error).__name__, error)
        else:
            self._in_doubt = False
        for job in claimed:
            if job.handle.job.is_listened_to:
                self._streams.open(job)
        return claimed

    def has_unread(self) -> bool:
        return self._claiming.has_unread

    def waiting_agents(self) -> frozenset[str]:
        return self._claiming.waiting_agents()

    def withdrawn(self, jobs: Sequence[ClaimedJob], progress: Mapping[str, RowProgress]) -> list[ClaimedJob]:
        started, ours = JobStatus.STARTED.value.encode(), []
        with self._connection.pipeline(transaction=False) as pipeline:
            for job in jobs:
                pipeline.hmget(job.handle.job.key, "status", FIELD_STREAM, "meta")
            found = pipeline.execute(raise_on_error=False)
            for job, fields in zip(jobs, found, strict=True):
                # A key that is no hash any more was withdrawn as well.
                status, listened_to, meta = (None,) * 3 if isinstance(fields, Exception) else fields
                ours.append(status == started)
                if status == started and listened_to is not None:
                    self._streams.open(job)
                if status == started:
                    self._progress.note(pipeline, job.handle, meta or b"", progress.get(job.job_id, _LOADING))
            pipeline.execute()
        return [
            job
            for job, is_ours in zip(jobs, ours, strict=True)
            if job.job_id in self._stop_asked or (not is_ours and self._ownership.of(job.handle) != "ours")
        ]

    def listened_to(self) -> frozenset[int]:
        return self._streams.claim_numbers

    def tell(self, texts: Mapping[int, str]) -> None:
        for claim_number, text in texts.items():
            self._streams.tell(claim_number, text)

    def recover(self) -> int:
        """Put back what dead workers left, and what a lost connection left of our own claims; returns how many."""
        if not self._holds_all_queues():
            return 0
        # In this order: what is being ended stands in both until it is over.
        own = frozenset(job.handle.execution.id for job in list(self._in_flight.values())) | self._ending
        orphans = self._recovery.orphans(own)
        recovered = self._requeue.all(orphans)
        for lost in orphans:
            if lost.execution is not None:
                self._identity.executions.pop(lost.execution.id, None)
                self._progress.clear(Job.key_for(lost.job_id))
        self._recovery.forget_dead_workers()
        self._aftermath.catch_up(leave=self._ending)
        return recovered

    def announce(self, serving: Serving) -> None:
        self._identity.serving = serving  # written with the next heartbeat

    def is_empty(self) -> bool:
        if self._in_doubt:  # what the last claim left stands in no queue
            return False
        return all(Queue(name, connection=self._connection).count == 0 for name in self._queues)

    def tidy(self) -> bool:
        return self._housekeeping.step(self._in_flight)

    def sign_off(self) -> None:
        """The last word to Redis. Main thread, after all others."""
        self._housekeeping.scheduler.sign_off()

    # --- heartbeat thread ---

    def beat(self) -> bool:
        """Refresh worker, executions and lease; ``False`` when the lease is somebody else's: we are deposed."""
        if not self._pulse.beat():
            return False
        for job in list(self._in_flight.values()):
            if job.handle.execution.id not in self._ending:  # each beat undoes a transaction that is on its way
                self._pulse.beat_execution(job.handle)
        return True

    # --- finaliser thread ---

    def owns(self, job: ClaimedJob) -> bool:
        return self._ownership.of(job.handle) == "ours"

    def finish(self, job: ClaimedJob, result: Mapping[str, Any]) -> None:
        self._ending.add(job.handle.execution.id)
        self._ender.finish(job.handle, result)
        self._forget(job, ended=True)
        self._callbacks.succeeded(job.handle.job, result)

    def fail(
        self, job: ClaimedJob, error: Exception, partial_text: str | None = None, *, may_retry: bool = True
    ) -> None:
        self._ending.add(job.handle.execution.id)
        self._ender.fail(job.handle, error, partial_text=partial_text, may_retry=may_retry)
        self._forget(job, ended=True)
        self._callbacks.failed(job.handle.job, error)

    def stopped(self, job: ClaimedJob) -> None:
        self._ending.add(job.handle.execution.id)
        was_stopped = self._ender.stop(job.handle)
        if not was_stopped:
            self._clear_progress(job)
        self._forget(job, ended=True)
        if was_stopped:
            self._callbacks.stopped(job.handle.job)

    def drop(self, job: ClaimedJob) -> None:
        try:
            self._ownership.let_go(job.handle)
        finally:
            self._forget(job)

    def give_back(self, jobs: Sequence[ClaimedJob], *, counts_as_attempt: bool, alone: bool = False) -> int:
        given_back = 0
        for job in reversed(jobs):  # each goes to the very front, so the first has to go last
            self._ending.add(job.handle.execution.id)
            try:
                lost = InFlight(job.job_id, job.queue, job.handle.execution, alone=alone)
                if self._requeue(lost, counts_as_attempt=counts_as_attempt) == "ended":
                    self._ownership.let_go(job.handle)
                else:
                    given_back += 1
                    self._clear_progress(job)
            finally:
                self._forget(job)  # whatever comes: recovery takes up what could not be given back
        return given_back

    # --- steps ---

    def _holds_all_queues(self) -> bool:
        return all(self._lease.is_ours(name) for name in self._queues)

    def _clear_progress(self, job: ClaimedJob) -> None:
        if job.handle.job.has_progress:
            self._progress.clear(job.handle.job.key)

    def _give_back_unstarted(self, job: ClaimedJob) -> None:
        self.give_back([job], counts_as_attempt=False)

    def _ask_stop(self, job_id: str) -> None:
        """RQ's stop command, on its pubsub thread."""
        started = {execution.job_id for execution in list(self._identity.executions.values())}
        if job_id in started:  # an id that is not ours may be used again later, and must not be stopped then
            self._stop_asked.add(job_id)

    def _refuse(self, handle: RqHandle, error: RequestError) -> None:
        self._ending.add(handle.execution.id)
        try:
            self._fail_refused(handle, error)
        except OwnershipLost:  # it was withdrawn just now
            self._ownership.let_go(handle)
            return
        finally:
            self._identity.executions.pop(handle.execution.id, None)
            self._ending.discard(handle.execution.id)
        self._callbacks.failed(handle.job, error)

    def _fail_refused(self, handle: RqHandle, error: RequestError) -> None:
        for tries_left in (2, 1, 0):  # nobody else tries again when a connection broke
            try:
                return self._ender.fail(handle, error)
            except RedisError:
                if not tries_left:
                    raise

    def _suspect_runs(self) -> bool:
        return any(job.attempt > 1 for job in list(self._in_flight.values()))

    def _forget(self, job: ClaimedJob, *, ended: bool = False) -> None:
        self._streams.close(job, ended=ended)
        self._in_flight.pop(job.job_id, None)
        self._stop_asked.discard(job.job_id)
        self._identity.executions.pop(job.handle.execution.id, None)
        self._ending.discard(job.handle.execution.id)

"""The queue adapter: `QueuePort` in RQ's terms. One round trip asks about all jobs in flight.

Does not decide how many jobs are claimed (the fetcher does), nor which ones (claim_order.py); a claimed job ends itself
(claimed_job.py). `QueuePort` has the threads. No lock is held while Redis is asked.
"""

import logging
from collections.abc import Callable, Mapping

from redis import Redis
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.suspension import is_suspended

from stoker_shared.wire import FIELD_STREAM
from stoker_worker.periodic import Periodic
from stoker_worker.ports import Busy, ClaimedJob, QueuePort, SequenceProgress, Serving, TextSoFar
from stoker_worker.queue.beat import HeartbeatWriter
from stoker_worker.queue.callbacks import Callbacks
from stoker_worker.queue.claim_order import ClaimOrder
from stoker_worker.queue.claimed_job import QueueParts, RqClaimedJob
from stoker_worker.queue.claimer import Claimer
from stoker_worker.queue.follow_up import FollowUp
from stoker_worker.queue.hang_up import hang_up, shorten
from stoker_worker.queue.housekeeping import Housekeeping
from stoker_worker.queue.in_flight import JobsInFlight
from stoker_worker.queue.job_finish import JobFinish
from stoker_worker.queue.job_start import JobStart
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.ownership import Ownership
from stoker_worker.queue.progress_meta import ProgressMeta
from stoker_worker.queue.recovery import Recovery
from stoker_worker.queue.registration import RqRegistration
from stoker_worker.queue.requeue import Requeue
from stoker_worker.queue.streams import JobStreams
from stoker_worker.queue.transient_errors import as_redis_unavailable

log = logging.getLogger(__name__)

_LOADING = SequenceProgress("loading")


class RqQueue(QueuePort):
    """See `QueuePort`."""

    def __init__(
        self,
        connection: Redis,
        *,
        registration: RqRegistration,
        lease: Lease,
        callbacks: Callbacks,
        heartbeat: HeartbeatWriter,
        in_flight: JobsInFlight[RqClaimedJob],
    ) -> None:
        self._connection = connection
        self._registration = registration
        self._heartbeat = heartbeat
        self._lease = lease
        self._queues = queues = registration.queue_names()
        self._in_flight = in_flight
        self._ownership = Ownership(connection, lease, worker_name=registration.name)
        self._follow_up = FollowUp(connection, queues)
        self._job_finish = JobFinish(connection, registration, self._ownership, self._follow_up)
        self._requeue = Requeue(connection, lease)
        self._progress = ProgressMeta(connection)
        self._streams = JobStreams(connection)
        parts = QueueParts(
            self._ownership,
            self._job_finish,
            self._requeue,
            self._streams,
            self._progress,
            callbacks,
            registration.stop_requests,
            in_flight,
        )
        self._job_start = JobStart(connection, registration, lease, parts)
        self._recovery = Recovery(connection, queues, worker_name=registration.name)
        self._housekeeping = Housekeeping(connection, queues, lease, self._follow_up, name=registration.name)
        claimers = {name: Claimer(connection, name) for name in queues}
        self._claim_order = ClaimOrder(claimers, lease, self._job_start, self._requeue, in_flight)
        self._look_if_suspended = Periodic(0.25)
        self._suspended = False
        self._in_doubt = False

    @as_redis_unavailable()
    def claim(self, limit: int, busy: Busy) -> list[ClaimedJob]:
        self._claim_order.has_unread = False
        self._registration.settle_state(is_busy=len(self._in_flight) > 0)
        if self._look_if_suspended.is_due():
            self._suspended = is_suspended(self._connection)
        if self._quarantined_runs() or self._suspended:
            return []
        if self._in_doubt:  # the jobs that the last claim left have to be back in the queue first, or order is lost
            if not self._holds_all_queues():
                return []
            self.recover()
        self._in_doubt = True
        claimed: list[RqClaimedJob] = []
        try:
            self._claim_order.claim(limit, busy, claimed)
        except Exception as error:
            if not claimed:
                raise
            # The jobs that were started are ours and run; the rest is put back before the next claim.
            log.warning("a claim broke off (%s: %s)", type(error).__name__, error)
        else:
            self._in_doubt = False
        finally:
            self._registration.stop_requests.all_started()
        for job in claimed:
            if job.run.job.is_listened_to:
                self._streams.open(job.claim_number, job.run)
        return list(claimed)

    def in_flight(self) -> tuple[ClaimedJob, ...]:
        return self._in_flight.snapshot()

    def wait_for_release(self, timeout_s: float) -> bool:
        return self._in_flight.wait_for_release(timeout_s)

    def has_unread(self) -> bool:
        return self._claim_order.has_unread

    def waiting_agents(self) -> frozenset[str]:
        return self._claim_order.waiting_agents()

    def prefer(self, is_at_hand: Callable[[str], bool]) -> None:
        self._claim_order.prefer(is_at_hand)

    def place_of(self, agent_id: str) -> tuple[int, int]:
        return self._claim_order.place_of(agent_id)

    @as_redis_unavailable()
    def next_agents(self, limit: int) -> tuple[str, ...]:
        return self._claim_order.next_agents(limit)

    @as_redis_unavailable()
    def withdrawn(self, progress: Mapping[str, SequenceProgress]) -> list[ClaimedJob]:
        jobs = self._in_flight.snapshot()
        started, runs = JobStatus.STARTED.value.encode(), []
        with self._connection.pipeline(transaction=False) as pipeline:
            for job in jobs:
                pipeline.hmget(job.run.job.key, "status", FIELD_STREAM, "meta")
            found = pipeline.execute(raise_on_error=False)
            for job, fields in zip(jobs, found, strict=True):
                # A job whose key is no hash any more was withdrawn as well.
                status, listened_to, meta = (None,) * 3 if isinstance(fields, Exception) else fields
                runs.append(status == started)
                if status == started and listened_to is not None:
                    self._streams.open(job.claim_number, job.run)
                if status == started:
                    self._progress.note(pipeline, job.run, meta or b"", progress.get(job.job_id, _LOADING))
            pipeline.execute()
        for job in jobs:
            if self._in_flight.get(job.job_id) is not job:  # released meanwhile, perhaps before its stream was opened
                self._streams.close(job.claim_number, ended=False)
        stops = self._registration.stop_requests
        return [
            job
            for job, still_runs in zip(jobs, runs, strict=True)
            if stops.is_asked(job.job_id) or (not still_runs and self._ownership.of(job.run) != "ours")
        ]

    def listened_to(self) -> frozenset[int]:
        return self._streams.claim_numbers

    @as_redis_unavailable()
    def tell(self, texts: Mapping[int, TextSoFar]) -> None:
        for claim_number, so_far in texts.items():
            self._streams.tell(claim_number, so_far)

    @as_redis_unavailable()
    def recover(self) -> int:
        """Put back what dead workers left, and what a lost connection left of our own claims; returns how many."""
        if not self._holds_all_queues():
            return 0
        own = frozenset(job.run.execution.id for job in self._in_flight.snapshot())
        orphans = self._recovery.orphans(own)
        recovered = self._requeue.all(orphans)
        for lost in orphans:
            if lost.execution is not None:
                self._progress.clear(Job.key_for(lost.job_id))
        self._recovery.forget_dead_workers()
        self._follow_up.catch_up(leave=own)
        return recovered

    def announce(self, serving: Serving) -> None:
        self._registration.serving = serving  # written with the next heartbeat

    @as_redis_unavailable()
    def is_empty(self) -> bool:
        if self._in_doubt:  # jobs that the last claim left are in no queue
            return False
        return all(Queue(name, connection=self._connection).count == 0 for name in self._queues)

    @as_redis_unavailable()
    def tidy(self) -> bool:
        return self._housekeeping.step(self._in_flight)

    @as_redis_unavailable()
    def beat(self) -> bool:
        """Refresh worker, executions and lease; ``False`` when the lease is another worker's."""
        if not self._heartbeat.beat():
            return False
        for job in self._in_flight.snapshot():
            if not job.ending.is_set():
                self._heartbeat.beat_execution(job.run)
        return True

    def hang_up(self) -> None:
        hang_up(self._connection.connection_pool)

    def sign_off(self) -> None:
        """Give up the scheduler's locks, and wait no longer than a second for each call from here on: what the server
        does not do now runs out by itself. Main thread, after all others."""
        shorten(self._connection.connection_pool, 1.0)
        self._housekeeping.scheduler.sign_off()

    def _holds_all_queues(self) -> bool:
        return all(self._lease.is_ours(name) for name in self._queues)

    def _quarantined_runs(self) -> bool:
        return any(job.attempt > 1 for job in self._in_flight.snapshot())

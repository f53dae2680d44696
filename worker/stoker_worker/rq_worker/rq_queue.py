"""The queue adapter: claims, watches and ends jobs in RQ's own terms. Implements `QueuePort`.

Owns the RQ job and execution behind each claimed job. Does not decide what to claim or when (admission), and does not
know what a job computes. Claiming, watching and recovery run on the inbox thread, ending on the finaliser thread; the
one lock keeps a heartbeat from writing to an execution that is just being ended.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis import Redis
from redis.exceptions import RedisError, ResponseError
from rq.exceptions import NoSuchJobError
from rq.executions import Execution
from rq.intermediate_queue import IntermediateQueue
from rq.job import JobStatus
from rq.queue import Queue
from rq.registry import FailedJobRegistry, FinishedJobRegistry
from rq.suspension import is_suspended

from stoker_shared.errors import OwnershipLost, PayloadRefused, RedisUnavailable, RequestError, WorkerLostTooOften
from stoker_shared.request import GenerationRequest
from stoker_shared.wire import DEFAULT_JOB_TIMEOUT_S, FIELD_ATTEMPTS, FIELD_TOKENS, META_PARTIAL
from stoker_worker.ports import ClaimedJob, Delivery
from stoker_worker.rq_worker.backlog import Backlog
from stoker_worker.rq_worker.identity import RqIdentity
from stoker_worker.rq_worker.json_job import JsonJob, as_count
from stoker_worker.rq_worker.lease import Lease
from stoker_worker.rq_worker.recovery import Recovery
from stoker_worker.rq_worker.requeue import InFlight, Requeue

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""A job that was in flight under this many dying workers is failed instead of tried again."""

_OVER = {JobStatus.FINISHED, JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED}

# HSET alone would bring a deleted job back to life as a hash with one field.
_PROGRESS = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end"


@dataclass(frozen=True)
class _Handle:
    job: JsonJob
    execution: Execution


class RqQueue:
    """Every job this worker has taken out of its queues."""

    def __init__(self, connection: Redis, identity: RqIdentity, lease: Lease) -> None:
        self._connection = connection
        self._identity = identity
        self._lease = lease
        self._queues = identity.queue_names()
        self._backlogs = {name: Backlog(connection, name, suspect_after=MAX_ATTEMPTS - 1) for name in self._queues}
        self._recovery = Recovery(connection, self._queues, worker_name=identity.name)
        self._requeue = Requeue(connection, max_attempts=MAX_ATTEMPTS)
        self._publish = connection.register_script(_PROGRESS)
        self._in_flight: dict[str, ClaimedJob] = {}
        self._stop_asked: set[str] = set()
        self._ending = threading.RLock()
        identity.on_stop_job = self._stop_asked.add

    # --- inbox thread ---

    def claim(self, limit: int, busy_agents: frozenset[str]) -> list[ClaimedJob]:
        self._identity.settle_state()
        if limit <= 0 or self._suspect_runs() or is_suspended(self._connection):
            return []
        claimed: list[ClaimedJob] = []
        for name in self._queues:
            busy = busy_agents | {job.request.agent_id for job in claimed}
            if (room := limit - len(claimed)) == 0:
                break
            alone = not self._in_flight
            for job_id in self._backlogs[name].claim(room, busy, self._lease.held_value(name), nothing_runs=alone):
                try:
                    job = self._start(name, job_id)
                except ResponseError:
                    log.exception("%s is no job: its id is dropped", job_id)
                    self._drop_id(name, job_id)
                    continue
                if job is not None and job.request.agent_id in busy:
                    # The id was used again for another agent since we looked: its turn comes when that agent is free.
                    self.give_back([job], counts_as_attempt=False)
                elif job is not None:
                    claimed.append(job)
                    busy |= {job.request.agent_id}
            if self._backlogs[name].waits_for_quiet or self._suspect_runs():
                break
        return claimed

    def withdrawn(self, jobs: Sequence[ClaimedJob], progress: Mapping[str, int]) -> list[ClaimedJob]:
        with self._connection.pipeline(transaction=False) as pipeline:
            for job in jobs:
                handle: _Handle = job.handle
                pipeline.hget(handle.job.key, "status")
                if job.job_id in progress:
                    self._publish(keys=[handle.job.key], args=[FIELD_TOKENS, progress[job.job_id]], client=pipeline)
            replies = iter(pipeline.execute())
        gone = []
        for job in jobs:
            status = next(replies)
            if job.job_id in progress:
                next(replies)
            if status != JobStatus.STARTED.value.encode() or job.job_id in self._stop_asked:
                gone.append(job)
        return gone

    def recover(self) -> int:
        """Put back what dead workers left; returns how many jobs that were."""
        recovered = 0
        for lost in self._recovery.orphans(frozenset(self._in_flight)):
            outcome = self._requeue(lost, counts_as_attempt=True)
            if outcome == "exhausted":
                self._fail_exhausted(lost)
            recovered += outcome == "requeued"
        self._recovery.forget_dead_workers()
        return recovered

    def is_empty(self) -> bool:
        return all(Queue(name, connection=self._connection).count == 0 for name in self._queues)

    def tidy(self) -> None:
        """Drop expired entries of the finished and failed registries, as RQ's workers do now and then."""
        for name in self._queues:
            FinishedJobRegistry(name, connection=self._connection, job_class=JsonJob).cleanup()
            FailedJobRegistry(name, connection=self._connection, job_class=JsonJob).cleanup()
        self._identity.settle_state()

    # --- heartbeat thread ---

    def beat(self) -> bool:
        """Refresh worker, executions and lease; ``False`` when the lease is somebody else's: we are deposed."""
        if not self._lease.renew():
            return False
        self._identity.heartbeat(self._identity.worker_ttl + 60)
        for job in list(self._in_flight.values()):
            with self._ending:
                if job.job_id in self._in_flight:
                    self._identity.maintain_heartbeats(job.handle.job, job.handle.execution)
        return True

    # --- finaliser thread ---

    def owns(self, job: ClaimedJob) -> bool:
        handle: _Handle = job.handle
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.zscore(handle.job.started_job_registry.key, handle.execution.composite_key)
            pipeline.hget(handle.job.key, "status")
            lease_score, status = pipeline.execute()
        held = lease_score is not None and status == JobStatus.STARTED.value.encode()
        return held and self._lease.is_ours(job.queue)

    def finish(self, job: ClaimedJob, result: Mapping[str, Any]) -> None:
        rq_job, execution, queue = self._opened(job)
        with self._ending:
            self._identity.handle_execution_ended(rq_job, queue, self._identity.get_heartbeat_ttl(rq_job))
            rq_job._result = dict(result)
            rq_job._status = JobStatus.FINISHED
            self._identity.handle_job_success(
                job=rq_job, queue=queue, started_job_registry=queue.started_job_registry, execution=execution
            )
            self._forget(job)

    def fail(self, job: ClaimedJob, error: Exception, partial_text: str | None = None) -> None:
        rq_job, execution, queue = self._opened(job)
        if partial_text is not None:
            rq_job.meta[META_PARTIAL] = partial_text
            rq_job.save_meta()
        if isinstance(error, RequestError):
            rq_job.retries_left = 0  # the same request fails the same way
        self._end_failed(rq_job, execution, queue, f"{type(error).__name__}: {error}")
        self._forget(job)

    def stopped(self, job: ClaimedJob) -> None:
        handle: _Handle = job.handle
        if self.owns(job):
            self._identity._stopped_job_id = job.job_id
            rq_job, execution, queue = self._opened(job)
            self._end_failed(rq_job, execution, queue, "JobStopped: stopped on request")
        else:  # canceled or deleted: RQ has written the job's end, what is left is our execution
            with self._ending, self._connection.pipeline() as pipeline:
                self._identity.cleanup_execution(handle.job, pipeline=pipeline, execution=handle.execution)
                pipeline.execute()
        self._forget(job)

    def drop(self, job: ClaimedJob) -> None:
        """Forget a job that is not ours any more, writing nothing about it."""
        self._forget(job)

    def give_back(self, jobs: Sequence[ClaimedJob], *, counts_as_attempt: bool) -> None:
        for job in reversed(jobs):  # each goes to the very front, so the first has to go last
            with self._ending:
                lost = InFlight(job.job_id, job.queue, job.handle.execution)
                if self._requeue(lost, counts_as_attempt=counts_as_attempt) == "exhausted":
                    self._fail_exhausted(lost)
                self._forget(job)

    # --- steps ---

    def _start(self, queue_name: str, job_id: str) -> ClaimedJob | None:
        """Make a claimed id a started job; ``None`` when there is nothing to run, or it was refused and has failed."""
        try:
            rq_job = cast(JsonJob, JsonJob.fetch(job_id, connection=self._connection))
            broken: Exception | None = None
            # Canceled since the claim; or an id that stands in the queue twice, because a client sent its
            # transaction again when the reply to the first one was lost.
            is_over = rq_job.get_status(refresh=False) in _OVER or job_id in self._in_flight
        except NoSuchJobError:  # its time to live in the queue has passed
            is_over = True
        except RedisError:  # not a hash at all, or no server: nothing may be written about it
            raise
        except Exception as error:  # any field of the hash may hold anything: it is written by strangers
            rq_job = JsonJob(job_id, connection=self._connection)
            rq_job.data = b"[]"
            broken = PayloadRefused(f"the job's hash cannot be read: {type(error).__name__}: {error}")
            is_over = False
        if is_over:
            self._drop_id(queue_name, job_id)
            return None
        rq_job.origin = queue_name
        execution = self._identity.prepare_execution(rq_job)
        self._identity.prepare_job_execution(rq_job, remove_from_intermediate_queue=True)
        handle = _Handle(rq_job, execution)
        try:
            if broken:
                raise broken
            job = _claimed(handle, rq_job.generation_request(), self._attempts(rq_job))
        except RequestError as error:
            self._refuse(handle, error)
            return None
        self._in_flight[job_id] = job
        return job

    def _drop_id(self, queue_name: str, job_id: str) -> None:
        """Forget a claimed id behind which there is nothing to run."""
        queue_key = Queue(queue_name, connection=self._connection).key
        IntermediateQueue(queue_key, self._connection).remove(job_id)

    def _suspect_runs(self) -> bool:
        return any(job.attempt >= MAX_ATTEMPTS for job in list(self._in_flight.values()))

    def _attempts(self, rq_job: JsonJob) -> int:
        return 1 + as_count(cast(bytes | None, self._connection.hget(rq_job.key, FIELD_ATTEMPTS)))

    def _refuse(self, handle: _Handle, error: RequestError) -> None:
        log.warning("job %s refused: %s: %s", handle.job.id, type(error).__name__, error)
        handle.job.retries_left = 0
        queue = self._identity.queue_of(handle.job)
        self._end_failed(handle.job, handle.execution, queue, f"{type(error).__name__}: {error}")

    def _fail_exhausted(self, lost: InFlight) -> None:
        assert lost.execution is not None
        rq_job = cast(JsonJob, JsonJob.fetch(lost.job_id, connection=self._connection))
        rq_job.retries_left = 0
        reason = f"in flight while {MAX_ATTEMPTS} workers died"
        log.error("job %s failed: %s", lost.job_id, reason)
        queue = self._identity.queue_of(rq_job)
        self._end_failed(rq_job, lost.execution, queue, f"{WorkerLostTooOften.__name__}: {reason}")

    def _opened(self, job: ClaimedJob) -> tuple[JsonJob, Execution, Queue]:
        if not self.owns(job):
            raise OwnershipLost(f"job {job.job_id} is no longer this worker's")
        handle: _Handle = job.handle
        return handle.job, handle.execution, self._identity.queue_of(handle.job)

    def _end_failed(self, rq_job: JsonJob, execution: Execution, queue: Queue, reason: str) -> None:
        with self._ending:
            rq_job._status = JobStatus.FAILED
            self._identity.handle_execution_ended(rq_job, queue, self._identity.get_heartbeat_ttl(rq_job))
            self._identity.handle_job_failure(
                job=rq_job,
                queue=queue,
                started_job_registry=queue.started_job_registry,
                exc_string=reason,
                execution=execution,
            )
            # RQ logs and swallows a failure of its own transaction; the job would stay "started" under a live worker.
            if self._connection.zscore(queue.started_job_registry.key, execution.composite_key) is not None:
                raise RedisUnavailable(f"the failure of job {rq_job.id} could not be written")

    def _forget(self, job: ClaimedJob) -> None:
        self._in_flight.pop(job.job_id, None)
        self._stop_asked.discard(job.job_id)
        self._identity.executions.pop(job.handle.execution.id, None)


def _claimed(handle: _Handle, request: GenerationRequest, attempt: int) -> ClaimedJob:
    rq_job, now = handle.job, time.time()
    timeout_s = rq_job.timeout if rq_job.timeout is not None else DEFAULT_JOB_TIMEOUT_S
    return ClaimedJob(
        job_id=rq_job.id,
        queue=rq_job.origin,
        request=request,
        delivery=Delivery(rq_job.id, rq_job.raw_created_at, rq_job.repeats_left),
        attempt=attempt,
        enqueued_at=rq_job.enqueued_at.timestamp() if rq_job.enqueued_at else now,
        claimed_at=now,
        deadline=time.monotonic() + timeout_s if timeout_s > 0 else None,
        handle=handle,
    )

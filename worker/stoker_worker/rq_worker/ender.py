"""Ends jobs with RQ's own transactions, once, and only while they are ours. Finaliser thread (inbox: refused jobs).

Owns the check of ownership. It stands inside the transaction: a reply that got lost, or a process that slept between
looking and writing, cannot end a job a second time.
"""

from collections.abc import Callable, Mapping
from typing import Any

from redis import Redis
from redis.client import Pipeline
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.utils import now

from stoker_shared.errors import OwnershipLost, RedisUnavailable, RequestError
from stoker_shared.wire import LEASE_KEY, META_PARTIAL
from stoker_worker.rq_worker.handle import RqHandle
from stoker_worker.rq_worker.identity import RqIdentity
from stoker_worker.rq_worker.json_job import JsonJob
from stoker_worker.rq_worker.lease import HOLDS, Lease

# The execution's hash goes with its entry in the registry of started jobs, in one transaction, whoever ends it.
_OWNS = (
    HOLDS
    + """
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
if redis.call('HGET', KEYS[3], 'status') ~= 'started' then return 0 end
return redis.call('EXISTS', KEYS[4])
"""
)


class OwnedQueue(Queue):
    """A queue whose part in RQ's success transaction begins with a check.

    RQ calls `move_dependents_to_ready` inside its WATCH loop, before the transaction and again for each new try.
    """

    check: Callable[[Pipeline], None]
    retries_in_place = False

    def _enqueue_job(
        self, job: Job, pipeline: Pipeline | None = None, at_front: bool = False, unique: bool = False
    ) -> Job:
        """RQ puts a job that is retried at once behind all others, also behind its own agent's next one."""
        return super()._enqueue_job(job, pipeline, at_front or self.retries_in_place, unique)

    def move_dependents_to_ready(
        self, job: Job, pipeline: Pipeline | None = None, *args: Any, **options: Any
    ) -> dict[str, list[str]]:
        if pipeline is not None:
            self.check(pipeline)
        return super().move_dependents_to_ready(job, pipeline, *args, **options)


class JobEnder:
    """The last word on jobs of this worker."""

    def __init__(self, connection: Redis, identity: RqIdentity, lease: Lease) -> None:
        self._connection = connection
        self._identity = identity
        self._lease = lease
        self._owns = connection.register_script(_OWNS)

    def owns(self, handle: RqHandle) -> bool:
        """Also takes a lease up again that ran out while Redis was away, as `Lease.is_ours` does."""
        queue = handle.job.origin
        keys = [*self._lease.keys(queue), handle.job.key, handle.execution.key]
        held: int = self._owns(keys=keys, args=self._lease.args(queue))
        return held == 1

    def finish(self, handle: RqHandle, result: Mapping[str, Any]) -> None:
        """
        Raises:
            OwnershipLost: the execution is not ours (any more), or it is finished already.
        """
        rq_job, queue = handle.job, self._queue_of(handle)
        rq_job.ended_at = rq_job.last_heartbeat = now()  # written with the rest
        rq_job._result = dict(result)
        rq_job._status = JobStatus.FINISHED
        repeat = rq_job.repeats_left, rq_job.repeat_intervals
        try:
            self._identity.handle_job_success(
                job=rq_job,
                queue=queue,
                started_job_registry=queue.started_job_registry,
                execution=handle.execution,
            )
        except BaseException:  # RQ counts a repeat before it has written it; the next try must not count it twice
            rq_job.repeats_left, rq_job.repeat_intervals = repeat
            raise

    def fail(
        self, handle: RqHandle, error: Exception, *, partial_text: str | None = None, may_retry: bool = True
    ) -> None:
        """
        Raises:
            OwnershipLost: the execution is not ours (any more).
            RedisUnavailable: RQ could not write it.
        """
        rq_job, queue = handle.job, self._opened(handle)
        if partial_text is not None:
            rq_job.meta[META_PARTIAL] = partial_text  # written with the rest: the job may be deleted by then
        if isinstance(error, RequestError) or not may_retry:
            rq_job.retries_left = 0  # the same request fails the same way
        self._write_failure(handle, queue, f"{type(error).__name__}: {error}")

    def stop(self, handle: RqHandle) -> bool:
        """End a job that was stopped on request, canceled or deleted; ``True`` for one that was stopped."""
        if not self.owns(handle):
            self.clean_up(handle)
            return False
        self._identity._stopped_job_id = handle.job.id
        self._write_failure(handle, self._opened(handle), "JobStopped: stopped on request")
        return True

    def clean_up(self, handle: RqHandle) -> None:
        """Remove our execution of a job that somebody else has ended; the job's own state is theirs to write.

        One that still stands as started is left: whoever holds the queue now has to find it to put it back. So is one
        that was put back: what was counted of it counts.
        """
        status = self._connection.hget(handle.job.key, "status")
        if status in {JobStatus.STARTED.value.encode(), JobStatus.QUEUED.value.encode()}:
            return
        with self._connection.pipeline() as pipeline:
            self._identity.cleanup_execution(handle.job, pipeline=pipeline, execution=handle.execution)
            pipeline.execute()

    def _opened(self, handle: RqHandle) -> OwnedQueue:
        if not self.owns(handle):
            raise OwnershipLost(f"job {handle.job.id} is no longer this worker's")
        return self._queue_of(handle)

    def _queue_of(self, handle: RqHandle) -> OwnedQueue:
        queue = OwnedQueue(handle.job.origin, connection=self._connection, job_class=JsonJob, serializer=JSONSerializer)
        queue.check = lambda pipeline: self._check(pipeline, handle)
        return queue

    def _check(self, pipeline: Pipeline, handle: RqHandle) -> None:
        """Watch what says that the execution is ours, then look: a change from here on undoes the transaction."""
        pipeline.watch(  # type: ignore[no-untyped-call]
            LEASE_KEY.format(queue=handle.job.origin), handle.execution.key, handle.job.key
        )
        if not self.owns(handle):
            raise OwnershipLost(f"job {handle.job.id} is no longer this worker's, or finished already")

    def _open_transaction(self, pipeline: Pipeline, handle: RqHandle) -> None:
        """RQ has a WATCH in the transaction of a success, and none in that of a failure."""
        self._check(pipeline, handle)
        pipeline.multi()
        if META_PARTIAL in handle.job.meta:
            pipeline.hset(handle.job.key, "meta", handle.job._serialize_meta())

    def _write_failure(self, handle: RqHandle, queue: OwnedQueue, reason: str) -> None:
        rq_job = handle.job
        rq_job._status = JobStatus.FAILED
        rq_job.ended_at = rq_job.last_heartbeat = now()
        retries_left = rq_job.retries_left
        queue.retries_in_place = True
        rq_job.check = lambda pipeline: self._open_transaction(pipeline, handle)
        try:
            self._identity.handle_job_failure(
                job=rq_job,
                queue=queue,
                started_job_registry=queue.started_job_registry,
                exc_string=reason,
                execution=handle.execution,
            )
        finally:  # as with repeats
            rq_job.retries_left, rq_job.check = retries_left, None
        # RQ logs and swallows a failure of its own transaction; the job would stay "started" under a live worker.
        still_there = self._connection.exists(handle.execution.key)
        if still_there:
            raise RedisUnavailable(f"the failure of job {rq_job.id} could not be written")

"""Puts a job whose answer was rejected into the queue of the next model, in one transaction. Finisher threads.

The job keeps its id: so its ticket, its times to live, its stream and the jobs that depend on it need nothing else. The
transaction ends this run, notes the attempt and the next model in the job's hash, counts the verdict, and puts the id
in front of the next queue, which may be the same one. It is written once, as an end is, and only while the run is ours.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from redis import Redis
from redis.exceptions import WatchError
from rq.job import JobStatus
from rq.queue import Queue
from rq.utils import utcformat

from stoker_shared.errors import RedisUnavailable
from stoker_shared.result import Attempt
from stoker_shared.route import Step
from stoker_shared.wire import FIELD_TRIED
from stoker_worker.queue.follow_up import FollowUp
from stoker_worker.queue.job_finish import AlreadyWritten, Ending
from stoker_worker.queue.json_job import JobRun
from stoker_worker.queue.ownership import Ownership
from stoker_worker.queue.registration import RqRegistration
from stoker_worker.queue.tried import as_field
from stoker_worker.queue.verdicts import Verdicts

_TRIES: Final = 3  # as of any end of a job


@dataclass(frozen=True)
class Onward:
    """Where a job goes on.

    Attributes:
        attempts: those so far, all rejected; the last one is that of this run.
        task: the class under which its verdict counts.
    """

    attempts: Sequence[Attempt]
    task: str
    to: Step


class Escalation:
    """Sends this worker's jobs on to other models."""

    def __init__(
        self, connection: Redis, registration: RqRegistration, ownership: Ownership, follow_up: FollowUp
    ) -> None:
        self._connection = connection
        self._registration = registration
        self._ownership = ownership
        self._follow_up = follow_up
        self._verdicts = Verdicts(connection)

    def carry_out(self, run: JobRun, onward: Onward) -> None:
        """
        Raises:
            OwnershipLost: the run is not ours (any more).
            RedisUnavailable: it could not be written.
        """
        ending = Ending(self._ownership, run, "escalated")
        for _ in range(_TRIES):
            note = ending.written()
            if note is None:
                with suppress(AlreadyWritten, WatchError):
                    self._write(run, ending, onward)
                note = ending.written()
            if note is not None:
                self._follow_up.carry_out(run.job.origin, run.execution.composite_key, note)
                return
        raise RedisUnavailable(f"job {run.job.id} could not be sent on to queue {onward.to.queue!r}")

    def _write(self, run: JobRun, ending: Ending, onward: Onward) -> None:
        rq_job, queue = run.job, Queue(onward.to.queue, connection=self._connection)
        # In RQ's form, to which a retry or RQ's own requeue brings it: the note below is this job's, and stays so.
        created_at = utcformat(rq_job.created_at)
        moved: dict[Any, Any] = {
            "status": JobStatus.QUEUED.value,
            "origin": onward.to.queue,
            "created_at": created_at,
            FIELD_TRIED: as_field(onward.attempts, created_at),
        }
        with self._connection.pipeline() as pipeline:
            ending.open(pipeline)
            pipeline.hset(rq_job.key, mapping=moved)
            pipeline.hdel(rq_job.key, "worker_name")
            if rq_job.ttl:  # it waits again, as a job that is retried does
                pipeline.expire(rq_job.key, rq_job.ttl)
            pipeline.sadd(Queue.redis_queues_keys, queue.key)
            pipeline.lpush(queue.key, rq_job.id)
            self._verdicts.count(pipeline, onward.attempts[-1], onward.task)
            rq_job.at_end = ending.write_note
            self._registration.cleanup_execution(rq_job, pipeline, run.execution)
            pipeline.execute()
            rq_job.at_end = None

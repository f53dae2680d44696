"""Puts a claimed or started job back at the front of its queue, in one atomic step. Owns no state; any thread."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from redis import Redis
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE, Execution, ExecutionRegistry
from rq.job import Job
from rq.queue import Queue
from rq.registry import StartedJobRegistry

from stoker_shared.wire import CLAIMED_KEY, FIELD_ATTEMPTS, FIELD_DELIVERY, FIELD_LOST_ALONE
from stoker_worker.queue.client import lua
from stoker_worker.queue.json_job import raw
from stoker_worker.queue.lease import Lease

Outcome = Literal["requeued", "waits", "ended"]


@dataclass(frozen=True)
class Claim:
    """A job id that was taken out of its queue.

    Attributes:
        execution: ``None`` for a job that was claimed but not started.
        claimed_key: the list with its id then, if it is not that of the member in whose name the job is put back.
        worker_lost: its worker is gone; otherwise it is this worker's own, and counts no loss.
        alone: no other job was in flight beside it.
    """

    job_id: str
    queue: str
    execution: Execution | None
    worker_lost: bool = False
    alone: bool = False
    claimed_key: str | None = None


class Requeue:
    """Puts jobs back, for the holder of a lease: its own jobs, or those of the dead member whose lease it has."""

    def __init__(self, connection: Redis, lease: Lease) -> None:
        self._connection = connection
        self._lease = lease
        self._script = connection.register_script(lua("delivery", "requeue"))

    def __call__(self, claim: Claim, *, counts_as_attempt: bool) -> Outcome:
        """
        Returns:
            ``requeued``; ``waits`` if the job is in its queue already, as after a lost reply; ``ended`` if there was
            nothing to put back, or the lease is not ours any more.
        """
        outcome: Outcome = self._run(claim, self._connection, counts_as_attempt=counts_as_attempt).decode()
        return outcome

    def all(self, claims: Sequence[Claim]) -> int:
        """Put several back in one transaction; returns how many were put back.

        If only some were put back, the next recovery would count the rest as the only jobs that had run side by side.
        """
        if not claims:
            return 0
        with self._connection.pipeline(transaction=True) as pipeline:
            for claim in claims:
                self._run(claim, pipeline, counts_as_attempt=claim.worker_lost)
            return pipeline.execute().count(b"requeued")

    def _run(self, claim: Claim, client: Redis, *, counts_as_attempt: bool) -> Any:
        queue_key = Queue(claim.queue, connection=self._connection).key
        execution = claim.execution
        member = execution.composite_key if execution else ""
        keys: list[str | bytes] = [
            queue_key,
            claim.claimed_key or CLAIMED_KEY.format(queue=claim.queue, member=self._lease.member),
            StartedJobRegistry(claim.queue, connection=self._connection).key,
            raw(Job.key_for(claim.job_id)),
            execution.key if execution else "",
            raw(ExecutionRegistry(claim.job_id, connection=self._connection).key),
            WORKER_EXECUTIONS_KEY_TEMPLATE.format(execution.worker_name if execution else ""),
            self._lease.keys[0],
        ]
        args: list[str | bytes | int] = [
            raw(claim.job_id),
            member,
            execution.id if execution else "",
            int(counts_as_attempt),
            FIELD_ATTEMPTS,
            self._lease.value,
            Queue.redis_queue_namespace_prefix,
            FIELD_DELIVERY,
            claim.queue,
            FIELD_LOST_ALONE,
            int(claim.alone),
        ]
        return self._script(keys=keys, args=args, client=client)

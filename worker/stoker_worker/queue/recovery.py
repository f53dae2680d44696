"""Finds the jobs that dead workers left behind. Owns no state; fetcher thread.

Runs only while this worker holds the queue's lease. So the execution of any other stoker worker on the queue is an
orphan: its owner is dead, or has lost the lease and cannot end the job any more. `lost_jobs.py` finds the jobs that
left no execution behind.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, cast

from redis import Redis
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE, Execution
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.queue import Queue
from rq.registry import StartedJobRegistry
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY, get_keys

from stoker_worker.queue.foreign_ids import raw, text
from stoker_worker.queue.registration import NAME_PREFIX
from stoker_worker.queue.requeue import Claim

log = logging.getLogger(__name__)

_ENTRY: Final = re.compile(rb"[A-Za-z0-9_-]+:[A-Za-z0-9_-]+")


class Recovery:
    """Looks for the orphans and the dead workers of some queues."""

    def __init__(self, connection: Redis, queues: list[str], *, worker_name: str) -> None:
        self._connection = connection
        self._queues = queues
        self._worker_name = worker_name

    def orphans(self, own_execution_ids: frozenset[str]) -> list[Claim]:
        """Jobs in flight that no worker runs, the latest enqueued first: put back one by one, they are in queue order.

        Args:
            own_execution_ids: the executions that this worker knows of. A claim whose connection broke may have begun
                another.
        """
        found = [orphan for queue in self._queues for orphan in self._of(queue, own_execution_ids)]
        beside = Counter(_owner(orphan) for orphan in found)
        found = [replace(orphan, alone=beside[_owner(orphan)] == 1) if _owner(orphan) else orphan for orphan in found]
        with self._connection.pipeline(transaction=False) as pipeline:
            for orphan in found:
                pipeline.hget(raw(Job.key_for(orphan.job_id)), "enqueued_at")
            # A key that is no hash is one job that cannot run, not a failure of the recovery.
            replies = [reply if isinstance(reply, bytes) else b"" for reply in pipeline.execute(raise_on_error=False)]
        enqueued_at = dict(zip((orphan.job_id for orphan in found), replies, strict=True))
        return sorted(found, key=lambda orphan: enqueued_at[orphan.job_id], reverse=True)

    def forget_dead_workers(self) -> None:
        """Remove other stoker workers' registrations for our queues, which dashboards would show for minutes."""
        for queue_name in self._queues:
            queue = Queue(queue_name, connection=self._connection)
            for key in get_keys(queue):
                name = key.rpartition(":")[2]
                if name.startswith(NAME_PREFIX) and name != self._worker_name:
                    log.info("removing the registration of dead worker %s", name)
                    with self._connection.pipeline() as pipeline:
                        pipeline.srem(REDIS_WORKER_KEYS, key)
                        pipeline.srem(WORKERS_BY_QUEUE_KEY % queue_name, key)
                        pipeline.delete(key, WORKER_EXECUTIONS_KEY_TEMPLATE.format(name))
                        pipeline.execute()

    def _of(self, queue_name: str, own_execution_ids: frozenset[str]) -> Iterator[Claim]:
        started = StartedJobRegistry(queue_name, connection=self._connection)
        entries = cast(list[bytes], self._connection.zrange(started.key, 0, -1))
        # Members of another form are not RQ's.
        members = [member.decode() for member in entries if _ENTRY.fullmatch(member)]
        executions = [Execution.from_composite_key(member, connection=self._connection) for member in members]
        with self._connection.pipeline(transaction=False) as pipeline:
            for execution in executions:
                pipeline.hget(execution.key, "worker_name")
            replies = pipeline.execute(raise_on_error=False)
        owners = [reply.decode(errors="replace") if isinstance(reply, bytes) else "" for reply in replies]
        for execution, owner in zip(executions, owners, strict=True):
            execution.worker_name = owner
            if owner == self._worker_name:
                if execution.id not in own_execution_ids:
                    yield Claim(execution.job_id, queue_name, execution)
            # RQ's own rules decide about a stock worker. An execution without an owner is an orphan.
            elif owner == "" or owner.startswith(NAME_PREFIX):
                yield Claim(execution.job_id, queue_name, execution, worker_lost=True)
        running = {execution.job_id for execution in executions}
        intermediate = IntermediateQueue(Queue(queue_name, connection=self._connection).key, self._connection)
        for entry in cast(list[bytes], self._connection.lrange(intermediate.key, 0, -1)):
            if (job_id := text(entry)) not in running:
                yield Claim(job_id, queue_name, None)


def _owner(orphan: Claim) -> str:
    return orphan.execution.worker_name if orphan.execution is not None else ""

"""Finds the jobs that a member's earlier holders left behind: executions, and ids that were claimed. Owns no state.

Called only by the holder of that member's lease: the member's own worker, or the one that puts a dead member's jobs
back. So an execution in that name which the holder does not know is an orphan: its owner is dead, or has lost the lease
and cannot end the job any more. `lost_jobs.py` finds the jobs that left no execution behind. Fetcher thread.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from redis import Redis
from rq.executions import Execution
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.queue import Queue
from rq.registry import StartedJobRegistry

from stoker_shared.wire import CLAIMED_KEY
from stoker_worker.queue.foreign_ids import raw, text
from stoker_worker.queue.registration import NAME_PREFIX, member_of
from stoker_worker.queue.requeue import Claim

_ENTRY: Final = re.compile(rb"[A-Za-z0-9_-]+:[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Started:
    """The executions of some queues as they were at one moment, with the queue of each."""

    executions: tuple[tuple[str, Execution], ...]

    def members(self) -> frozenset[str]:
        """The members that have one. RQ's own rules decide about a stock worker's."""
        names = (execution.worker_name for _, execution in self.executions)
        return frozenset(member_of(name) for name in names if name.startswith(NAME_PREFIX))

    def of(self, member: str) -> Iterator[tuple[str, Execution]]:
        for queue, execution in self.executions:
            name = execution.worker_name
            if name.startswith(NAME_PREFIX) and member_of(name) == member:
                yield queue, execution


class Recovery:
    """Looks for the orphans of one member after the other."""

    def __init__(self, connection: Redis, *, worker_name: str) -> None:
        """
        Args:
            worker_name: of this RQ worker, whose own executions count no loss.
        """
        self._connection = connection
        self._worker_name = worker_name

    def started(self, queues: Iterable[str]) -> Started:
        """Two round trips for each queue."""
        return Started(tuple((queue, execution) for queue in queues for execution in self._executions(queue)))

    def orphans(
        self, member: str, queues: Iterable[str], started: Started, own_ids: frozenset[str] = frozenset()
    ) -> list[Claim]:
        """A member's jobs in flight that no worker runs.

        Args:
            own_ids: the executions that this worker knows of. A claim whose connection broke may have begun another.
        """
        found: list[Claim] = []
        for queue, execution in started.of(member):
            if execution.worker_name != self._worker_name:
                found.append(Claim(execution.job_id, queue, execution, worker_lost=True))
            elif execution.id not in own_ids:
                found.append(Claim(execution.job_id, queue, execution))
        beside = Counter(_owner(orphan) for orphan in found)
        found = [replace(orphan, alone=beside[_owner(orphan)] == 1) for orphan in found]
        for queue in queues:
            # An id that runs elsewhere was enqueued again meanwhile: it goes back, and is dropped or waits at its turn.
            running = {execution.job_id for name, execution in started.of(member) if name == queue}
            found += self._claimed(queue, CLAIMED_KEY.format(queue=queue, member=member), running)
        return found

    def nobodys(self, queues: Iterable[str], started: Started) -> list[Claim]:
        """Jobs in flight of which it is not known whose they are, and ids that RQ's own dequeue has left."""
        found = [
            Claim(execution.job_id, queue, execution, worker_lost=True)
            for queue, execution in started.executions
            if execution.worker_name == ""
        ]
        for queue in queues:
            key = Queue(queue, connection=self._connection).key
            running = {execution.job_id for name, execution in started.executions if name == queue}
            found += self._claimed(queue, IntermediateQueue.get_intermediate_queue_key(key), running)
        return found

    def latest_first(self, found: Sequence[Claim]) -> list[Claim]:
        """By the time when they were enqueued: put back one by one, they are in queue order."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for orphan in found:
                pipeline.hget(raw(Job.key_for(orphan.job_id)), "enqueued_at")
            # A key that is no hash is one job that cannot run, not a failure of the recovery.
            replies = [reply if isinstance(reply, bytes) else b"" for reply in pipeline.execute(raise_on_error=False)]
        enqueued_at = dict(zip((orphan.job_id for orphan in found), replies, strict=True))
        return sorted(found, key=lambda orphan: enqueued_at[orphan.job_id], reverse=True)

    def _executions(self, queue: str) -> list[Execution]:
        key = StartedJobRegistry(queue, connection=self._connection).key
        entries = cast(list[bytes], self._connection.zrange(key, 0, -1))
        # Members of another form are not RQ's.
        members = [member.decode() for member in entries if _ENTRY.fullmatch(member)]
        executions = [Execution.from_composite_key(member, connection=self._connection) for member in members]
        with self._connection.pipeline(transaction=False) as pipeline:
            for execution in executions:
                pipeline.hget(execution.key, "worker_name")
            replies = pipeline.execute(raise_on_error=False)
        for execution, reply in zip(executions, replies, strict=True):
            execution.worker_name = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
        return executions

    def _claimed(self, queue: str, key: str, running: Container[str]) -> Iterator[Claim]:
        for entry in cast(list[bytes], self._connection.lrange(key, 0, -1)):
            if (job_id := text(entry)) not in running:
                yield Claim(job_id, queue, None, claimed_key=key)


def _owner(orphan: Claim) -> str:
    return orphan.execution.worker_name if orphan.execution is not None else ""

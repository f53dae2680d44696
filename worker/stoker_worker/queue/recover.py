"""Puts back the jobs of dead members and of this member's earlier processes. Fetcher thread.

To put a dead member's jobs back, a worker takes its lease: that deposes the member even if it only slept, and keeps
others from doing the same. So an execution in a member's name that the holder of its lease does not know is an orphan:
its owner is dead, or has lost the lease and cannot end the job any more. The member is removed only afterwards, so that
no worker takes one of its agents before that agent's jobs are in the queue again.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, cast

from redis import Redis
from rq.executions import Execution
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.queue import Queue
from rq.registry import StartedJobRegistry
from rq.worker_registration import clean_worker_registry

from stoker_shared.errors import QueueHeld
from stoker_worker.queue.end import Claim, Requeue
from stoker_worker.queue.json_job import raw, text
from stoker_worker.queue.lease import Lease, Members
from stoker_worker.queue.registration import NAME_PREFIX, member_of

log = logging.getLogger(__name__)

_ENTRY: Final = re.compile(rb"[A-Za-z0-9_-]+:[A-Za-z0-9_-]+")

Started = Sequence[tuple[str, Execution]]
"""The executions of some queues at one moment, each with its queue."""


class Recoverer:
    """Recovers the queues of one worker."""

    def __init__(self, connection: Redis, lease: Lease, members: Members) -> None:
        self._connection = connection
        self._lease = lease
        self._members = members
        self._requeue = Requeue(connection, lease)

    def recover(self, own_ids: frozenset[str]) -> int:
        """Put back the jobs of the dead; returns how many. `own_ids`: the executions that this worker has in flight."""
        lease, members = self._lease, self._members
        queues = list(dict.fromkeys([*lease.queues, *lease.former_queues]))
        started = self._started(queues)
        members.look(asks_processes=True)  # only now: a worker becomes a member before it has executions
        found = self._orphans(lease.member, started, own_ids)
        recovered = self._requeue.all(self._latest_first([*found, *self._nobodys(queues, started)]))
        lease.settle()
        names = (execution.worker_name for _, execution in started)
        # The executions of stock workers are left to RQ's own rules.
        owners = frozenset(member_of(name) for name in names if name.startswith(NAME_PREFIX))
        unknown = owners - members.everybody - {lease.member}
        dead, members.dead = members.dead, ()  # the next look finds those that could not be buried now
        recovered += sum(self._bury(name, lease.queues) for name in unknown)
        recovered += sum(self._bury(member.name, member.queues) for member in dead)
        for queue in queues:
            clean_worker_registry(Queue(queue, connection=self._connection))
        return recovered

    def _bury(self, name: str, queues: Sequence[str]) -> int:
        """Put a dead member's jobs back, and remove it; returns how many. Nothing if another does so, or it is back."""
        lease = Lease(self._connection, name, queues, worker_name=self._lease.worker_name, ttl_s=self._lease.ttl_s)
        try:
            lease.acquire(recovers=True)
        except QueueHeld:
            return 0
        started = self._started(queues)  # as it is now: the dead one starts and ends nothing any more
        found = self._latest_first(self._orphans(name, started))
        recovered = Requeue(self._connection, lease).all(found)
        lease.leave()
        log.warning("worker %s is dead and a member no more; %d of its jobs are back in the queue", name, recovered)
        return recovered

    def _started(self, queues: Iterable[str]) -> Started:
        """Two round trips for each queue."""
        return [(queue, execution) for queue in queues for execution in self._executions(queue)]

    def _orphans(self, member: str, started: Started, own_ids: frozenset[str] = frozenset()) -> list[Claim]:
        """A member's jobs in flight that no worker runs. `own_ids`: the executions that this worker knows of; a claim
        whose connection broke may have begun others."""
        found: list[Claim] = []
        for queue, execution in started:
            name = execution.worker_name
            if not name.startswith(NAME_PREFIX) or member_of(name) != member:
                continue
            if name != self._lease.worker_name:
                found.append(Claim(execution.job_id, queue, execution, worker_lost=True))
            elif execution.id not in own_ids:
                found.append(Claim(execution.job_id, queue, execution))
        beside = Counter(_owner(orphan) for orphan in found)
        return [replace(orphan, alone=beside[_owner(orphan)] == 1) for orphan in found]

    def _nobodys(self, queues: Iterable[str], started: Started) -> list[Claim]:
        """Jobs in flight without a known worker, and ids that RQ's own dequeue has left in its intermediate list."""
        found = [
            Claim(execution.job_id, queue, execution, worker_lost=True)
            for queue, execution in started
            if execution.worker_name == ""
        ]
        for queue in queues:
            key = IntermediateQueue.get_intermediate_queue_key(Queue(queue, connection=self._connection).key)
            running = {execution.job_id for name, execution in started if name == queue}
            left = map(text, cast(list[bytes], self._connection.lrange(key, 0, -1)))
            found += [Claim(job_id, queue, None, left_in=key) for job_id in left if job_id not in running]
        return found

    def _latest_first(self, found: Sequence[Claim]) -> list[Claim]:
        """Sorted by the time of enqueueing: put back one by one at the front, they are in queue order again."""
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
        # Entries of another form are not RQ's.
        members = [member.decode() for member in entries if _ENTRY.fullmatch(member)]
        executions = [Execution.from_composite_key(member, connection=self._connection) for member in members]
        with self._connection.pipeline(transaction=False) as pipeline:
            for execution in executions:
                pipeline.hget(execution.key, "worker_name")
            replies = pipeline.execute(raise_on_error=False)
        for execution, reply in zip(executions, replies, strict=True):
            execution.worker_name = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
        return executions


def _owner(orphan: Claim) -> str:
    return orphan.execution.worker_name if orphan.execution is not None else ""

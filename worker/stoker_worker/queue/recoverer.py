"""Puts back what this worker's name left behind, and what dead members left. Owns no state; fetcher thread.

A dead member's jobs are put back in its own name: whoever takes its lease has deposed it, even if it only slept, and
is the only one that puts its jobs back. The member is removed when that is done, so nobody takes one of its agents
before that agent's jobs are in the queue again.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from redis import Redis
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE
from rq.job import Job
from rq.queue import Queue
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY, get_keys

from stoker_shared.errors import QueueHeld
from stoker_worker.queue.follow_up import FollowUp
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.members import Members
from stoker_worker.queue.progress_meta import ProgressMeta
from stoker_worker.queue.recovery import Recovery
from stoker_worker.queue.registration import NAME_PREFIX
from stoker_worker.queue.requeue import Claim, Requeue

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecoveryParts:
    """The parts of the queue that a recovery uses."""

    lease: Lease
    members: Members
    requeue: Requeue
    progress: ProgressMeta
    follow_up: FollowUp


class Recoverer:
    """Recovers the queues of one worker."""

    def __init__(self, connection: Redis, parts: RecoveryParts, *, worker_name: str, ttl_s: float) -> None:
        """
        Args:
            ttl_s: of the leases of dead members, while their jobs are put back.
        """
        self._connection = connection
        self._parts = parts
        self._worker_name = worker_name
        self._ttl_s = ttl_s
        self._recovery = Recovery(connection, worker_name=worker_name)

    def recover(self, own_ids: frozenset[str]) -> int:
        """Put back jobs; returns how many.

        Args:
            own_ids: the executions that this worker has in flight.
        """
        lease, members = self._parts.lease, self._parts.members
        queues = list(dict.fromkeys([*lease.queues, *lease.former_queues]))
        started = self._recovery.started(queues)
        members.look(asks_processes=True)  # after that: whoever has an execution was a member before
        found = self._recovery.orphans(lease.member, queues, started, own_ids)
        recovered = self._put_back(self._parts.requeue, [*found, *self._recovery.nobodys(queues, started)])
        self._parts.follow_up.catch_up(queues, own_ids, members.everybody - {lease.member})
        lease.settle()
        unknown = started.members() - members.everybody - {lease.member}
        dead, members.dead = members.dead, ()  # the next look finds whoever could not be buried now
        recovered += sum(self._bury(name, lease.queues) for name in unknown)
        recovered += sum(self._bury(member.name, member.queues) for member in dead)
        self._forget_workers(queues)
        return recovered

    def _bury(self, name: str, queues: Sequence[str]) -> int:
        """Put a dead member's jobs back, and remove it; nothing if another member does so just now, or it is back."""
        lease = Lease(self._connection, name, queues, worker_name=self._worker_name, ttl_s=self._ttl_s)
        try:
            lease.acquire(recovers=True)
        except QueueHeld:
            return 0
        started = self._recovery.started(queues)  # as it is now: the dead one starts and ends nothing any more
        found = self._recovery.orphans(name, queues, started)
        recovered = self._put_back(Requeue(self._connection, lease), found)
        living = (self._parts.members.everybody | {self._parts.lease.member}) - {name}
        self._parts.follow_up.catch_up(queues, frozenset(), living)
        lease.leave()
        log.warning("worker %s is dead and a member no more; %d of its jobs are back in the queue", name, recovered)
        return recovered

    def _put_back(self, requeue: Requeue, found: Sequence[Claim]) -> int:
        orphans = self._recovery.latest_first(found)
        recovered = requeue.all(orphans)
        for lost in orphans:
            if lost.execution is not None:
                self._parts.progress.clear(Job.key_for(lost.job_id))
        return recovered

    def _forget_workers(self, queues: Iterable[str]) -> None:
        """Remove dead stoker workers' registrations for our queues, which dashboards would show for minutes."""
        members = self._parts.members
        for queue_name in queues:
            for key in get_keys(Queue(queue_name, connection=self._connection)):
                name = key.rpartition(":")[2]
                if name.startswith(NAME_PREFIX) and not members.is_alive(name):
                    log.info("removing the registration of dead worker %s", name)
                    with self._connection.pipeline() as pipeline:
                        pipeline.srem(REDIS_WORKER_KEYS, key)
                        pipeline.srem(WORKERS_BY_QUEUE_KEY % queue_name, key)
                        pipeline.delete(key, WORKER_EXECUTIONS_KEY_TEMPLATE.format(name))
                        pipeline.execute()

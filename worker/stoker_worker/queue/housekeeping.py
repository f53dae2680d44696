"""Enqueues scheduled jobs when they are due, and removes expired entries. Fetcher thread.

Owns the times of these steps. Each is short, because the same thread watches the running jobs. Of several workers on a
queue, one cleans up (`Members.duties`), and the holder of RQ's scheduler lock enqueues.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar, cast

from redis import Redis
from rq.group import Group
from rq.job import JobStatus
from rq.registry import (
    CanceledJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ReadyJobRegistry,
    ScheduledJobRegistry,
)
from rq.scheduler import RQScheduler
from rq.scripts import acquire_or_refresh_lock, release_lock
from rq.utils import current_timestamp, now, utcformat

from stoker_worker.periodic import Periodic
from stoker_worker.placement.placement import Placement
from stoker_worker.queue.client import lua, may_pass
from stoker_worker.queue.lease import Lease, Members

log = logging.getLogger(__name__)

T = TypeVar("T")
_LOCK_S: Final = 5  # it is refreshed each second; after a crash, the next scheduler waits for so long
_AT_ONCE: Final = 200
_STEP_S: Final = 0.02  # then the thread's other work has its turn
_READY_S: Final = 60
_CANCELED_S: Final = 30 * 86_400
_GROUPS_EVERY_S: Final = 600  # as RQ's own workers


class Scheduler:
    """Does the work of `rq worker --with-scheduler` for the queues of one worker, without the forked process.

    Owns RQ's scheduler locks on these queues; a queue whose lock another scheduler holds is left to that one. RQ's own
    scheduler reads the due jobs and enqueues them later: if it sleeps in between, it enqueues jobs twice, or canceled
    ones. Here a job moves from the registry to its queue in one step.
    """

    def __init__(self, connection: Redis, lease: Lease) -> None:
        self._connection = connection
        self.queues = lease.queues
        self._lease = lease
        self._name = lease.worker_name  # under which the locks are held
        self._enqueue = connection.register_script(lua("enqueue", "enqueue_due"))

    def enqueue_due(self) -> bool:
        """Enqueue due jobs, the oldest first, for about `_STEP_S`; returns whether more are due."""
        held = [queue for queue in self.queues if self._holds_lock(queue)]
        until = time.monotonic() + _STEP_S
        return any([self._enqueue_due_of(queue, until) for queue in held])  # a list: every queue has its turn

    def sign_off(self) -> None:
        """Release the locks for the next scheduler."""
        for queue in self.queues:
            release_lock(self._connection, RQScheduler.get_locking_key(queue), self._name)

    def _holds_lock(self, queue: str) -> bool:
        key = RQScheduler.get_locking_key(queue)
        return acquire_or_refresh_lock(self._connection, key, self._name, _LOCK_S) != "taken"

    def _enqueue_due_of(self, queue: str, until: float) -> bool:
        """Enqueue due jobs, at least one batch, until a time of the monotonic clock; returns whether more are due."""
        key = ScheduledJobRegistry(queue, connection=self._connection).key
        while True:
            due = self._due(key, current_timestamp())
            taken = self._move(queue, key, due)
            # Jobs that could not be taken now are looked at again in a second.
            if taken == 0 or (taken == len(due) < _AT_ONCE):
                return False
            if time.monotonic() > until:
                return True

    def enqueue_ready(self, queue: str) -> None:
        """Enqueue jobs that waited for others, if a worker of RQ's own died just before it enqueued them."""
        key = ReadyJobRegistry(queue, connection=self._connection).key
        self._move(queue, key, self._due(key, current_timestamp() - _READY_S), JobStatus.READY_TO_ENQUEUE.value)

    def _due(self, key: str, until: int) -> list[bytes]:
        return cast(list[bytes], self._connection.zrangebyscore(key, 0, until, start=0, num=_AT_ONCE))

    def _move(self, queue: str, key: str, due: list[bytes], status: str = "") -> int:
        """Move jobs from a registry to the queue. With a `status`, jobs of another one only leave the registry. Returns
        how many left it."""
        keys = [key, self._lease.keys[0], RQScheduler.get_locking_key(queue)]
        args: list[str | bytes] = [self._lease.value, self._name, queue, utcformat(now()), status, *due]
        return self._enqueue(keys=keys, args=args) if due else 0


class Housekeeping:
    """RQ's scheduler and RQ's cleaning, for the queues of one worker."""

    def __init__(self, connection: Redis, lease: Lease, members: Members, placement: Placement) -> None:
        self._connection = connection
        self._members = members
        self._placement = placement
        self.scheduler = Scheduler(connection, lease)
        self._says_failed = Periodic(600.0)
        self._clean = Periodic(60.0)

    def step(self) -> bool:
        """Do what is due; returns whether more scheduled jobs are due already."""
        more_due = self._unharmed(self.scheduler.enqueue_due) or False
        if self._clean.is_due():
            for name in self._members.duties():
                for registry in (FinishedJobRegistry, FailedJobRegistry):
                    self._unharmed(registry(name, connection=self._connection).cleanup)
                # RQ keeps canceled jobs for ever. A job that `stoker` cancels expires, and its id would stay.
                canceled = CanceledJobRegistry(name, connection=self._connection).key
                last = current_timestamp() - _CANCELED_S
                self._unharmed(partial(self._connection.zremrangebyscore, canceled, 0, last))
                self._unharmed(partial(self._placement.sweep, name))
            for name in self.scheduler.queues:
                self._unharmed(partial(self.scheduler.enqueue_ready, name))
            self._unharmed(self._clean_groups)
        return more_due

    def _clean_groups(self) -> None:
        if Group.acquire_maintenance_lock(self._connection, _GROUPS_EVERY_S):
            Group.clean_registries(self._connection)

    def _unharmed(self, step: Callable[[], T]) -> T | None:
        """Do one step; ``None`` if it failed, as on malformed data in Redis: that is logged, and the other steps go on.
        Raises errors that may pass."""
        try:
            return step()
        except Exception as error:
            if may_pass(error):
                raise
            if self._says_failed.is_due():
                log.exception("housekeeping is not complete; for ten minutes, more of this is not logged")
            return None

"""Looks after what is due by the clock: scheduled jobs, lost and deferred jobs, expired entries. Fetcher thread.

Owns when each is looked at. Each step is short, because the same thread watches the running jobs. Of several workers on
a queue one does it (`Members.duties`), and RQ's own locks choose the one that schedules.
"""

import logging
from collections.abc import Callable, Container
from functools import partial
from typing import Final, TypeVar

from redis import Redis
from rq.group import Group
from rq.rate_limit import RateLimitRegistry
from rq.registry import FailedJobRegistry, FinishedJobRegistry, ReadyJobRegistry
from rq.serializers import JSONSerializer

from stoker_worker.periodic import Periodic
from stoker_worker.placement.placement import Placement
from stoker_worker.queue.canceled import CanceledJobs
from stoker_worker.queue.deferred import DeferredJobs
from stoker_worker.queue.follow_up import FollowUp
from stoker_worker.queue.json_job import JsonJob
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.lost_jobs import LostJobs
from stoker_worker.queue.members import Members
from stoker_worker.queue.scheduler import Scheduler
from stoker_worker.queue.transient_errors import may_pass

log = logging.getLogger(__name__)

T = TypeVar("T")

_GROUPS_EVERY_S: Final = 600  # as RQ's own workers
_SAYS_FAILED_S: Final = 600.0


class Housekeeping:
    """RQ's scheduler, the searches that complete recovery, and RQ's cleaning, for the queues of one worker."""

    def __init__(
        self,
        connection: Redis,
        lease: Lease,
        members: Members,
        follow_up: FollowUp,
        *,
        placement: Placement,
        name: str,
    ) -> None:
        """
        Args:
            name: the worker's name, under which the scheduler's locks are held.
        """
        self._connection = connection
        self._members = members
        self._placement = placement
        self.scheduler = Scheduler(connection, lease, members, name=name)
        self._lost = LostJobs(connection, members.duties, lease)
        self._deferred = DeferredJobs(connection, members.duties, follow_up)
        self._canceled = CanceledJobs(connection, members.duties)
        self._search = Periodic(1.0)
        self._says_failed = Periodic(_SAYS_FAILED_S)
        self._sweep = Periodic(5.0)
        self._clean = Periodic(60.0)

    def step(self, in_flight: Container[str]) -> bool:
        """Do what is due.

        Args:
            in_flight: ids of the jobs this worker runs.

        Returns:
            whether more scheduled jobs are due already, so that the next step should come soon.
        """
        more_due = self._unharmed(self.scheduler.enqueue_due) or False
        if self._search.is_due():
            for search in (partial(self._lost.step, in_flight), self._deferred.step, self._canceled.step):
                self._unharmed(search)
        if self._sweep.is_due():
            for name in self._members.duties():
                self._unharmed(partial(self._placement.sweep, name))
        if self._clean.is_due():
            for name in self._members.duties():
                for registry in (FinishedJobRegistry, FailedJobRegistry, ReadyJobRegistry):
                    of_queue = registry(name, connection=self._connection, job_class=JsonJob, serializer=JSONSerializer)
                    self._unharmed(of_queue.cleanup)
            self._unharmed(self._clean_limits_and_groups)
        return more_due

    def _clean_limits_and_groups(self) -> None:
        for limit in RateLimitRegistry.all(self._connection):
            limit.cleanup()
        if Group.acquire_maintenance_lock(self._connection, _GROUPS_EVERY_S):
            Group.clean_registries(self._connection)

    def _unharmed(self, step: Callable[[], T]) -> T | None:
        """Do one thing; if what it finds in Redis cannot be read, the others go on without it."""
        try:
            return step()
        except Exception as error:
            if may_pass(error):
                raise
            if self._says_failed.is_due():
                log.exception("housekeeping is not complete; for ten minutes, more of this is not logged")
            return None

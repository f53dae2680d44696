"""Looks after what is due by the clock: scheduled jobs, lost and deferred jobs, expired entries, homes of agents that
were removed. Fetcher thread.

Owns when each is looked at. Each step is short, because the same thread watches the running jobs. Of several workers on
a queue one does it (`Members.duties`), and RQ's own locks choose the one that schedules.
"""

from collections.abc import Callable, Container, Mapping
from typing import Final

from redis import Redis
from rq.group import Group
from rq.rate_limit import RateLimitRegistry
from rq.registry import FailedJobRegistry, FinishedJobRegistry, ReadyJobRegistry
from rq.serializers import JSONSerializer

from stoker_worker.periodic import Periodic
from stoker_worker.queue.deferred import DeferredJobs
from stoker_worker.queue.follow_up import FollowUp
from stoker_worker.queue.homes import Homes
from stoker_worker.queue.json_job import JsonJob
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.lost_jobs import LostJobs
from stoker_worker.queue.members import Members
from stoker_worker.queue.scheduler import Scheduler

_GROUPS_EVERY_S: Final = 600  # as RQ's own workers


class Housekeeping:
    """RQ's scheduler, the searches that complete recovery, and RQ's cleaning, for the queues of one worker."""

    def __init__(
        self,
        connection: Redis,
        lease: Lease,
        members: Members,
        follow_up: FollowUp,
        *,
        homes: Homes,
        take_removed: Callable[[], Mapping[str, int]],
        name: str,
    ) -> None:
        """
        Args:
            take_removed: as in `OwnStore`.
            name: the worker's name, under which the scheduler's locks are held.
        """
        self._connection = connection
        self._members = members
        self._homes = homes
        self._take_removed = take_removed
        self.scheduler = Scheduler(connection, lease, members, name=name)
        self._lost = LostJobs(connection, members.duties, lease)
        self._deferred = DeferredJobs(connection, members.duties, follow_up)
        self._search = Periodic(1.0)
        self._clean = Periodic(60.0)

    def step(self, in_flight: Container[str], agents: Container[str] | None) -> bool:
        """Do what is due.

        Args:
            in_flight: ids of the jobs this worker runs.
            agents: of which it has jobs in flight; ``None``: that is not certain just now.

        Returns:
            whether more scheduled jobs are due already, so that the next step should come soon.
        """
        more_due = self.scheduler.enqueue_due()
        if agents is not None:  # which are known before the store is asked: what ends meanwhile is in the store again
            self._homes.forget({name: last for name, last in self._take_removed().items() if name not in agents})
        if self._search.is_due():
            self._lost.step(in_flight)
            self._deferred.step()
        if self._clean.is_due():
            for name in self._members.duties():
                for registry in (FinishedJobRegistry, FailedJobRegistry, ReadyJobRegistry):
                    registry(name, connection=self._connection, job_class=JsonJob, serializer=JSONSerializer).cleanup()
            for limit in RateLimitRegistry.all(self._connection):
                limit.cleanup()
            if Group.acquire_maintenance_lock(self._connection, _GROUPS_EVERY_S):
                Group.clean_registries(self._connection)
        return more_due

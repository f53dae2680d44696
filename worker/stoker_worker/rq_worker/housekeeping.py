"""What has to be seen to by the clock: jobs that are due, jobs that got lost, entries that have expired. Inbox thread.

Owns when each of them is looked at. A step is short, because the inbox watches running jobs on the same thread. What is
behind it is scheduler.py, audit.py, deferred.py and RQ's own cleaning of its registries.
"""

from collections.abc import Container

from redis import Redis
from rq.group import Group
from rq.rate_limit import RateLimitRegistry
from rq.registry import FailedJobRegistry, FinishedJobRegistry, ReadyJobRegistry
from rq.serializers import JSONSerializer

from stoker_worker.every import Every
from stoker_worker.rq_worker.aftermath import Aftermath
from stoker_worker.rq_worker.audit import Audit
from stoker_worker.rq_worker.deferred import DeferredJobs
from stoker_worker.rq_worker.json_job import JsonJob
from stoker_worker.rq_worker.lease import Lease
from stoker_worker.rq_worker.scheduler import Scheduler

_GROUPS_EVERY_S = 600  # as RQ's own workers


class Housekeeping:
    """RQ's scheduler, the audit and RQ's cleaning, for the queues of one worker."""

    def __init__(self, connection: Redis, queues: list[str], lease: Lease, aftermath: Aftermath, *, name: str) -> None:
        """
        Args:
            name: the worker's own; the scheduler's locks are held under it.
        """
        self._connection = connection
        self._queues = queues
        self.scheduler = Scheduler(connection, queues, lease, name=name)
        self._audit = Audit(connection, queues, lease)
        self._deferred = DeferredJobs(connection, queues, aftermath)
        self._look_for_lost = Every(1.0)
        self._clean = Every(60.0)

    def step(self, in_flight: Container[str]) -> bool:
        """
        Args:
            in_flight: ids of the jobs this worker runs.

        Returns:
            whether more jobs are due already, so that the next step should come soon.
        """
        more_due = self.scheduler.enqueue_due()
        if self._look_for_lost.is_due():
            self._audit.step(in_flight)
            self._deferred.step()
        if self._clean.is_due():
            for name in self._queues:
                for registry in (FinishedJobRegistry, FailedJobRegistry, ReadyJobRegistry):
                    registry(name, connection=self._connection, job_class=JsonJob, serializer=JSONSerializer).cleanup()
            for limit in RateLimitRegistry.all(self._connection):
                limit.cleanup()
            if Group.acquire_maintenance_lock(self._connection, _GROUPS_EVERY_S):
                Group.clean_registries(self._connection)
        return more_due

"""What is done about once a second beside claiming: due jobs, lost jobs, expired ones. Inbox thread.

Owns when which of it is due. What is behind it is scheduler.py, audit.py, deferred.py and RQ's own cleaning of its
registries.
"""

from collections.abc import Container
from typing import Final

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

_CLEAN_EVERY_S: Final = 60.0
_GROUPS_EVERY_S: Final = 600  # as RQ's own workers


class Housekeeping:
    """One small step at a time, for the queues of one worker."""

    def __init__(
        self, connection: Redis, queues: list[str], lease: Lease, aftermath: Aftermath, *, worker_name: str
    ) -> None:
        self._connection = connection
        self._queues = queues
        self._scheduler = Scheduler(connection, queues, lease, name=worker_name)
        self._audit = Audit(connection, queues, lease)
        self._deferred = DeferredJobs(connection, queues, aftermath)
        self._clean = Every(_CLEAN_EVERY_S)

    def step(self, in_flight: Container[str]) -> None:
        """
        Args:
            in_flight: ids of the jobs this worker runs.
        """
        self._scheduler.enqueue_due()
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

    def sign_off(self) -> None:
        self._scheduler.sign_off()

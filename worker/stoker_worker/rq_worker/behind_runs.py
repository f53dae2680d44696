"""Ids that came up in a queue while this worker still runs their job. Inbox thread.

Owns which agents wait for such a run to be over: a worker knows its jobs by their ids, so that the second delivery of
one cannot start before the first has left.
"""

from collections.abc import Mapping
from typing import cast

from redis import Redis
from rq.job import Job

from stoker_worker.ports import ClaimedJob
from stoker_worker.rq_worker.json_job import agent_in
from stoker_worker.rq_worker.ownership import Ownership
from stoker_worker.rq_worker.requeue import InFlight, Requeue
from stoker_worker.rq_worker.starter import JobStarter


class BehindRuns:
    """The agents whose next job has the id of one that runs."""

    def __init__(
        self,
        connection: Redis,
        ownership: Ownership,
        requeue: Requeue,
        starter: JobStarter,
        in_flight: Mapping[str, object],
    ) -> None:
        """
        Args:
            in_flight: what this worker runs now, by job id.
        """
        self._connection = connection
        self._ownership = ownership
        self._requeue = requeue
        self._starter = starter
        self._in_flight = in_flight
        self._agent_of: dict[str, str] = {}

    def agents(self) -> frozenset[str]:
        self._agent_of = {job_id: agent for job_id, agent in self._agent_of.items() if job_id in self._in_flight}
        return frozenset(self._agent_of.values())

    def put(self, queue_name: str, running: ClaimedJob) -> None:
        """The id of `running` was claimed once more."""
        job_id = running.job_id
        if self._ownership.of(running.handle) == "ours":  # the same delivery
            self._starter.drop_id(queue_name, job_id)
            return
        # Another one: it keeps its place, and so its agent's order.
        self._requeue(InFlight(job_id, queue_name, None), counts_as_attempt=False)
        agent_id = agent_in(cast(bytes | None, self._connection.hget(Job.key_for(job_id), "data")))
        if agent_id is not None:
            self._agent_of[job_id] = agent_id

"""Ids that came up in a queue while this worker still runs their job. Inbox thread.

Owns which of them wait for such a run to be over: a worker tells its jobs apart by id, so the second delivery of one
cannot start before the first has left.
"""

from collections.abc import Mapping

from stoker_worker.ports import ClaimedJob
from stoker_worker.rq_worker.ownership import Ownership
from stoker_worker.rq_worker.requeue import InFlight, Requeue
from stoker_worker.rq_worker.starter import JobStarter


class BehindRuns:
    """Jobs whose id is that of one that runs."""

    def __init__(
        self, ownership: Ownership, requeue: Requeue, starter: JobStarter, in_flight: Mapping[str, object]
    ) -> None:
        """
        Args:
            in_flight: what this worker runs now, by job id.
        """
        self._ownership = ownership
        self._requeue = requeue
        self._starter = starter
        self._in_flight = in_flight
        self._job_ids: set[str] = set()

    def job_ids(self) -> frozenset[str]:
        """They keep their places, and what their agents have behind them waits too."""
        self._job_ids.intersection_update(self._in_flight)
        return frozenset(self._job_ids)

    def put(self, queue_name: str, running: ClaimedJob) -> None:
        """The id of `running` was claimed once more."""
        if self._ownership.of(running.handle) == "ours":  # the same delivery
            self._starter.drop_id(queue_name, running.job_id)
            return
        self._requeue(InFlight(running.job_id, queue_name, None), counts_as_attempt=False)
        self._job_ids.add(running.job_id)

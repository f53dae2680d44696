"""Finds deferred jobs whose dependencies have all ended, and sets them free. Fetcher thread.

Owns the ids that it has not looked at yet. A worker that ends a job sets free the jobs that wait for it. If one of RQ's
own workers dies in between, or loses a reply, the jobs that wait for a failed job stay deferred: RQ's cleaning knows
only of jobs that a success has made ready. They are looked for when the worker starts, and then rarely.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, cast

from redis import Redis
from rq.job import Job, JobStatus
from rq.registry import DeferredJobRegistry

from stoker_shared.job_data import read_json
from stoker_worker.queue.follow_up import FollowUp
from stoker_worker.queue.json_job import ask_fields, is_rqs
from stoker_worker.queue.transient_errors import may_pass

log = logging.getLogger(__name__)

_EVERY_S: Final = 300.0
"""From the beginning of one round to the next."""
_PAGE: Final = 100
_FIELDS: Final = ("status", "allow_dependency_failures", "dependency_ids")
_MOST_BYTES: Final = 2**20  # of one job
_DEFERRED: Final = JobStatus.DEFERRED.value.encode()
_FINISHED: Final = JobStatus.FINISHED.value.encode()
_FAILED: Final = JobStatus.FAILED.value.encode()


class DeferredJobs:
    """Looks through the deferred jobs of some queues, in small steps."""

    def __init__(self, connection: Redis, queues: Callable[[], list[str]], follow_up: FollowUp) -> None:
        """
        Args:
            queues: those to look through now; asked when a round begins.
        """
        self._connection = connection
        self._queues = queues
        self._follow_up = follow_up
        self._next_round_at = float("-inf")
        self._left: list[bytes] = []
        self._in_vain: set[str] = set()

    def step(self) -> None:
        """Look at the next page, if a round is under way or due.

        Raises:
            RedisError: the server is away; the next step looks at the same page.
        """
        if not self._left and time.monotonic() >= self._next_round_at:
            keys = [DeferredJobRegistry(name, connection=self._connection).key for name in self._queues()]
            self._left = [job_id for key in keys for job_id in cast(list[bytes], self._connection.zrange(key, 0, -1))]
            self._in_vain &= {job_id.decode(errors="replace") for job_id in self._left}
            self._next_round_at = time.monotonic() + _EVERY_S
        if self._left:
            self._look_at(self._left[:_PAGE])
            del self._left[:_PAGE]

    def _look_at(self, page: Sequence[bytes]) -> None:
        waiting = self._read(page)
        parents = sorted({parent for _, wanted, _ in waiting for parent in wanted})
        status_of = dict(zip(parents, self._statuses(parents), strict=True))
        for job_id, wanted, allows_failure in waiting:
            over = (_FINISHED, _FAILED) if allows_failure else (_FINISHED,)
            # RQ also leaves a job whose dependency was deleted: nobody knows how that would have ended.
            if wanted and job_id not in self._in_vain and all(status_of[parent] in over for parent in wanted):
                self._set_free(job_id, wanted)

    def _set_free(self, job_id: str, parents: list[str]) -> None:
        log.warning("job %s waits for jobs that have ended; it is enqueued", job_id)
        for parent in parents:
            try:
                self._follow_up.set_free(parent, [job_id])
            except Exception as error:  # RQ reads all jobs that wait for the parent, and cannot read one of them
                if may_pass(error):
                    raise
                self._in_vain.add(job_id)
                log.exception("not all jobs that wait for job %s could be enqueued", parent)

    def _read(self, page: Sequence[bytes]) -> list[tuple[str, list[str], bool]]:
        """For each job its id, the ids of its dependencies, and whether these may fail."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for job_id in page:
                ask_fields(pipeline, Job.key_for(job_id.decode(errors="replace")), _FIELDS, _MOST_BYTES)
            replies = pipeline.execute(raise_on_error=False)
        found = []
        for job_id, reply in zip(page, replies, strict=True):
            if isinstance(reply, list) and reply[0] != _DEFERRED:  # the id was used again, and RQ left the old entry
                continue
            try:
                parents = read_json(reply[2])
                if all(map(is_rqs, parents)):
                    found.append((job_id.decode(), parents, reply[1] == b"1"))
            except (TypeError, ValueError, RecursionError):  # gone, no hash, or written by somebody else
                continue
        return found

    def _statuses(self, job_ids: Sequence[str]) -> list[bytes | None]:
        with self._connection.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hget(Job.key_for(job_id), "status")
            return [None if isinstance(reply, Exception) else reply for reply in pipeline.execute(raise_on_error=False)]

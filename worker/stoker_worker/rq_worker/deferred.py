"""Finds deferred jobs whose dependencies have all ended, and sets them free. Inbox thread.

Owns where it has come to in the registries of deferred jobs. A worker that ends a job sets free those that wait for it;
one of RQ's own that dies in between, or loses a reply, leaves those of a failed job deferred for ever: RQ's cleaning
knows only of those that a success has made ready.
"""

import json
import logging
from collections.abc import Sequence
from typing import Final, cast

from redis import Redis
from rq.job import Job, JobStatus
from rq.registry import DeferredJobRegistry

from stoker_worker.outage import may_pass
from stoker_worker.rq_worker.aftermath import Aftermath

log = logging.getLogger(__name__)

_PAGE: Final = 100
_DEFERRED: Final = JobStatus.DEFERRED.value.encode()
_FINISHED: Final = JobStatus.FINISHED.value.encode()
_FAILED: Final = JobStatus.FAILED.value.encode()


class DeferredJobs:
    """Rounds over the deferred jobs of some queues, in small steps."""

    def __init__(self, connection: Redis, queues: list[str], aftermath: Aftermath) -> None:
        self._connection = connection
        self._keys = [DeferredJobRegistry(name, connection=connection).key for name in queues]
        self._aftermath = aftermath
        self._registry, self._start = 0, 0
        self._in_vain: set[str] = set()
        self._named: set[str] = set()

    def step(self) -> None:
        """Look at the next page."""
        key = self._keys[self._registry]
        page = cast(list[bytes], self._connection.zrange(key, self._start, self._start + _PAGE - 1))
        self._start += len(page)
        if len(page) < _PAGE:
            self._registry, self._start = (self._registry + 1) % len(self._keys), 0
        waiting = self._read(page)
        parents = sorted({parent for _, wanted, _ in waiting for parent in wanted})
        status_of = dict(zip(parents, self._statuses(parents), strict=True))
        for job_id, wanted, allows_failure in waiting:
            over = (_FINISHED, _FAILED) if allows_failure else (_FINISHED,)
            # One whose dependency was deleted is left, as by RQ: nobody knows how that one would have ended.
            if wanted and job_id not in self._in_vain and all(status_of[parent] in over for parent in wanted):
                self._set_free(job_id, wanted)

    def _set_free(self, job_id: str, parents: list[str]) -> None:
        if job_id not in self._named:  # what cannot be read stays, and comes up again each round
            self._named.add(job_id)
            log.warning("job %s waits for jobs that have ended; it is enqueued", job_id)
        for parent in parents:
            try:
                self._aftermath.set_free(parent, [job_id])
            except Exception as error:  # RQ reads all that wait for the one, and one of them cannot be read
                if may_pass(error):
                    raise
                self._in_vain.add(job_id)
                log.exception("not all that wait for job %s could be enqueued", parent)

    def _read(self, page: Sequence[bytes]) -> list[tuple[str, list[str], bool]]:
        """Id, ids of its dependencies, and whether these may fail."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for job_id in page:
                pipeline.hmget(
                    Job.key_for(job_id.decode(errors="replace")),
                    "dependency_ids",
                    "allow_dependency_failures",
                    "status",
                )
            replies = pipeline.execute(raise_on_error=False)
        found = []
        for job_id, reply in zip(page, replies, strict=True):
            if isinstance(reply, list) and reply[2] != _DEFERRED:  # its id was used again, and RQ left the old entry
                continue
            try:
                found.append((job_id.decode(), [str(parent) for parent in json.loads(reply[0])], reply[1] == b"1"))
            except (TypeError, ValueError):  # gone, no hash, or written by somebody else
                continue
        return found

    def _statuses(self, job_ids: Sequence[str]) -> list[bytes | None]:
        with self._connection.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hget(Job.key_for(job_id), "status")
            return [None if isinstance(reply, Exception) else reply for reply in pipeline.execute(raise_on_error=False)]

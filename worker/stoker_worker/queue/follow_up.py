"""The follow-ups of a job's end: enqueue the jobs that waited for it, pass on its place under a rate limit.

Owns the notes that are in Redis until that is done (`EndedNote`). Every step may be done twice, so a thread that
cannot tell whether a step was done does it again: the thread that ended the job, or the fetcher thread after a crash.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from typing import cast

from redis import Redis
from redis.exceptions import RedisError
from rq.exceptions import InvalidJobOperation
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.rate_limit import RateLimitRegistry
from rq.registry import ReadyJobRegistry
from rq.serializers import JSONSerializer

from stoker_shared.wire import ENDED_KEY
from stoker_worker.queue.json_job import JsonJob
from stoker_worker.queue.ownership import EndedNote
from stoker_worker.queue.transient_errors import may_pass

log = logging.getLogger(__name__)

_TRIES = 50  # each fails when any thread makes another job of the queue ready, or enqueues it, just then
_READY = JobStatus.READY_TO_ENQUEUE.value.encode()
_OVER = (JobStatus.FAILED.value.encode(), JobStatus.FINISHED.value.encode())


class FollowUp:
    """Carries out the follow-ups of ends that were written."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    def carry_out(self, queue_name: str, member: str, note: EndedNote) -> None:
        """
        Args:
            member: ``<job id>:<execution id>``.

        Raises:
            RedisError: Redis is away, and not all is done; the note is still there.
        """
        job_id = member.rpartition(":")[0]
        steps: tuple[tuple[str, Callable[[], None]], ...] = (
            ("not all that wait for job %s could be enqueued", lambda: self._set_dependents_free(job_id, note)),
            ("the place of job %s under its rate limit was not passed on", lambda: self._pass_place_on(job_id, note)),
        )
        for failed, step in steps:
            try:
                step()
            except Exception as error:
                if may_pass(error):
                    raise
                log.exception(failed, job_id)  # it would be refused for ever, and nothing would be claimed any more
        with suppress(RedisError):  # if the note stays, all is done once more, to no effect
            self._connection.hdel(ENDED_KEY.format(queue=queue_name), member)

    def _set_dependents_free(self, job_id: str, note: EndedNote) -> None:
        if note.end == "failed" and note.dependents:
            self.set_free(job_id, note.dependents)
        else:
            self._enqueue(note.dependents)

    def _pass_place_on(self, job_id: str, note: EndedNote) -> None:
        """Unless the id holds a place again, because it was enqueued anew."""
        if note.rate_limit:
            RateLimitRegistry(note.rate_limit, self._connection).release_stale_and_enqueue(job_id)

    def catch_up(self, queues: Iterable[str], leave: Set[str], others: Set[str]) -> None:
        """Carry out what a dead worker left, or this one.

        Args:
            leave: ids of executions in flight: the threads that end them do what follows.
            others: living members, which carry out what follows their own ends.
        """
        for queue_name in queues:
            key = ENDED_KEY.format(queue=queue_name)
            for member, text in cast(dict[bytes, bytes], self._connection.hgetall(key)).items():
                job_id, _, execution_id = member.decode(errors="replace").rpartition(":")
                if execution_id in leave:
                    continue
                try:
                    note = EndedNote.from_json(text.decode())
                except (ValueError, TypeError):
                    log.error("the note of the end of job %s cannot be read", job_id)
                    self._connection.hdel(key, member)
                    continue
                if note.member in others:
                    continue
                log.warning("job %s has ended; carrying out what follows", job_id)
                self.carry_out(queue_name, member.decode(), note)

    def set_free(self, job_id: str, dependents: list[str]) -> None:
        """Enqueue those of a job's dependents that may run now that it is over."""
        # For RQ, a job with any status but failed, stopped or canceled has succeeded.
        if self._connection.hget(Job.key_for(job_id), "status") in _OVER:
            queue = Queue(connection=self._connection, job_class=JsonJob, serializer=JSONSerializer)
            with suppress(InvalidJobOperation):  # it was deleted just now
                queue.move_dependents_to_ready(JsonJob(job_id, connection=self._connection))
        self._enqueue(dependents)

    def _enqueue(self, job_ids: list[str]) -> None:
        """RQ's own step skips a job after a conflict or a lost reply, and leaves it to a later cleaning."""
        for _ in range(_TRIES):
            ready = self._ready(job_ids)
            if not ready:
                return
            for origin, ids in ready.items():
                ReadyJobRegistry(
                    origin, connection=self._connection, job_class=JsonJob, serializer=JSONSerializer
                ).enqueue_jobs(ids)

    def _ready(self, job_ids: list[str]) -> dict[str, list[str]]:
        """Which of the jobs may be enqueued, by queue."""
        if not job_ids:
            return {}
        with self._connection.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hmget(Job.key_for(job_id), "status", "origin")
            replies = pipeline.execute(raise_on_error=False)
        ready = defaultdict(list)
        for job_id, reply in zip(job_ids, replies, strict=True):
            if not isinstance(reply, Exception) and reply[0] == _READY and reply[1]:
                ready[reply[1].decode()].append(job_id)
        return ready

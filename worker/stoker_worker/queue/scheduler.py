"""RQ's scheduler without a process of its own: enqueues scheduled jobs when they are due. Fetcher thread.

Owns RQ's scheduler locks on our queues. While another worker or a stock scheduler holds a lock, that one enqueues the
queue's jobs. RQ's own scheduler reads which jobs are due, and later enqueues them whatever happened in between: if it
sleeps there, it enqueues jobs twice, or jobs that were canceled. Here a job leaves the registry and enters its queue in
one step.
"""

import os
import time
from contextlib import suppress
from typing import Final, cast

from redis import Redis
from redis.exceptions import RedisError, WatchError
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.queue import Queue
from rq.registry import ScheduledJobRegistry
from rq.scheduler import RQScheduler
from rq.scripts import acquire_or_refresh_lock, release_lock
from rq.serializers import JSONSerializer
from rq.utils import current_timestamp, now, utcformat

from stoker_worker.periodic import Periodic
from stoker_worker.queue.client import lua
from stoker_worker.queue.json_job import JsonJob
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.members import Members
from stoker_worker.queue.registration import NAME_PREFIX

_LOCK_S: Final = 61  # as RQ's own
_AT_ONCE: Final = 200
_STEP_S: Final = 0.02  # then the thread's other work has its turn


class Scheduler:
    """Does what `rq worker --with-scheduler` does in a forked process, for the queues of one worker."""

    def __init__(self, connection: Redis, lease: Lease, members: Members) -> None:
        self._connection = connection
        self._queues = queues = list(lease.queues)
        self._lease = lease
        self._members = members
        self._name = lease.worker_name  # under which the locks are held
        self._shown = RQScheduler(queues, connection, serializer=JSONSerializer, name=self._name)
        self._show = Periodic(_LOCK_S / 3)
        self._enqueue = connection.register_script(lua("enqueue_due"))

    def enqueue_due(self) -> bool:
        """Enqueue due jobs, the oldest first, for a moment; returns whether more are due."""
        held = [queue for queue in self._queues if self._holds_lock(queue)]
        if held and self._show.is_due():
            self._shown.pid, self._shown.last_heartbeat = os.getpid(), now()
            with self._connection.pipeline() as pipeline:
                self._shown.save(pipeline)
                pipeline.execute()
        until = time.monotonic() + _STEP_S
        return any([self._enqueue_due_of(queue, until) for queue in held])  # a list: every queue has its turn

    def sign_off(self) -> None:
        """Release the locks for the next scheduler."""
        for queue in self._queues:
            release_lock(self._connection, RQScheduler.get_locking_key(queue), self._name)
        self._connection.delete(self._shown.key)

    def _holds_lock(self, queue: str) -> bool:
        key = RQScheduler.get_locking_key(queue)
        if acquire_or_refresh_lock(self._connection, key, self._name, _LOCK_S) != "taken":
            return True
        holder = (cast(bytes | None, self._connection.get(key)) or b"").decode(errors="replace")
        if holder.startswith(NAME_PREFIX) and not self._members.is_alive(holder) and self._lease.is_ours():
            # A stoker worker that is no member any more is dead or deposed: do not wait until its lock expires.
            release_lock(self._connection, key, holder)
            return acquire_or_refresh_lock(self._connection, key, self._name, _LOCK_S) != "taken"
        return False

    def _enqueue_due_of(self, queue: str, until: float) -> bool:
        """Enqueue jobs until a time on the monotonic clock, but one batch at least; returns whether more are due."""
        scheduled = ScheduledJobRegistry(queue, connection=self._connection)
        while True:
            due = self._due(scheduled)
            plain = [job_id for job_id, is_limited in due if not is_limited]
            taken = self._enqueue_plain(queue, scheduled, plain) if plain else 0
            for job_id, is_limited in due:
                if is_limited and (taken == 0 or time.monotonic() < until):
                    taken += self._enqueue_limited(queue, scheduled, job_id)
            # Jobs that could not be taken now are looked at again in a second.
            if taken == 0 or (taken == len(due) < _AT_ONCE):
                return False
            if time.monotonic() > until:
                return True

    def _due(self, scheduled: ScheduledJobRegistry) -> list[tuple[bytes, bool]]:
        """The ids of the next due jobs, and whether each has a rate limit."""
        due = cast(
            list[bytes], self._connection.zrangebyscore(scheduled.key, 0, current_timestamp(), start=0, num=_AT_ONCE)
        )
        if not due:
            return []
        prefix = Job.key_for("").encode()
        with self._connection.pipeline(transaction=False) as pipeline:
            for job_id in due:
                pipeline.hget(prefix + job_id, "rate_limit_key")
            limits = pipeline.execute(raise_on_error=False)
        return [(job_id, isinstance(key, bytes) and key != b"") for job_id, key in zip(due, limits, strict=True)]

    def _enqueue_plain(self, queue: str, scheduled: ScheduledJobRegistry, job_ids: list[bytes]) -> int:
        """Enqueue jobs without a rate limit; returns how many left the registry."""
        prefix = Job.key_for("").encode()
        keys: list[str | bytes] = [scheduled.key, Queue(queue, connection=self._connection).key, *self._guards(queue)]
        args: list[str | bytes] = [self._lease.value, self._name, queue, utcformat(now())]
        taken: int = self._enqueue(keys=[*keys, *(prefix + job_id for job_id in job_ids)], args=[*args, *job_ids])
        return taken

    def _guards(self, queue: str) -> list[str]:
        return [self._lease.keys[0], RQScheduler.get_locking_key(queue)]

    def _enqueue_limited(self, queue: str, scheduled: ScheduledJobRegistry, job_id: bytes) -> int:
        """Put a job with a rate limit where RQ makes it wait for its slot; returns how many left the registry."""
        try:
            job = JsonJob.fetch(job_id.decode(), connection=self._connection)
        except RedisError:
            raise
        except NoSuchJobError:
            return 0
        except UnicodeDecodeError:  # the claim will refuse the job with the reason, and one with a malformed hash
            return self._enqueue_plain(queue, scheduled, [job_id])
        if job.rate_limit_key is None:
            return self._enqueue_plain(queue, scheduled, [job_id])
        with self._connection.pipeline() as pipeline:
            pipeline.watch(job.key, *self._guards(queue))  # type: ignore[no-untyped-call]
            lease, lock = (cast(bytes | None, pipeline.get(key)) for key in self._guards(queue))
            waits = pipeline.zscore(scheduled.key, job.id) is not None
            if not waits or (lease, lock) != (self._lease.value.encode(), self._name.encode()):
                return 0
            pipeline.multi()
            scheduled.remove(job.id, pipeline=pipeline)
            rq_queue = Queue(queue, connection=self._connection, job_class=JsonJob, serializer=JSONSerializer)
            rq_queue._enqueue_rate_limited_job(job, pipeline=pipeline, at_front=job.should_enqueue_at_front())
            with suppress(WatchError):  # it was canceled or deleted just now
                pipeline.execute()
                return 1
        return 0

"""Looks after what is due by the clock: scheduled jobs, lost and deferred jobs, expired entries. Fetcher thread.

Owns when each is looked at. Each step is short, because the same thread watches the running jobs. Of several workers on
a queue one does it (`Members.duties`), and RQ's own locks choose the one that schedules.
"""

import logging
import os
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar, cast

from redis import Redis
from redis.exceptions import RedisError, WatchError
from rq.exceptions import NoSuchJobError
from rq.group import Group
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.rate_limit import RateLimitRegistry
from rq.registry import (
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ReadyJobRegistry,
    ScheduledJobRegistry,
)
from rq.scheduler import RQScheduler
from rq.scripts import acquire_or_refresh_lock, release_lock
from rq.serializers import JSONSerializer
from rq.utils import current_timestamp, now, utcformat

from stoker_shared.job_data import read_json
from stoker_worker.periodic import Periodic
from stoker_worker.placement.placement import Placement
from stoker_worker.queue.client import lua, may_pass
from stoker_worker.queue.end import FollowUp
from stoker_worker.queue.json_job import JsonJob, ask_fields, is_rqs
from stoker_worker.queue.lease import Lease, Members
from stoker_worker.queue.recover import LostJobs
from stoker_worker.queue.registration import NAME_PREFIX

log = logging.getLogger(__name__)

T = TypeVar("T")
_LOCK_S: Final = 61  # as RQ's own
_AT_ONCE: Final = 200
_STEP_S: Final = 0.02  # then the thread's other work has its turn
_CANCELED_PAGE: Final = 500
_GROUPS_EVERY_S: Final = 600  # as RQ's own workers
_SAYS_FAILED_S: Final = 600.0
_DEFERRED_EVERY_S: Final = 300.0
"""From the beginning of one round to the next."""

_DEFERRED_PAGE: Final = 100
_DEFERRED_FIELDS: Final = ("status", "allow_dependency_failures", "dependency_ids")
_MOST_BYTES: Final = 2**20  # of one job
_DEFERRED: Final = JobStatus.DEFERRED.value.encode()
_FINISHED: Final = JobStatus.FINISHED.value.encode()
_FAILED: Final = JobStatus.FAILED.value.encode()


class Scheduler:
    """Does what `rq worker --with-scheduler` does in a forked process, for the queues of one worker.

    Owns RQ's scheduler locks on our queues. While another worker or a stock scheduler holds a lock, that one enqueues
    the queue's jobs. RQ's own scheduler reads which jobs are due, and later enqueues them whatever happened in between:
    if it sleeps there, it enqueues jobs twice, or jobs that were canceled. Here a job leaves the registry and enters
    its queue in one step.
    """

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


class DeferredJobs:
    """Finds deferred jobs whose dependencies have all ended, and sets them free, in small steps.

    A worker that ends a job sets free the jobs that wait for it. If one of RQ's own workers dies in between, or loses a
    reply, the jobs that wait for a failed job stay deferred: RQ's cleaning knows only of jobs that a success has made
    ready. They are looked for when the worker starts, and then rarely.
    """

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
            self._next_round_at = time.monotonic() + _DEFERRED_EVERY_S
        if self._left:
            self._look_at(self._left[:_DEFERRED_PAGE])
            del self._left[:_DEFERRED_PAGE]

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
                ask_fields(pipeline, Job.key_for(job_id.decode(errors="replace")), _DEFERRED_FIELDS, _MOST_BYTES)
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


class Housekeeping:
    """RQ's scheduler, the searches that complete recovery, and RQ's cleaning, for the queues of one worker."""

    def __init__(
        self,
        connection: Redis,
        lease: Lease,
        members: Members,
        placement: Placement,
    ) -> None:
        self._connection = connection
        self._members = members
        self._placement = placement
        self.scheduler = Scheduler(connection, lease, members)
        self._lost = LostJobs(connection, members.duties, lease)
        self._deferred = DeferredJobs(connection, members.duties, FollowUp(connection))
        self._remove_canceled = connection.register_script(lua("forget_canceled"))
        self._canceled_at: dict[str, int] = {}
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
            for search in (partial(self._lost.step, in_flight), self._deferred.step):
                self._unharmed(search)
        if self._sweep.is_due():
            for name in self._members.duties():
                self._unharmed(partial(self._placement.sweep, name))
                self._unharmed(partial(self._forget_canceled, name))
        if self._clean.is_due():
            for name in self._members.duties():
                for registry in (FinishedJobRegistry, FailedJobRegistry, ReadyJobRegistry):
                    of_queue = registry(name, connection=self._connection, job_class=JsonJob, serializer=JSONSerializer)
                    self._unharmed(of_queue.cleanup)
            self._unharmed(self._clean_limits_and_groups)
        return more_due

    def _forget_canceled(self, queue: str) -> None:
        """Remove the ids of canceled jobs whose hashes are gone, a page at a time. RQ keeps canceled jobs for ever. A
        job that `stoker` cancels expires, and its id would stay."""
        key, first = CanceledJobRegistry(queue, connection=self._connection).key, self._canceled_at.get(queue, 0)
        args: list[str | int] = [first, first + _CANCELED_PAGE - 1, Job.key_for("")]
        n_found, n_gone = self._remove_canceled(keys=[key], args=args)
        self._canceled_at[queue] = 0 if n_found < _CANCELED_PAGE else first + n_found - n_gone

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

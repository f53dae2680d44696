"""Recovers jobs that are in no list though they are queued or started by their hash. Fetcher thread.

Owns what it has seen so far. Such a job is left by a stock worker that died just after it popped an id, by a tool of an
old RQ that removed a started job's entry, or by somebody in `redis-cli`. They are looked for when the worker starts
and then rarely, one page per step: the ids in the queues first, then the job hashes. An enqueue or a claim of a job
that is in no queue may be under way, so it is looked at again a minute later. A script puts it back if it has not
changed by then, and is in no list and no registry, and no member has claimed or started it.
"""

import logging
import re
import time
from collections.abc import Callable, Container, Iterator
from typing import Final, cast

from redis import Redis
from rq.executions import Execution, ExecutionRegistry
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.queue import Queue
from rq.registry import DeferredJobRegistry, ReadyJobRegistry, ScheduledJobRegistry, StartedJobRegistry
from rq.worker import BaseWorker

from stoker_shared.wire import CLAIMED_KEY, MEMBERS_KEY
from stoker_worker.queue.client import lua
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.registration import NAME_PREFIX

log = logging.getLogger(__name__)

_LIST_PAGE: Final = 5000
_PAGE: Final = 300
_MAX_PUT_BACK: Final = 20  # in one step: for each the server walks the whole queue
_FIELDS: Final = ("status", "origin", "enqueued_at", "started_at", "worker_name")
_WAITS_OR_RUNS: Final = (b"queued", b"started")

Reading = tuple[bytes, ...]
"""The values of `_FIELDS`."""


class LostJobs:
    """Looks for the lost jobs of some queues, in small steps."""

    def __init__(
        self,
        connection: Redis,
        queues: Callable[[], list[str]],
        lease: Lease,
        *,
        wait_s: float = 60.0,
        every_s: float = 300.0,
    ) -> None:
        """
        Args:
            queues: those to search now; asked when a search begins.
            wait_s: time between the two looks at a job.
            every_s: time from the end of a search to the next one.
        """
        self._connection = connection
        self._queues = queues
        self._lease = lease
        self._wait_s = wait_s
        self._every_s = every_s
        self._prefix = Job.key_for("").encode()
        self._is_job_key = re.compile(re.escape(self._prefix) + rb"[A-Za-z0-9_-]+")
        self._put_back_script = connection.register_script(lua("put_back"))
        self._search = self._begin_search()

    def step(self, in_flight: Container[str]) -> int:
        """Go on by a page; returns how many jobs were put back.

        Args:
            in_flight: ids of the jobs this worker runs. They are not lost, whatever happened to their entries.
        """
        page = next(self._search, None)
        if page is None:  # the search is over, or an error broke it off
            self._search = self._begin_search()
            return 0
        return sum(self._put_back(job_id, seen) for job_id, seen in page if job_id.decode() not in in_flight)

    def _begin_search(self) -> Iterator[list[tuple[bytes, Reading]]]:
        """For each step the jobs that are due for their second look."""
        listed: set[bytes] = set()
        queues = self._queues()
        if not queues:
            return
        for name in queues:
            key, start = Queue(name, connection=self._connection).key, 0
            while ids := cast(list[bytes], self._connection.lrange(key, start, start + _LIST_PAGE - 1)):
                listed.update(ids)
                start += _LIST_PAGE
                yield []
        found: list[tuple[bytes, Reading]] = []
        for keys in self._all_job_keys():
            found += [(job_id, reading) for job_id, reading in self._read(keys, queues) if job_id not in listed]
            yield []
        yield from _pause(self._wait_s if found else 0)
        for n in range(0, len(found), _MAX_PUT_BACK):
            yield found[n : n + _MAX_PUT_BACK]
        yield from _pause(self._every_s)

    def _all_job_keys(self) -> Iterator[list[bytes]]:
        cursor = -1
        while cursor != 0:
            cursor, keys = self._connection.scan(max(0, cursor), match=self._prefix + b"*", count=_PAGE)
            yield [key for key in cast(list[bytes], keys) if self._is_job_key.fullmatch(key)]

    def _read(self, keys: list[bytes], queues: list[str]) -> Iterator[tuple[bytes, Reading]]:
        """Those of the jobs that wait or run in these queues by their hashes."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.hmget(key, _FIELDS)
            replies = pipeline.execute(raise_on_error=False)
        origins = {name.encode() for name in queues}
        for key, reply in zip(keys, replies, strict=True):
            reading = () if isinstance(reply, Exception) else tuple(value or b"" for value in reply)
            if reading and reading[0] in _WAITS_OR_RUNS and reading[1] in origins:
                yield key.removeprefix(self._prefix), reading

    def _put_back(self, job_id: bytes, reading: Reading) -> int:
        status, origin, enqueued_at, started_at, worker = reading
        name, connection = origin.decode(), self._connection
        queue_key = Queue(name, connection=connection).key
        registries = (ScheduledJobRegistry, DeferredJobRegistry, ReadyJobRegistry, StartedJobRegistry)
        # A stock worker that is alive may still run it. If another member runs it, there is its execution.
        stock = b"" if worker.startswith(NAME_PREFIX.encode()) else worker
        keys: list[str | bytes] = [
            self._lease.keys[0],
            self._prefix + job_id,
            queue_key,
            IntermediateQueue.get_intermediate_queue_key(queue_key),
            *(registry(name, connection=connection).key for registry in registries),
            BaseWorker.redis_worker_namespace_prefix.encode() + stock,
            ExecutionRegistry(job_id.decode(), connection=connection).key,
            MEMBERS_KEY,
        ]
        args: list[str | bytes] = [self._lease.value, job_id, status, enqueued_at, started_at]
        args += [Execution("", job_id.decode(), connection=connection).key, CLAIMED_KEY.format(queue=name, member="")]
        put_back: int = self._put_back_script(keys=keys, args=args)
        if put_back:
            log.warning("job %s was in no list and is back in queue %s", job_id.decode(), name)
        return put_back


def _pause(seconds: float) -> Iterator[list[tuple[bytes, Reading]]]:
    """Steps that do nothing until the time has passed; none for 0 seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield []

"""Finds jobs that stand nowhere, queued or started by their hash and in no list, and puts them back. Inbox thread.

Owns what it has seen so far. Such a job is left by a stock worker that died just after it popped an id, by a tool of an
old RQ that removed a started job's entry, by a hand in `redis-cli`. A round reads the queues and then all job hashes,
one page per step. What looks lost is looked at again a round later: nobody is in the middle of an enqueue or a claim
for that long. Then a script looks once more, at everything, and puts the job back in the same instant.
"""

import logging
import re
import time
from collections.abc import Container, Iterator
from typing import Final, cast

from redis import Redis
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.queue import Queue
from rq.registry import DeferredJobRegistry, ReadyJobRegistry, ScheduledJobRegistry, StartedJobRegistry
from rq.worker import BaseWorker

from stoker_shared.wire import LEASE_KEY
from stoker_worker.rq_worker.identity import NAME_PREFIX
from stoker_worker.rq_worker.lease import Lease

log = logging.getLogger(__name__)

_LIST_PAGE: Final = 2000
_SCAN_PAGE: Final = 300
_MAX_PUT_BACK: Final = 20  # in one step: each walks the whole queue
_FIELDS: Final = ("status", "origin", "enqueued_at", "started_at", "worker_name")
_WAITS_OR_RUNS: Final = (b"queued", b"started")

_PUT_BACK = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local job, queue, job_id = KEYS[2], KEYS[3], ARGV[2]
local now = redis.call('HMGET', job, 'status', 'enqueued_at', 'started_at')
for i = 1, 3 do if (now[i] or '') ~= ARGV[i + 2] then return 0 end end
if redis.call('LPOS', queue, job_id) or redis.call('LPOS', KEYS[4], job_id) then return 0 end
for i = 5, 7 do if redis.call('ZSCORE', KEYS[i], job_id) then return 0 end end
for _, member in ipairs(redis.call('ZRANGE', KEYS[8], 0, -1)) do
  if string.sub(member, 1, #job_id + 1) == job_id .. ':' then return 0 end
end
if now[1] == 'started' and redis.call('EXISTS', KEYS[9]) == 1 then return 0 end
redis.call('HSET', job, 'status', 'queued')
redis.call('HDEL', job, 'worker_name')
redis.call('LPUSH', queue, job_id)
return 1
"""

Reading = tuple[bytes, ...]


class Audit:
    """Rounds over the jobs of some queues, in small steps."""

    def __init__(self, connection: Redis, queues: list[str], lease: Lease, *, wait_s: float = 60.0) -> None:
        """
        Args:
            wait_s: how long a job has to have looked lost, unchanged, before it is put back.
        """
        self._connection = connection
        self._queues = queues
        self._lease = lease
        self._wait_s = wait_s
        self._prefix = Job.key_for("").encode()
        self._is_job_key = re.compile(re.escape(self._prefix) + rb"[A-Za-z0-9_-]+")
        self._put_back_script = connection.register_script(_PUT_BACK)
        self._lost: dict[bytes, tuple[Reading, float]] = {}
        self._steps = self._round()

    def step(self, in_flight: Container[str]) -> int:
        """Go on by a page; returns how many jobs were put back.

        Args:
            in_flight: ids of the jobs this worker runs, which are not lost whatever anybody did to their entries.
        """
        put_back = 0
        try:
            for job_id, reading in next(self._steps):
                if job_id.decode() not in in_flight and self._is_due(job_id, reading) and put_back < _MAX_PUT_BACK:
                    put_back += self._put_back(job_id, reading)
        except StopIteration:
            self._steps = self._round()
        return put_back

    def _round(self) -> Iterator[list[tuple[bytes, Reading]]]:
        """Pages of jobs that look lost."""
        listed: set[bytes] = set()
        for name in self._queues:
            key, start = Queue(name, connection=self._connection).key, 0
            while page := cast(list[bytes], self._connection.lrange(key, start, start + _LIST_PAGE - 1)):
                listed.update(page)
                start += _LIST_PAGE
                yield []
        found: set[bytes] = set()
        cursor = 0
        while True:
            cursor, keys = self._connection.scan(cursor, match=self._prefix + b"*", count=_SCAN_PAGE)
            page = [key for key in cast(list[bytes], keys) if self._is_job_key.fullmatch(key)]
            lost = [(job_id, reading) for job_id, reading in self._read(page) if job_id not in listed]
            found.update(job_id for job_id, _ in lost)
            yield lost
            if cursor == 0:
                break
        self._lost = {job_id: seen for job_id, seen in self._lost.items() if job_id in found}

    def _read(self, keys: list[bytes]) -> list[tuple[bytes, Reading]]:
        """The jobs of our queues that wait or run, by their hashes."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.hmget(key, _FIELDS)
            replies = pipeline.execute(raise_on_error=False)
        origins = {name.encode() for name in self._queues}
        readings = [
            (key[len(self._prefix) :], tuple(value or b"" for value in reply))
            for key, reply in zip(keys, replies, strict=True)
            if not isinstance(reply, Exception)
        ]
        return [(job_id, read) for job_id, read in readings if read[0] in _WAITS_OR_RUNS and read[1] in origins]

    def _is_due(self, job_id: bytes, reading: Reading) -> bool:
        before = self._lost.get(job_id)
        if before is None or before[0] != reading:
            self._lost[job_id] = (reading, time.monotonic())
            return False
        return time.monotonic() - before[1] >= self._wait_s

    def _put_back(self, job_id: bytes, reading: Reading) -> int:
        status, origin, enqueued_at, started_at, worker = reading
        name, connection = origin.decode(), self._connection
        queue_key = Queue(name, connection=connection).key
        registries = (ScheduledJobRegistry, DeferredJobRegistry, ReadyJobRegistry, StartedJobRegistry)
        # A stock worker that lives may still run it; another stoker worker cannot, since we hold the lease.
        stock = b"" if worker.startswith(NAME_PREFIX.encode()) else worker
        keys: list[str | bytes] = [
            LEASE_KEY.format(queue=name),
            self._prefix + job_id,
            queue_key,
            IntermediateQueue.get_intermediate_queue_key(queue_key),
            *(registry(name, connection=connection).key for registry in registries),
            BaseWorker.redis_worker_namespace_prefix.encode() + stock,
        ]
        args: list[str | bytes] = [self._lease.held_value(name), job_id, status, enqueued_at, started_at]
        put_back: int = self._put_back_script(keys=keys, args=args)
        if put_back:
            log.warning("job %s stood nowhere and is back in queue %s", job_id.decode(), name)
        return put_back

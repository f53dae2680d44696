"""Fails claimed jobs whose ids RQ cannot read, in one script and without RQ's help. Owns no state; fetcher thread.

In Redis an id may be any bytes, and RQ accepts only some. Jobs with other ids are never started: an entry `<job
id>:<execution id>` with another colon in it stops `rq info`, and RQ's `Job` accepts no such id. The reason is written
where producers look: hash, result stream, failed jobs.
"""

import logging
import re
import time
import zlib
from base64 import b64encode
from typing import Final

from redis import Redis
from rq.job import Job
from rq.registry import FailedJobRegistry
from rq.results import Result
from rq.utils import now, utcformat

from stoker_shared.errors import InvalidRequest
from stoker_shared.wire import CLAIMED_KEY, DEFAULT_FAILURE_TTL_S
from stoker_worker.queue.lease import Lease
from stoker_worker.queue.lease_scripts import HOLDS

log = logging.getLogger(__name__)

_OF_RQ: Final = re.compile(r"[A-Za-z0-9_-]+")


def is_rqs(job_id: str) -> bool:
    """Whether RQ can fetch a job of this id, and tell its executions from those of others."""
    return _OF_RQ.fullmatch(job_id) is not None


def text(job_id: bytes) -> str:
    """The id as text. Bytes that are no UTF-8 come back unchanged from `raw`."""
    return job_id.decode(errors="surrogateescape")


def raw(job_id: str) -> bytes:
    """The bytes of an id, or of a whole key that contains one."""
    return job_id.encode(errors="surrogateescape")


_WHY: Final = InvalidRequest(
    "job_id: RQ reads only ids of letters, digits, '-' and '_'; enqueue the job under such an id"
)

# Takes effect once, and for the holder of the lease only: the id is among the claimed ones until then.
_FAIL: Final = (
    HOLDS
    + """
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
local claimed, job, results, failed = KEYS[3], KEYS[4], KEYS[5], KEYS[6]
if redis.call('LREM', claimed, 1, ARGV[4]) == 0 then return 0 end
local status = redis.pcall('HGET', job, 'status') -- false, or an error, if there is no job
local is_over = status == 'finished' or status == 'failed' or status == 'stopped' or status == 'canceled'
if type(status) ~= 'string' or is_over then return 0 end
local ttl_s = math.floor(tonumber(redis.call('HGET', job, 'failure_ttl')) or -2)
if not (ttl_s >= -1 and ttl_s < 1e9) then ttl_s = tonumber(ARGV[9]) end
redis.call('HSET', job, 'status', 'failed', 'ended_at', ARGV[5], 'exc_info', ARGV[6])
redis.call('XADD', results, 'MAXLEN', '10', '*', 'type', ARGV[7], 'worker_name', '', 'exc_string', ARGV[8])
if ttl_s < 0 then
  redis.call('PERSIST', job)
  redis.call('ZADD', failed, ttl_s, ARGV[4])
else
  redis.call('EXPIRE', job, ttl_s)
  redis.call('EXPIRE', results, ttl_s)
  redis.call('ZADD', failed, tonumber(ARGV[10]) + ttl_s, ARGV[4])
end
return 1
"""
)


class ForeignIds:
    """Ends jobs whose ids RQ cannot read."""

    def __init__(self, connection: Redis, lease: Lease) -> None:
        self._connection = connection
        self._lease = lease
        self._script = connection.register_script(_FAIL)

    def fail(self, queue_name: str, job_id: str) -> None:
        """Fail a claimed job; drop the id if no job of this id waits.

        Raises:
            RedisError: the server went away; recovery finds the id among the claimed ones.
        """
        line = f"{type(_WHY).__name__}: {_WHY}"
        keys: list[str | bytes] = [
            *self._lease.keys,
            CLAIMED_KEY.format(queue=queue_name, member=self._lease.member),
            raw(Job.key_for(job_id)),
            raw(Result.get_key(job_id)),
            FailedJobRegistry(queue_name, connection=self._connection).key,
        ]
        compressed = zlib.compress(line.encode())
        args: list[str | bytes | int] = [*self._lease.args, raw(job_id), utcformat(now()), compressed]
        args += [Result.Type.FAILED.value, b64encode(compressed), DEFAULT_FAILURE_TTL_S, int(time.time())]
        if self._script(keys=keys, args=args):
            log.warning("job %r refused: %s", job_id, line)
        else:
            log.error("no job of the id %r waits; the id is dropped", job_id)

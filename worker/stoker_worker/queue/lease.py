"""One active worker per queue. Owns the lease keys and their fencing numbers; main and heartbeat thread.

Only the holder of a queue's lease may claim from the queue and end its jobs. The lease expires if the holder stops
renewing it, and is taken over at once from a holder that is certainly dead (same host and boot, process gone). Each
holder has a fencing number, higher than all before: a holder that slept until its lease ran out sees from the last
number handed out whether another worker has held the queue since.
"""

import json
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final, NamedTuple

from redis import Redis
from redis.exceptions import RedisError

from stoker_shared.errors import QueueHeld
from stoker_shared.wire import FENCE_KEY, LEASE_KEY
from stoker_worker.process_identity import ProcessIdentity

# Each script compares the stored holder with the one the caller expects, so that no step acts on an old reading. A
# worker that is refused gets no number: that would depose the holder.
_TAKE = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return {held, 0, redis.call('PTTL', KEYS[1])} end
local fence = redis.call('INCRBY', KEYS[2], 1)
local mine = '{"fence": ' .. fence .. ', ' .. string.sub(ARGV[2], 2)
redis.call('SET', KEYS[1], mine, 'PX', ARGV[3])
return {mine, fence, 0}
"""

HOLDS: Final = """
local function holds(lease, fence, mine, number, ttl_ms)
  local held = redis.call('GET', lease)
  if held then return held == mine end
  local last = redis.call('GET', fence)
  if last and last ~= number then return false end
  redis.call('SET', fence, number)
  redis.call('SET', lease, mine, 'PX', ttl_ms)
  return true
end
"""
"""Lua: whether the lease is ours. A lease that ran out while Redis was away is taken up again, unless another worker
has held the queue since: then our jobs in flight were that worker's to recover, even if it has left. (There is no
number if the server has lost its data.) Called with `Lease.keys` and `Lease.args`."""

_RENEW = (
    HOLDS
    + """
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
return 1
"""
)
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class _Held(NamedTuple):
    value: str
    fence: int


class Lease:
    """The right to work on some queues, all or none of them."""

    def __init__(self, connection: Redis, queues: list[str], *, worker_name: str, ttl_s: float) -> None:
        self._queues = queues
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._worker_name = worker_name
        self._connection = connection
        self._take = connection.register_script(_TAKE)
        self._renew = connection.register_script(_RENEW)
        self._release = connection.register_script(_RELEASE)
        self._held: dict[str, _Held] = {}

    def acquire(self) -> None:
        """Take the lease of every queue.

        Raises:
            QueueHeld: another worker, which is not certainly dead, holds one of the queues. No lease is held then.
        """
        try:
            for queue in self._queues:
                self._acquire_one(queue)
        except QueueHeld:
            self.release()
            raise

    def renew(self, connection: Redis | None = None) -> bool:
        """Postpone the expiry; ``False`` if another worker holds a queue, or has held it since: this one is deposed.

        Args:
            connection: used instead of the lease's own.
        """
        return all(self._renew_one(queue, connection) for queue in self._held)

    def release(self) -> None:
        """Give up all leases."""
        for queue, held in self._held.items():
            self._release(keys=[LEASE_KEY.format(queue=queue)], args=[held.value])
        self._held.clear()

    def release_quietly(self) -> None:
        """As `release`, but ignores errors of Redis: the leases then run out by themselves."""
        with suppress(RedisError):
            self.release()

    def is_ours(self, queue: str) -> bool:
        """Whether no other worker has taken the queue. A lease that ran out is taken up again, as in `HOLDS`."""
        return queue in self._held and self._renew_one(queue)

    def held_value(self, queue: str) -> str:
        """The value of the queue's lease key while it is ours; scripts compare it before they write."""
        return self._held[queue].value

    def keys(self, queue: str) -> list[str]:
        """The keys of the lease and of the last number: the first KEYS of a script that begins with `HOLDS`."""
        return [LEASE_KEY.format(queue=queue), FENCE_KEY.format(queue=queue)]

    def args(self, queue: str) -> list[str | int]:
        """Value, number and lifetime in milliseconds: the first ARGV of such a script."""
        return [*self._held[queue], self._ttl_ms]

    def _renew_one(self, queue: str, connection: Redis | None = None) -> bool:
        renewed: int = self._renew(keys=self.keys(queue), args=self.args(queue), client=connection)
        return renewed == 1

    def _acquire_one(self, queue: str) -> None:
        identity = asdict(ProcessIdentity.of_this_process())
        mine = json.dumps({"worker": self._worker_name, **identity}, sort_keys=True)
        believed = ""
        for _ in range(2):
            held, fence, left_ms = self._take(keys=self.keys(queue), args=[believed, mine, self._ttl_ms])
            if fence:
                self._held[queue] = _Held(held.decode(), fence)
                return
            believed = held.decode(errors="replace")
            holder = _holder(believed)
            # The holder is this worker itself if the reply to an earlier try was lost.
            if holder["worker"] != self._worker_name and not _identity(holder).is_certainly_dead():
                break
        raise QueueHeld(
            f"queue {queue!r} is held by worker {holder['worker']} on host {holder['host']}, pid {holder['pid']}; "
            f"if that worker is gone, its lease runs out in {left_ms / 1000:.1f} s"
        )


def _holder(value: str) -> dict[str, Any]:
    """The holder's description in a lease key, with placeholders for what is missing."""
    unknown = {"worker": "unknown", "host": "unknown", "boot": "", "pid": 0, "started": ""}
    try:
        found = json.loads(value)
    except ValueError:
        found = {}
    return unknown | found if isinstance(found, dict) else unknown


def _identity(holder: dict[str, Any]) -> ProcessIdentity:
    return ProcessIdentity(host=holder["host"], boot=holder["boot"], pid=holder["pid"], started=holder["started"])

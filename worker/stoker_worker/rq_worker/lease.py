"""One active worker per queue. Owns the lease keys and their fencing numbers; main and heartbeat thread.

The lease says who may claim from a queue and end its jobs. It expires by itself when its holder stops renewing it, and
is taken over at once from a holder that certainly is dead (same host and boot, process gone). Each holder has a number
of its own, higher than any before: a holder that slept, and finds that its lease ran out, sees from the last number
handed out whether anybody has held the queue since.
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

# Each script compares the stored holder with the one the caller believes in, so that no step acts on an old reading.
# A number is handed out with the lease and never to one that is refused: it would depose the holder.
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
"""Lua: whether the lease is ours. One that ran out while Redis was away is taken up again, unless somebody has held the
queue since: then what we had in flight was theirs to recover, also when they have left. (No number: the server has lost
its data.) For `Lease.keys` and `Lease.args`."""

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
    """The right to work on `queues`, all or none of them."""

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
        """
        Raises:
            QueueHeld: another worker holds one of the queues and is not certainly dead; none is held afterwards.
        """
        try:
            for queue in self._queues:
                self._acquire_one(queue)
        except QueueHeld:
            self.release()
            raise

    def renew(self, connection: Redis | None = None) -> bool:
        """Push the expiry out; ``False`` when somebody else holds a queue, or has held it since: we are deposed.

        Args:
            connection: used instead of the lease's own.
        """
        return all(self._renew_one(queue, connection) for queue in self._held)

    def release(self) -> None:
        for queue, held in self._held.items():
            self._release(keys=[LEASE_KEY.format(queue=queue)], args=[held.value])
        self._held.clear()

    def release_quietly(self) -> None:
        """As `release`, when Redis may be what is wrong: the lease then runs out by itself."""
        with suppress(RedisError):
            self.release()

    def is_ours(self, queue: str) -> bool:
        """Whether nobody else has taken the queue; one that ran out is taken up again, as in `HOLDS`."""
        return queue in self._held and self._renew_one(queue)

    def held_value(self, queue: str) -> str:
        """What stands in the queue's lease key while it is ours: scripts compare it before they write."""
        return self._held[queue].value

    def keys(self, queue: str) -> list[str]:
        """The lease and the last number handed out: first KEYS of a script that begins with `HOLDS`."""
        return [LEASE_KEY.format(queue=queue), FENCE_KEY.format(queue=queue)]

    def args(self, queue: str) -> list[str | int]:
        """Value, number, ttl_ms: its first ARGV."""
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
            # Our own, when the reply that told us so was lost.
            if holder["worker"] != self._worker_name and not _identity(holder).is_certainly_dead():
                break
        raise QueueHeld(
            f"queue {queue!r} is held by worker {holder['worker']} on host {holder['host']}, pid {holder['pid']}; "
            f"if that worker is gone, its lease runs out in {left_ms / 1000:.1f} s"
        )


def _holder(value: str) -> dict[str, Any]:
    """What a lease key says of its holder; placeholders where it says nothing."""
    unknown = {"worker": "unknown", "host": "unknown", "boot": "", "pid": 0, "started": ""}
    try:
        said = json.loads(value)
    except ValueError:
        said = {}
    return unknown | said if isinstance(said, dict) else unknown


def _identity(holder: dict[str, Any]) -> ProcessIdentity:
    return ProcessIdentity(host=holder["host"], boot=holder["boot"], pid=holder["pid"], started=holder["started"])

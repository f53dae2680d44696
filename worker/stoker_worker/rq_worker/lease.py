"""One active worker per queue. Owns the lease keys and their fencing numbers; main and heartbeat thread.

The lease says who may claim from a queue and end its jobs. It expires by itself when its holder stops renewing it, and
is taken over at once from a holder that certainly is dead (same host and boot, process gone).
"""

import json
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from stoker_shared.errors import QueueHeld
from stoker_shared.wire import FENCE_KEY, LEASE_KEY
from stoker_worker.process_identity import ProcessIdentity

# Each script compares the stored holder with the one the caller believes in, so that no step acts on an old reading.
_TAKE = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return held end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return false
"""
_RENEW = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class Lease:
    """The right to work on `queues`, all or none of them."""

    def __init__(self, connection: Redis, queues: list[str], *, worker_name: str, ttl_s: float) -> None:
        self._queues = queues
        self.ttl_ms = max(1, int(ttl_s * 1000))
        self._worker_name = worker_name
        self._connection = connection
        self._take = connection.register_script(_TAKE)
        self._renew = connection.register_script(_RENEW)
        self._release = connection.register_script(_RELEASE)
        self._held: dict[str, str] = {}

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

    def renew(self) -> bool:
        """Push the expiry out; ``False`` when somebody else holds a queue: this worker is deposed."""
        return all(self._renew_one(queue, value) for queue, value in self._held.items())

    def release(self) -> None:
        for queue, value in self._held.items():
            self._release(keys=[LEASE_KEY.format(queue=queue)], args=[value])
        self._held.clear()

    def release_quietly(self) -> None:
        """As `release`, when Redis may be what is wrong: the lease then runs out by itself."""
        with suppress(RedisError):
            self.release()

    def is_ours(self, queue: str) -> bool:
        """Whether nobody else has taken the queue. A lease that ran out while Redis was away is taken up again: only
        another holder's value deposes us."""
        value = self._held.get(queue)
        return value is not None and self._renew_one(queue, value)

    def held_value(self, queue: str) -> str:
        """What stands in the queue's lease key while it is ours: scripts compare it before they write."""
        return self._held[queue]

    def _renew_one(self, queue: str, value: str) -> bool:
        renewed: int = self._renew(keys=[LEASE_KEY.format(queue=queue)], args=[value, self.ttl_ms])
        return renewed == 1

    def _acquire_one(self, queue: str) -> None:
        fence = int(self._connection.incr(FENCE_KEY.format(queue=queue)))
        identity = asdict(ProcessIdentity.of_this_process())
        mine = json.dumps({"worker": self._worker_name, "fence": fence, **identity}, sort_keys=True)
        believed = ""
        for _ in range(2):
            held = self._take(keys=[LEASE_KEY.format(queue=queue)], args=[believed, mine, self.ttl_ms])
            if held is None:
                self._held[queue] = mine
                return
            believed = held.decode(errors="replace")
            holder = _holder(believed)
            if not _identity(holder).is_certainly_dead():
                break
        raise QueueHeld(
            f"queue {queue!r} is held by worker {holder['worker']} on host {holder['host']}, pid {holder['pid']}; "
            f"if that worker is gone, its lease runs out in {self.ttl_ms / 1000:g} s"
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

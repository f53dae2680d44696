"""The places of a job in RQ's keys, and the keys of a worker that has no other name than this machine's."""

from typing import Any

from redis import Redis

from stoker_shared.wire import FENCE_KEY, LEASE_KEY
from stoker_worker.queue.rq_queue import usual_name

MEMBER = usual_name()
LEASE = LEASE_KEY.format(member=MEMBER)
FENCE = FENCE_KEY.format(member=MEMBER)

LISTS = {"generate": "rq:queue:generate", "intermediate": "rq:queue:generate:intermediate"}
REGISTRIES = ("wip", "finished", "failed", "canceled", "scheduled", "deferred", "ready")


def places(connection: Redis, job_id: str) -> list[str]:
    """Every list and registry that contains the id."""
    lists = {name: connection.lrange(key, 0, -1) for name, key in LISTS.items()}
    sets = {name: connection.zrange(f"rq:{name}:generate", 0, -1) for name in REGISTRIES}
    entries = {name: [entry.decode().split(":")[0] for entry in found] for name, found in (lists | sets).items()}
    return [name for name, ids in entries.items() for found in ids if found == job_id]


def is_ours(job: Any) -> bool:
    """True if this run of the job is still its worker's to end."""
    return job.ends.ownership.of(job.run) == "ours"


def taken_over(connection: Redis, *, and_left: bool = False) -> None:
    """Let another worker take over this one's name, for good or for a moment."""
    connection.incr(FENCE)
    connection.set(LEASE, "another worker's")
    if and_left:
        connection.delete(LEASE)

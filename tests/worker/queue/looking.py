"""The places of a job in RQ's keys."""

from redis import Redis

from stoker_shared.wire import FENCE_KEY, LEASE_KEY

LISTS = ("generate", "generate:intermediate")
REGISTRIES = ("wip", "finished", "failed", "canceled", "scheduled", "deferred", "ready")


def places(connection: Redis, job_id: str) -> list[str]:
    """Every list and registry of RQ's that contains the id."""
    lists = {name: connection.lrange(f"rq:queue:{name}", 0, -1) for name in LISTS}
    sets = {name: connection.zrange(f"rq:{name}:generate", 0, -1) for name in REGISTRIES}
    entries = {name: [entry.decode().split(":")[0] for entry in found] for name, found in (lists | sets).items()}
    return [name for name, ids in entries.items() for found in ids if found == job_id]


def taken_over(connection: Redis, *, and_left: bool = False) -> None:
    """Let another worker take over the queue `generate`, for good or for a moment."""
    connection.incr(FENCE_KEY.format(queue="generate"))
    connection.set(LEASE_KEY.format(queue="generate"), "another worker's")
    if and_left:
        connection.delete(LEASE_KEY.format(queue="generate"))

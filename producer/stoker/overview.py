"""The queues, the workers and the slowest jobs at one moment, with the time that is left. Reads only."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

from pydantic_core import from_json
from rq.job import Job
from rq.queue import Queue
from rq.registry import (
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)
from rq.utils import utcparse

from stoker.job_record import JobProgress, fields_of, progress_in, queue_key, registry_key
from stoker.operations import Command, Commands, Operation, ask
from stoker.presence import LiveWorker, is_ours, known_workers, live_workers
from stoker_shared.wire import LEASE_KEY, MEMBERS_KEY

_LOOKED_AT: Final = 100
"""How many jobs at the front of a queue are searched for the oldest one: newer jobs may have been put before it."""


@dataclass(frozen=True)
class QueueStatus:
    """A snapshot of one queue.

    Attributes:
        waiting, running, finished, failed, deferred, scheduled: numbers of jobs; ended jobs count until they expire.
        oldest_wait_s: how long the oldest job has waited, in seconds; ``None`` if none waits.
        left_s: seconds until its last job ends, at the rate at which its workers end jobs now, with the jobs of queues
            that they prefer; ``None`` without jobs or without a rate.
        workers: names of the workers that listen to it.
    """

    name: str
    waiting: int
    running: int
    finished: int
    failed: int
    deferred: int
    scheduled: int
    oldest_wait_s: float | None = field(kw_only=True)
    left_s: float | None = field(default=None, kw_only=True)
    workers: tuple[str, ...] = field(kw_only=True)


def queues_now() -> Operation[list[QueueStatus]]:
    """All queues that have had a job or that a worker listens to, sorted by name, in at most five round trips."""
    workers = yield from live_workers()
    keys = yield from ask("SMEMBERS", Queue.redis_queues_keys)
    known = {key.decode(errors="replace").removeprefix(Queue.redis_queue_namespace_prefix) for key in keys}
    names = sorted(known.union(*(worker.queues for worker in workers)))
    now = datetime.now(UTC)
    replies = yield Commands([command for name in names for command in _looks_at(name, now)])
    found = [replies[start : start + _LOOKS] for start in range(0, len(replies), _LOOKS)]
    stamps = iter((yield Commands([_enqueued_at(job_id) for *_, head in found for job_id in head])))
    queues = []
    for name, (*counts, head) in zip(names, found, strict=True):
        oldest_wait_s = _oldest_wait_s([next(stamps) for _ in head], now)
        listening = tuple(worker.name for worker in workers if name in worker.queues)
        queues.append(QueueStatus(name, *counts, oldest_wait_s=oldest_wait_s, workers=listening))
    return [replace(queue, left_s=_left_s(queue, queues, workers)) for queue in queues]


def _left_s(queue: QueueStatus, queues: Sequence[QueueStatus], workers: Sequence[LiveWorker]) -> float | None:
    serving = [worker for worker in workers if queue.name in worker.queues]
    rate = sum(worker.now.jobs_per_min for worker in serving if worker.now) / 60
    before = {name for worker in serving for name in worker.queues[: worker.queues.index(queue.name) + 1]}
    n_jobs = sum(other.waiting + other.running for other in queues if other.name in before)
    return n_jobs / rate if queue.waiting + queue.running and rate > 0 else None


def _looks_at(queue: str, now: datetime) -> list[Command]:
    unexpired = (int(now.timestamp()), "+inf")  # RQ removes expired jobs only when it cleans its registries
    return [
        ("LLEN", queue_key(queue)),
        ("ZCARD", registry_key(StartedJobRegistry, queue)),
        ("ZCOUNT", registry_key(FinishedJobRegistry, queue), *unexpired),
        ("ZCOUNT", registry_key(FailedJobRegistry, queue), *unexpired),
        ("ZCARD", registry_key(DeferredJobRegistry, queue)),
        ("ZCARD", registry_key(ScheduledJobRegistry, queue)),
        ("LRANGE", queue_key(queue), 0, _LOOKED_AT - 1),
    ]


_LOOKS: Final = len(_looks_at("any", datetime.now(UTC)))


def _enqueued_at(job_id: bytes) -> Command:
    return ("HMGET", Job.key_for(job_id.decode(errors="replace")), "enqueued_at", "created_at")


def _oldest_wait_s(stamps: Sequence[Sequence[bytes | None]], now: datetime) -> float | None:
    waits = []
    for enqueued_at, created_at in stamps:
        with suppress(ValueError):  # another client wrote it in another form, or the job is gone
            waits.append((now - utcparse((enqueued_at or created_at or b"").decode())).total_seconds())
    return max(0.0, *waits) if waits else None


SLOWEST: Final = 10
_MOST_IN_FLIGHT: Final = 1000


@dataclass(frozen=True)
class WorkerOutlook:
    """A worker, alive or dead.

    Attributes:
        is_alive: ``False`` some seconds after its last heartbeat. Another worker of its queues, or the next one that
            starts, puts its jobs back.
        live: ``None`` if it is dead.
        leases: its fencing number for each queue that it serves, while it has its lease.
    """

    name: str
    is_alive: bool
    live: LiveWorker | None
    leases: dict[str, int]


@dataclass(frozen=True)
class JobInFlight:
    """A running job.

    Attributes:
        running_s: seconds since a worker claimed it.
        progress: about a second old; ``None`` if its worker has not written any yet.
    """

    job_id: str
    queue: str
    worker: str
    running_s: float
    progress: JobProgress | None


@dataclass(frozen=True)
class Overview:
    """
    Attributes:
        slowest: the jobs that have run the longest, at most ten.
        trouble: why the server may refuse to write; a living worker may then appear as dead. ``None`` if no reason is
            known.
    """

    queues: list[QueueStatus]
    workers: list[WorkerOutlook]
    slowest: list[JobInFlight]
    trouble: str | None = None


def overview() -> Operation[Overview]:
    known = yield from known_workers()
    queues = yield from queues_now()
    jobs = yield from _in_flight([queue.name for queue in queues])
    leases = yield from _leases()
    # RQ's own tools remove a dead worker from RQ's set; then only its jobs name it.
    names = {name for name in known if is_ours(name)} | {job.worker for job in jobs if job.worker} - known.keys()
    workers = [
        WorkerOutlook(name, live is not None, live, leases.get(name, {}))
        for name, live in ((name, known.get(name)) for name in sorted(names))
    ]
    slowest = sorted(jobs, key=lambda job: -job.running_s)[:SLOWEST]
    trouble = yield from _trouble()
    return Overview(queues, workers, slowest, trouble)


def _in_flight(queues: Sequence[str]) -> Operation[list[JobInFlight]]:
    keys = [registry_key(StartedJobRegistry, queue) for queue in queues]
    replies = yield Commands([("ZRANGE", key, 0, _MOST_IN_FLIGHT - 1) for key in keys])
    running = {
        member.decode(errors="replace").partition(":")[0]: queue
        for queue, members in zip(queues, replies, strict=True)
        for member in members
    }
    found = yield Commands([("HMGET", Job.key_for(job), "started_at", "worker_name", "meta") for job in running])
    now = datetime.now(UTC)
    jobs = []
    for (job_id, queue), (started_at, worker, meta) in zip(running.items(), found, strict=True):
        with suppress(ValueError):  # it has ended meanwhile
            running_s = max(0.0, (now - utcparse((started_at or b"").decode())).total_seconds())
            name = (worker or b"").decode(errors="replace")
            jobs.append(JobInFlight(job_id, queue, name, running_s, progress_in(fields_of(meta or b""))))
    return jobs


def _leases() -> Operation[dict[str, dict[str, int]]]:
    """Fencing numbers by worker and queue."""
    found: dict[str, dict[str, int]] = {}
    members = yield from ask("HGETALL", MEMBERS_KEY)
    names = [name.decode(errors="replace") for name in members]
    values = (yield from ask("MGET", *(LEASE_KEY.format(member=name) for name in names))) if names else []
    for value in values:
        with suppress(ValueError, TypeError, KeyError, OverflowError):  # there is no lease, or it is not stoker's
            lease = from_json(value or b"null")
            if "recovers" not in lease:
                found[str(lease["worker"])] = {str(queue): int(lease["fence"]) for queue in lease["queues"]}
    return found


def _trouble() -> Operation[str | None]:
    replies = yield Commands([("INFO", "persistence"), ("INFO", "memory")], errors_as_replies=True)
    found = {name: value for reply in replies if isinstance(reply, dict) for name, value in reply.items()}
    if found.get("aof_last_write_status") == "err":
        return "Redis cannot write its append-only file (a full disk?), and refuses jobs and results"
    if found.get("rdb_last_bgsave_status") == "err":
        return "Redis could not save its last snapshot (a full disk?), and may refuse jobs and results"
    most = found.get("maxmemory", 0)
    if most and found.get("used_memory", 0) >= most and found.get("maxmemory_policy") == "noeviction":
        return "Redis is full (maxmemory), and refuses jobs and results"
    return None

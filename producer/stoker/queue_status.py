"""The state of every queue: its jobs by state, the longest wait, its workers. Reads only."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

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

from stoker.job_record import queue_key, registry_key
from stoker.operations import Command, Commands, Operation, ask
from stoker.presence import live_workers

_LOOKED_AT: Final = 100
"""How many jobs at the front of a queue are searched for the oldest; newer jobs may have been put before it."""


@dataclass(frozen=True)
class QueueStatus:
    """A snapshot of one queue.

    Attributes:
        waiting, running, finished, failed, deferred, scheduled: how many jobs; ended jobs count until they expire.
        oldest_wait_s: how long the oldest job has waited, in seconds; ``None`` if none waits.
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
    return queues


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

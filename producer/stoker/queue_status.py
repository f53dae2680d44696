"""Every queue as it is now: how many jobs in which state, the oldest wait, the worker that claims. Reads only."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
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

from stoker.operations import Command, Commands, Operation, ask
from stoker.rq_keys import queue_key, registry_key
from stoker_shared.wire import LEASE_KEY

_LOOKED_AT: Final = 100
"""Jobs from the front of a queue that are looked at for the oldest: those that jumped it are in front of older ones."""


@dataclass(frozen=True)
class QueueStatus:
    """A snapshot of one queue.

    Attributes:
        waiting, running, finished, failed, deferred, scheduled: how many jobs; ended ones until they expire.
        oldest_wait_s: how long the job has waited that was enqueued first; ``None`` if none waits.
        worker: name of the worker that claims from it now; ``None`` if none does.
    """

    name: str
    waiting: int
    running: int
    finished: int
    failed: int
    deferred: int
    scheduled: int
    oldest_wait_s: float | None
    worker: str | None


def queues_now() -> Operation[list[QueueStatus]]:
    """All queues into which something was enqueued, by name. Three round trips, whatever they hold."""
    keys = yield from ask("SMEMBERS", Queue.redis_queues_keys)
    names = sorted(key.decode().removeprefix(Queue.redis_queue_namespace_prefix) for key in keys)
    now = datetime.now(UTC)
    replies = yield Commands([command for name in names for command in _counts_of(name, now)])
    per_queue = [replies[start : start + _REPLIES] for start in range(0, len(replies), _REPLIES)]
    stamps = yield Commands([_enqueued_at(job_id) for *_, head in per_queue for job_id in head])
    left = iter(stamps)
    queues = []
    for name, (*counts, lease, head) in zip(names, per_queue, strict=True):
        oldest_wait_s = _oldest_wait_s([next(left) for _ in head], now)
        queues.append(QueueStatus(name, *counts, oldest_wait_s=oldest_wait_s, worker=_holder(lease)))
    return queues


def _counts_of(queue: str, now: datetime) -> list[Command]:
    unexpired = (int(now.timestamp()), "+inf")  # RQ removes what has expired when somebody cleans up
    return [
        ("LLEN", queue_key(queue)),
        ("ZCARD", registry_key(StartedJobRegistry, queue)),
        ("ZCOUNT", registry_key(FinishedJobRegistry, queue), *unexpired),
        ("ZCOUNT", registry_key(FailedJobRegistry, queue), *unexpired),
        ("ZCARD", registry_key(DeferredJobRegistry, queue)),
        ("ZCARD", registry_key(ScheduledJobRegistry, queue)),
        ("GET", LEASE_KEY.format(queue=queue)),
        ("LRANGE", queue_key(queue), 0, _LOOKED_AT - 1),
    ]


_REPLIES: Final = len(_counts_of("any", datetime.now(UTC)))


def _enqueued_at(job_id: bytes) -> Command:
    return ("HMGET", Job.key_for(job_id.decode(errors="replace")), "enqueued_at", "created_at")


def _oldest_wait_s(stamps: Sequence[Sequence[bytes | None]], now: datetime) -> float | None:
    waits = []
    for enqueued_at, created_at in stamps:
        with suppress(ValueError):  # somebody else's idea of a time; or the job is gone
            waits.append((now - utcparse((enqueued_at or created_at or b"").decode())).total_seconds())
    return max(0.0, *waits) if waits else None


def _holder(lease: bytes | None) -> str | None:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(lease or b"")["worker"])
    return None

"""The live workers, and whether one of them listens to a queue. Reads their records in Redis; owns the warning.

A job is as durable without a worker as with one, so a missing worker is no error: it is only reported.
"""

import json
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import NoPermissionError, RedisError
from rq.worker_registration import REDIS_WORKER_KEYS

from stoker.operations import Operation, ask
from stoker_shared.wire import LEASE_KEY, WORKER_KEY

log = logging.getLogger(__name__)

_LOOK_S: Final = 5.0
_FIELDS: Final = ("model", "context_tokens", "mode", "host", "pid", "started_at")
_LATER: Final = ("max_batch", "max_batch_why")
"""Fields that workers of earlier releases do not publish."""


@dataclass(frozen=True)
class LiveWorker:
    """A worker that had a heartbeat a moment ago.

    Attributes:
        queues: the queues it serves, in its order of priority.
        model: the loaded model; like `context_tokens`, `mode` and the last two, ``None`` while it loads.
        context_tokens: how many tokens a prompt and its answer may have together.
        mode: how its sequences run, as in docs/models.md.
        started_at: Unix time, in seconds.
        max_batch: most jobs in flight at once.
        max_batch_why: what decided that number.
    """

    name: str
    queues: tuple[str, ...]
    model: str | None
    context_tokens: int | None
    mode: str | None
    host: str
    pid: int
    started_at: float
    max_batch: int | None = None
    max_batch_why: str | None = None


def live_workers() -> Operation[list[LiveWorker]]:
    """Stoker's workers, sorted by name. A worker that was killed is among them until its lease has run out."""
    keys = yield from ask("SMEMBERS", REDIS_WORKER_KEYS)
    names = sorted(key.decode(errors="replace").rpartition(":")[2] for key in keys)
    if not names:
        return []
    values = yield from ask("MGET", *(WORKER_KEY.format(name=name) for name in names))
    found = [_worker(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    return [worker for worker in found if worker is not None]


def unattended(queue: str) -> Operation[str | None]:
    """A warning that no worker listens to `queue`; ``None`` if one does, or if this user may not look."""
    try:
        if (yield from ask("EXISTS", LEASE_KEY.format(queue=queue))):
            return None
        workers = yield from live_workers()
    except NoPermissionError:  # ACLs made for earlier releases do not allow these reads
        return None
    queues = {name: None for worker in workers for name in worker.queues}
    return None if queue in queues else _warning(queue, queues)


class Attendance:
    """Checks now and then whether one producer's queues have workers; logs once for each queue without. Any thread."""

    def __init__(self) -> None:
        self._next_look: dict[str, float] = {}

    def check(self, queue: str) -> Operation[None]:
        """Look for a worker of this queue, if the last look is some seconds ago."""
        now = time.monotonic()
        if now < self._next_look.get(queue, 0.0):
            return
        self._next_look[queue] = now + _LOOK_S
        with suppress(RedisError):  # the job is enqueued already
            warning = yield from unattended(queue)
            if warning is not None:
                self._next_look[queue] = float("inf")
                log.warning("%s", warning)


def _warning(queue: str, queues: Iterable[str]) -> str:
    others = ", ".join(queues)
    return f"no worker listens to {queue!r}" + (f"; queues with workers: {others}" if others else ", nor to any queue")


def _worker(name: str, value: bytes) -> LiveWorker | None:
    try:
        found: dict[str, Any] = json.loads(value)
        values = {field: found[field] for field in _FIELDS} | {field: found.get(field) for field in _LATER}
        return LiveWorker(name, tuple(found["queues"]), **values)
    except (ValueError, TypeError, KeyError):  # not written by a worker of stoker's
        return None

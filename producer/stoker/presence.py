"""Which workers are there, and whether one listens to a queue. Reads what they publish; owns the warning.

A job is as durable without a worker as with one, so nothing here fails: it is only reported.
"""

import json
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import NoPermissionError, RedisError
from rq.worker_registration import REDIS_WORKER_KEYS

from stoker.operations import Operation, T, ask
from stoker_shared.wire import LEASE_KEY, WORKER_KEY

log = logging.getLogger(__name__)

_LOOK_S: Final = 5.0


@dataclass(frozen=True)
class LiveWorker:
    """A worker that showed a moment ago that it lives.

    Attributes:
        queues: those it serves, in its order.
        model, context_tokens, mode: what it has loaded, the most tokens a prompt and its answer may have together, and
            how its rows run; ``None`` while it loads.
        started_at: Unix time.
    """

    name: str
    queues: tuple[str, ...]
    model: str | None
    context_tokens: int | None
    mode: str | None
    host: str
    pid: int
    started_at: float


def live_workers() -> Operation[list[LiveWorker]]:
    """Stoker's workers, by name. A worker that was killed is among them until its lease has run out."""
    keys = yield from ask("SMEMBERS", REDIS_WORKER_KEYS)
    names = sorted(key.decode(errors="replace").rpartition(":")[2] for key in keys)
    if not names:
        return []
    values = yield from ask("MGET", *(WORKER_KEY.format(name=name) for name in names))
    found = [_worker(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    return [worker for worker in found if worker is not None]


def unattended(queue: str) -> Operation[str | None]:
    """Why a job in `queue` may wait for long, in words; ``None`` when a worker listens there, or we may not look."""
    try:
        if (yield from ask("EXISTS", LEASE_KEY.format(queue=queue))):
            return None
        workers = yield from live_workers()
    except NoPermissionError:  # users of the server that were made before there was anything to look at
        return None
    queues = {name: None for worker in workers for name in worker.queues}
    return None if queue in queues else _nobody(queue, queues)


class Attendance:
    """Whether the queues of one producer have workers: looked at now and then, logged once for each queue that has
    none. Any thread."""

    def __init__(self) -> None:
        self._next_look: dict[str, float] = {}

    def after(self, queue: str, operation: Operation[T]) -> Operation[T]:
        """The operation, which enqueues into `queue`, and then a look."""
        result = yield from operation
        now = time.monotonic()
        if now >= self._next_look.get(queue, 0.0):
            self._next_look[queue] = now + _LOOK_S
            yield from self._look(queue)
        return result

    def _look(self, queue: str) -> Operation[None]:
        try:
            warning = yield from unattended(queue)
        except RedisError:  # what was asked for is done
            return
        if warning is not None:
            self._next_look[queue] = float("inf")
            log.warning("%s", warning)


def _nobody(queue: str, queues: Iterable[str]) -> str:
    others = ", ".join(queues)
    return f"no worker listens to {queue!r}" + (f"; queues with workers: {others}" if others else ", nor to any queue")


def _worker(name: str, value: bytes) -> LiveWorker | None:
    try:
        found: dict[str, Any] = json.loads(value)
        return LiveWorker(
            name=name,
            queues=tuple(found["queues"]),
            model=found["model"],
            context_tokens=found["context_tokens"],
            mode=found["mode"],
            host=found["host"],
            pid=found["pid"],
            started_at=found["started_at"],
        )
    except (ValueError, TypeError, KeyError):  # no worker of ours wrote this
        return None

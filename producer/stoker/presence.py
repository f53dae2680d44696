"""The live workers, and whether one of them listens to a queue. Reads their records in Redis; owns the warning.

A job is as durable without a worker as with one, so a missing worker is only reported; it is no error.
"""

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic_core import from_json
from redis.exceptions import RedisError
from rq.worker_registration import REDIS_WORKER_KEYS

from stoker.operations import Operation, ask
from stoker_shared.text import printable
from stoker_shared.wire import SERVED_KEY, WORKER_KEY

log = logging.getLogger(__name__)

_LOOK_S: Final = 5.0


@dataclass(frozen=True)
class SharedStoreFigures:
    """A worker's shared store. `away_s`: seconds for which it has not answered; 0 if it answers."""

    away_s: float


@dataclass(frozen=True)
class DataLossFigures:
    """Losses of data in Redis that a worker has noticed.

    Attributes:
        times, jobs: how often since its start, and how many jobs it had in flight then.
        ago_s: seconds since the last one.
    """

    times: int
    jobs: int
    ago_s: float


@dataclass(frozen=True)
class WorkerFigures:
    """A worker's figures at its last heartbeat.

    Attributes:
        at: Unix time of that heartbeat, by the worker's clock.
        tokens_per_s: generated tokens, over the last ten seconds.
        jobs_per_min: ended jobs, over the last five minutes, without the time in which it had none.
        in_flight, in_batch: the jobs that it has claimed, and those of them in the batch.
        hit_share: cached part of all prompt tokens since its start, 0 to 1; ``None`` before the first result.
        done, failed: jobs since its start.
        moved_in: jobs since its start whose agent's newest version another worker had made.
        shared_store: ``None`` if it has none.
        prompt_token_s, token_s: seconds that its model needs for a prompt token and for a generated one, under the load
            that it had; ``None`` before they are known.
        suspended: it claims no jobs, because of `rq suspend`.
        data_loss: ``None`` if it noticed none in the last day, or since its start.
    """

    at: float
    tokens_per_s: float
    jobs_per_min: float
    in_flight: int
    in_batch: int
    hit_share: float | None
    done: int
    failed: int
    moved_in: int = 0
    shared_store: SharedStoreFigures | None = None
    prompt_token_s: float | None = None
    token_s: float | None = None
    suspended: bool = False
    data_loss: DataLossFigures | None = None


@dataclass(frozen=True)
class LiveWorker:
    """A worker with a recent heartbeat.

    Attributes:
        queues: the queues it serves, in its order of priority; others may serve them too.
        model: the loaded model; like `context_tokens`, `mode`, `max_batch` and `max_batch_why`, ``None`` while it
            loads.
        context_tokens: how many tokens a prompt and its answer may have together.
        mode: how its sequences run, as in docs/models.md.
        started_at: Unix time, in seconds.
        max_batch: most jobs in flight at once.
        max_batch_why: the reason for that number.
        member: the name that it keeps when it is started again.
        leaving: it drains, and its agents go to other workers.
        now: ``None`` in its first moments.
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
    member: str | None = None
    leaving: bool = False
    now: WorkerFigures | None = field(default=None, compare=False)


def live_workers() -> Operation[list[LiveWorker]]:
    """Stoker's workers, sorted by name. A killed worker is among them until its lease runs out."""
    known = yield from known_workers()
    return [worker for worker in known.values() if worker is not None]


def known_workers() -> Operation[dict[str, LiveWorker | None]]:
    """All workers that RQ knows, by name; ``None`` for one that is dead, or not stoker's."""
    keys = yield from ask("SMEMBERS", REDIS_WORKER_KEYS)
    names = sorted(key.decode(errors="replace").rpartition(":")[2] for key in keys)
    if not names:
        return {}
    values = yield from ask("MGET", *(WORKER_KEY.format(name=name) for name in names))
    return {name: _worker(name, value) for name, value in zip(names, values, strict=True)}


def is_ours(name: str) -> bool:
    """True if a worker of this name is stoker's, not one of RQ's own."""
    return name.startswith("stoker-")


def unattended(*queues: str) -> Operation[str | None]:
    """A warning that names the first of `queues` to which no worker listens; ``None`` if all have one."""
    for queue in queues:
        if (yield from ask("EXISTS", SERVED_KEY.format(queue=queue))):
            continue
        workers = yield from live_workers()
        served = list(dict.fromkeys(name for worker in workers for name in worker.queues))
        if queue not in served:
            names = ", ".join(map(printable, served))  # `submit` logs it, on a terminal too
            others = f"; queues with workers: {names}" if served else ", nor to any queue"
            return f"no worker listens to {queue!r}{others}"
    return None


def unready(*queues: str) -> Operation[str | None]:
    """Why no job of one of `queues` can begin now: no worker listens to it (as `unattended`), its workers still load
    their model, or they are suspended; ``None`` if a worker of each can take one."""
    warning = yield from unattended(*queues)
    if warning is not None:
        return warning
    workers = yield from live_workers()
    return next(filter(None, (still_loading(queue, workers) or _suspended(queue, workers) for queue in queues)), None)


def still_loading(queue: str, workers: Iterable[LiveWorker]) -> str | None:
    """A message if some of these workers listen to the queue, and none of those has loaded its model yet; else
    ``None``."""
    models = [worker.model for worker in workers if queue in worker.queues]
    return f"the worker of {queue!r} still loads its model" if models and not any(models) else None


def _suspended(queue: str, workers: Iterable[LiveWorker]) -> str | None:
    figures = [worker.now for worker in workers if queue in worker.queues]
    is_suspended = figures and all(now is not None and now.suspended for now in figures)
    return "suspended by `rq suspend`: no job is claimed until `rq resume`" if is_suspended else None


class Attendance:
    """Checks now and then whether one producer's queues have workers; logs once for each queue without. Any thread."""

    def __init__(self) -> None:
        self._next_look: dict[str, float] = {}

    def check(self, queue: str) -> Operation[None]:
        """Look for a worker of this queue, unless the last look was less than five seconds ago."""
        now = time.monotonic()
        if now < self._next_look.get(queue, 0.0):
            return
        self._next_look[queue] = now + _LOOK_S
        with suppress(RedisError):  # the job is enqueued already
            warning = yield from unattended(queue)
            if warning is not None:
                self._next_look[queue] = float("inf")
                log.warning("%s", warning)


def _worker(name: str, value: bytes | None) -> LiveWorker | None:
    try:
        found = from_json(value or b"null")
        return _LIVE_WORKER.validate_python({**found, "name": name, "now": _figures(found.get("now"))})
    except (ValueError, TypeError):  # not written by a worker of stoker's
        return None


def _figures(found: Any) -> WorkerFigures | None:
    try:
        return _FIGURES.validate_python(found)
    except ValueError:  # none yet, or not a worker of stoker's
        return None


_LIVE_WORKER: Final = TypeAdapter(LiveWorker)
_FIGURES: Final = TypeAdapter(WorkerFigures)

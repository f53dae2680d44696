"""The dashboard's workers page: stoker's workers, dead ones too, and RQ's own. Reads only."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from flask import Flask, Response
from redis import Redis
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE
from rq.job import Job
from rq.utils import utcparse
from rq.worker import BaseWorker
from rq.worker_registration import REDIS_WORKER_KEYS
from rq_dashboard import web

from stoker.dashboard.pages import page
from stoker.job_record import fields_of, progress_in
from stoker.operations import Commands, Operation, ask, run
from stoker.overview import Overview, WorkerOutlook, overview
from stoker.tables import DEAD, duration, leases_text, rate_text, trouble_text

_SHOWN_JOBS: Final = 4
_SHOWN_IF_MISSING: Final = {
    **dict.fromkeys(("state", "hostname", "pid", "queues", "last_heartbeat"), "-"),
    **dict.fromkeys(("successful_job_count", "failed_job_count"), "0"),
}
"""The fields of RQ's worker hash that are read, of which a new worker has not all."""


@dataclass(frozen=True)
class ShownJob:
    """`text`: its description, and its progress."""

    job_id: str
    text: str


@dataclass(frozen=True)
class ShownWorker:
    """
    Attributes:
        state: ``busy``, ``idle`` or ``suspended``; of stoker's also ``loading``, ``leaving`` and ``DEAD``.
        heartbeat: how long ago the last one was, by the clocks of both machines; ``-`` if it has run out.
        lease: the queues that it holds; ``over`` if it is dead.
        tokens_per_s: ``-`` for RQ's own workers, like `lease` and `model`.
        running: how many jobs it has; `jobs` has the first of them.
    """

    name: str
    state: str
    host: str
    pid: str
    model: str
    queues: str
    heartbeat: str
    lease: str
    tokens_per_s: str
    running: int
    done: str
    failed: str
    jobs: list[ShownJob]


def show_workers(app: Flask, connection: Redis) -> None:
    """Show each worker's host, model, heartbeat, lease, counts and jobs, these by their descriptions.

    rq-dashboard, since 0.5.3, shows one job of each worker, as a call with its arguments: the prompt. As of 0.9.0, it
    shows a dead worker as it was at its last heartbeat, until its registration runs out, and then not at all.
    """

    def view(instance_number: int) -> Response:
        now = run(connection, overview())
        workers = run(connection, shown_workers(now))
        return page("stoker_workers.html", "workers", trouble=trouble_text(now), workers=workers, dead=DEAD)

    def data(instance_number: int) -> dict[str, Any]:
        return {"workers": run(connection, shown_workers(run(connection, overview())))}

    app.view_functions["rq_dashboard.workers_overview"] = view
    app.view_functions["rq_dashboard.list_workers"] = web.jsonify(data)


def shown_workers(now: Overview) -> Operation[list[ShownWorker]]:
    """Those of the overview and RQ's own, sorted by state and name."""
    ours = {worker.name: worker for worker in now.workers}
    keys = yield from ask("SMEMBERS", REDIS_WORKER_KEYS)
    prefix = BaseWorker.redis_worker_namespace_prefix
    names = [*{*ours, *(key.decode(errors="replace").removeprefix(prefix) for key in keys)}]
    hashes = yield Commands([("HMGET", f"{prefix}{name}", *_SHOWN_IF_MISSING) for name in names])
    running = yield Commands([("SMEMBERS", WORKER_EXECUTIONS_KEY_TEMPLATE.format(name)) for name in names])
    shown = []
    for name, values, members in zip(names, hashes, running, strict=True):
        if name in ours or any(values):  # RQ's tools remove a name without a hash
            job_ids = sorted(member.decode(errors="replace").partition(":")[0] for member in members)
            jobs = yield from _first_of(job_ids)
            shown.append(_worker(name, ours.get(name), values, len(job_ids), jobs))
    return sorted(shown, key=lambda worker: (worker.state, worker.name))


def _worker(
    name: str, ours: WorkerOutlook | None, values: Sequence[bytes | None], running: int, jobs: list[ShownJob]
) -> ShownWorker:
    found = dict.fromkeys(_SHOWN_IF_MISSING, "-")
    if any(values):
        fields = zip(_SHOWN_IF_MISSING.items(), values, strict=True)
        found = {name: value.decode(errors="replace") if value else missing for (name, missing), value in fields}
    live = ours.live if ours else None
    figures = live.now if live else None
    state = "leaving" if live and live.leaving else "loading" if live and not live.model else found["state"]
    is_dead = ours is not None and not ours.is_alive
    lease = leases_text(ours) if ours else "-"
    return ShownWorker(
        name=name,
        state=DEAD if is_dead else state,
        host=found["hostname"],
        pid=found["pid"],
        model=(live and live.model) or "-",
        queues=found["queues"].replace(",", ", "),
        heartbeat=_ago(found["last_heartbeat"]),
        lease="over" if is_dead and lease == "-" else lease,
        tokens_per_s=rate_text(figures.tokens_per_s) if figures else "-",
        running=running,
        done=str(figures.done) if figures else found["successful_job_count"],
        failed=str(figures.failed) if figures else found["failed_job_count"],
        jobs=jobs,
    )


def _ago(stamp: str) -> str:
    with suppress(ValueError):
        return f"{duration(max(0.0, (datetime.now(UTC) - utcparse(stamp)).total_seconds()))} ago"
    return "-"


def _first_of(job_ids: Sequence[str]) -> Operation[list[ShownJob]]:
    some = job_ids[:_SHOWN_JOBS]
    found = yield Commands([("HMGET", Job.key_for(job_id), "description", "meta") for job_id in some])
    return [ShownJob(job_id, _text(*values)) for job_id, values in zip(some, found, strict=True)]


def _text(description: bytes | None, meta: bytes | None) -> str:
    text = (description or b"").decode(errors="replace")
    progress = progress_in(fields_of(meta or b""))
    if progress is None:
        return text
    return f"{text} ({progress.stage}, {progress.tokens} tokens, {progress.tokens_per_s:g}/s)"

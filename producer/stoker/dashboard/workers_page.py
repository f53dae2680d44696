"""The data of the dashboard's workers page. Reads only."""

from typing import Any, Final

from flask import Flask
from redis import Redis
from rq import Worker
from rq.job import Job
from rq.worker import BaseWorker
from rq_dashboard import web

from stoker.job_record import fields_of, progress_in

_SHOWN_JOBS: Final = 4
_SHOWN_ATTRIBUTES: Final = (
    *("name", "pid", "hostname", "last_heartbeat", "birth_date", "successful_job_count", "failed_job_count"),
    *("total_working_time", "version", "python_version"),
)


def show_workers_without_prompts(app: Flask, connection: Redis) -> None:
    """Show all jobs that a worker runs, by their descriptions.

    rq-dashboard, since 0.5.3, shows one job of each worker, as a call with its arguments: the prompt.
    """
    app.view_functions["rq_dashboard.list_workers"] = web.jsonify(lambda instance_number: _workers(connection))


def _workers(connection: Redis) -> dict[str, Any]:
    workers = [_worker(connection, worker) for worker in Worker.all(connection=connection)]
    return {"workers": sorted(workers, key=lambda shown: (shown["state"], shown["queues"], shown["name"]))}


def _worker(connection: Redis, worker: BaseWorker) -> dict[str, Any]:
    running = [execution.job_id for execution in worker.get_current_executions()]
    return {name: getattr(worker, name) for name in _SHOWN_ATTRIBUTES} | {
        "queues": [queue.name for queue in worker.queues],
        "state": worker.get_state(),
        "current_job": _current_jobs(connection, worker.get_state(), running) if running else "idle",
        "current_job_ids": running,
    }


def _current_jobs(connection: Redis, state: str, job_ids: list[str]) -> dict[str, str]:
    """The template has room for one job: it links to the first, and its text counts and describes them all."""
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in job_ids[:_SHOWN_JOBS]:
            pipeline.hmget(Job.key_for(job_id), "description", "created_at", "meta")
        found = [[value or b"" for value in reply] for reply in pipeline.execute()]
    descriptions = "; ".join(_described(description, meta) for description, _, meta in found)
    if len(job_ids) > _SHOWN_JOBS:
        descriptions += f"; and {len(job_ids) - _SHOWN_JOBS} more"
    count = "1 job" if len(job_ids) == 1 else f"{len(job_ids)} jobs"
    return {
        "job_id": job_ids[0],
        "description": descriptions,
        "created_at": found[0][1].decode(errors="replace"),
        "call_string": f"{state}, {count}: {descriptions}",
    }


def _described(description: bytes, meta: bytes) -> str:
    text = description.decode(errors="replace")
    progress = progress_in(fields_of(meta))
    if progress is None:
        return text
    return f"{text} ({progress.stage}, {progress.tokens} tokens, {progress.tokens_per_s:g}/s)"

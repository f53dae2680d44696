"""The dashboard's page of one job: its state, agent, worker and progress, above rq-dashboard's own. Reads only."""

from typing import Final

from flask import Flask
from redis import Redis
from rq.job import Job

from stoker.dashboard.pages import page
from stoker.operations import Operation, ask, run
from stoker.presence import is_ours, live_workers
from stoker.tables import DEAD, rate_text
from stoker.tickets import TicketStatus, status_of
from stoker_shared.job_data import MAX_DATA_BYTES, read_json, unpacked
from stoker_shared.wire import REQUEST_KWARG

_LEFT_BEHIND: Final = "no heartbeat: the job goes back to its queue when a worker starts; below are its last figures"


def show_progress_of_jobs(app: Flask, connection: Redis) -> None:
    """Show a job's agent, its place in the queue or its worker, stage, tokens and rate.

    rq-dashboard shows of a running job that it is ``started``, and its raw ``meta``, as of 0.9.0.
    """
    app.view_functions["rq_dashboard.job_view"] = lambda instance_number, job_id: page(
        "stoker_job.html", "jobs", id=job_id, facts=run(connection, facts_of(job_id))
    )


def facts_of(job_id: str) -> Operation[list[tuple[str, str]]]:
    """Labels and texts.

    Raises:
        JobNotFound: no such job (any more).
    """
    status = yield from status_of(job_id)
    data = yield from ask("HGET", Job.key_for(job_id), "data")
    living = {worker.name for worker in (yield from live_workers())}
    facts = [("State", _state(status)), ("Agent", _agent(data or b"") or "none")]
    if status.worker:
        facts.append(("Worker", status.worker))
        if is_ours(status.worker) and status.worker not in living:
            facts.append((DEAD, _LEFT_BEHIND))
    if status.stage:
        facts.append(("Stage", status.stage))
        facts.append(("Tokens", str(status.tokens)))
        facts.append(("Rate", f"{rate_text(status.tokens_per_s or 0.0)} tokens/s"))
    return facts


def _state(status: TicketStatus) -> str:
    text = status.state
    if status.position is not None:
        text += f", {status.position} ahead of it" if status.position else ", next"
    return f"{text}; {status.warning}" if status.warning else text


def _agent(data: bytes) -> str | None:
    try:
        *_, kwargs = read_json(unpacked(data), MAX_DATA_BYTES)
        agent = kwargs[REQUEST_KWARG]["agent_id"]
    except (ValueError, TypeError, KeyError):  # not a job of stoker's
        return None
    return agent if isinstance(agent, str) else None

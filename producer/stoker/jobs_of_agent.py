"""The jobs of one agent that are still in Redis, with their texts: counts them, or removes them. Operations only.

Jobs about the agent's memory are not among them: they have no text.

Redis knows no agents, so this goes through the ids of all queues and registries, a page at a time, from the newest to
the oldest: what ends meanwhile moves to the other side. It holds one page, and the request of one job at most.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, get_args

from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.registry import (
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)
from rq.results import Result

from stoker.canceling import cancel_job
from stoker.job_record import ENDED
from stoker.operations import Command, Commands, Operation, ask
from stoker.rq_keys import queue_key, registry_key
from stoker_shared.agents import AgentAction
from stoker_shared.errors import JobNotFound
from stoker_shared.job_data import MAX_DATA_BYTES, read_json, unpacked
from stoker_shared.wire import FIELD_AGENT, FIELD_BATCH, REQUEST_KWARG, STREAM_KEY, TASK_PATH

_PAGE: Final = 500
_ENDED: Final[tuple[Any, ...]] = (FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)
_PLACES: Final[tuple[tuple[str, Any, tuple[str, ...]], ...]] = (
    ("waiting", None, (JobStatus.QUEUED.value,)),
    ("waiting", ScheduledJobRegistry, (JobStatus.SCHEDULED.value,)),
    ("waiting", DeferredJobRegistry, (JobStatus.DEFERRED.value,)),
    ("running", StartedJobRegistry, (JobStatus.STARTED.value,)),
    ("finished", FinishedJobRegistry, (JobStatus.FINISHED.value,)),
    ("failed", FailedJobRegistry, (JobStatus.FAILED.value, JobStatus.STOPPED.value)),
    ("canceled", CanceledJobRegistry, (JobStatus.CANCELED.value,)),
)


@dataclass
class JobsOfAgent:
    """An agent's jobs of generation in Redis by state, without those that were removed.

    Attributes:
        in_batches: how many of them are lines of batches.
        kept_s: seconds until the last of those that have ended expires; ``None`` if none has ended.
        kept_for_ever: how many of those that have ended do not expire.
        removed: how many were removed.
    """

    waiting: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    canceled: int = 0
    in_batches: int = 0
    kept_s: int | None = None
    kept_for_ever: int = 0
    removed: int = 0


def jobs_of_agent(agent_id: str, *, remove: bool = False) -> Operation[JobsOfAgent]:
    """
    Args:
        remove: cancel those that have not ended, and delete all of them with their texts.
    """
    found = JobsOfAgent()
    queues = yield from ask("SMEMBERS", Queue.redis_queues_keys)
    for key in sorted(queues):
        queue = key.decode(errors="replace").removeprefix(Queue.redis_queue_namespace_prefix)
        for state, registry, statuses in _PLACES:
            n_kept = 0
            while page := (yield from _page(queue, registry, n_kept)):
                n_removed = 0
                for job_id in (yield from _of_agent(agent_id, page, statuses)):
                    if remove and (yield from _remove(job_id, queue)):
                        n_removed += 1
                    else:
                        yield from _count(found, job_id, state)
                found.removed += n_removed
                n_kept += len(page) - n_removed
    return found


def _page(queue: str, registry: Any, n_kept: int) -> Operation[list[str]]:
    """The ids before the newest `n_kept`."""
    span = (-n_kept - _PAGE, -n_kept - 1)
    if registry is None:
        found = yield from ask("LRANGE", queue_key(queue), *span)
    else:
        found = yield from ask("ZRANGE", registry_key(registry, queue), *span)
    return [member.decode(errors="replace").split(":")[0] for member in found]  # of a run, it has the id as well


def _of_agent(agent_id: str, job_ids: list[str], statuses: tuple[str, ...]) -> Operation[list[str]]:
    """Those of the agent in one of these states. A job in another state is in another place, too, or gone."""
    of_agent = []
    fields = ("status", "created_at", FIELD_AGENT, "description")
    commands = [("HMGET", Job.key_for(job_id), *fields) for job_id in job_ids]
    for job_id, reply in zip(job_ids, (yield Commands(commands, errors_as_replies=True)), strict=True):
        if isinstance(reply, Exception):
            continue
        status, *values = ((value or b"").decode(errors="replace") for value in reply)
        if status in statuses:
            names_it = _names(agent_id, *values)
            if names_it is None:
                names_it = _requests(agent_id, (yield from ask("HGET", Job.key_for(job_id), "data")) or b"")
            if names_it:
                of_agent.append(job_id)
    return of_agent


def _names(agent_id: str, created_at: str, noted: str, description: str) -> bool | None:
    """Whether the job's other fields name the agent; ``None`` if only its request can tell."""
    named = f"for agent {agent_id[:60]!r}"
    if description in {f"{action} {named}" for action in get_args(AgentAction)}:
        return False
    stamp, _, rest = noted.partition(" ")
    if not noted or stamp != created_at:  # another client's job, or its id was used again
        return None
    if " " in rest:
        return rest.partition(" ")[2] == agent_id
    # It does not use memory. If it names an agent all the same, its description has the beginning of the id.
    return None if description.endswith(named) else False


def _requests(agent_id: str, data: bytes) -> bool:
    try:
        call = read_json(unpacked(data), MAX_DATA_BYTES)
        return bool(call[0] == TASK_PATH and call[3][REQUEST_KWARG]["agent_id"] == agent_id)
    except (ValueError, TypeError, KeyError, IndexError):
        return False


def _remove(job_id: str, queue: str) -> Operation[bool]:
    """Whether it is gone; not if its turn is being saved."""
    key = Job.key_for(job_id)
    with suppress(JobNotFound):  # gone, or its id is one that no worker runs
        yield from cancel_job(job_id)
    state = yield from ask("HGET", key, "status")
    if state is not None and state.decode(errors="replace") not in ENDED:
        return False
    related = (Job.dependents_key_for(job_id), f"{Job.redis_job_namespace_prefix}:{job_id}:dependencies")  # as in RQ
    commands: list[Command] = [("DEL", key, *related, Result.get_key(job_id), STREAM_KEY.format(job_id=job_id))]
    yield Commands([*commands, *(("ZREM", registry_key(registry, queue), job_id) for registry in _ENDED)])
    return True


def _count(found: JobsOfAgent, job_id: str, state: str) -> Operation[None]:
    setattr(found, state, getattr(found, state) + 1)
    key = Job.key_for(job_id)
    batch, kept_ms = yield Commands([("HGET", key, FIELD_BATCH), ("PTTL", key)])
    found.in_batches += batch is not None
    if state not in ("waiting", "running"):
        found.kept_for_ever += kept_ms == -1
        found.kept_s = max(found.kept_s or 0, kept_ms // 1000)

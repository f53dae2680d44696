"""An agent's memory, read and changed by jobs of its own; and the agent's other jobs in Redis, counted or removed.

Redis has no index of jobs by agent, so the search reads the ids in all queues and registries page by page, the newest
first: jobs that end meanwhile are added at that end, so they push no other past it. In memory are one page of ids and
a few requests.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypedDict, TypeVar, Unpack, get_args

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
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
from stoker.connection import blocking_slice_s
from stoker.job_record import ENDED_REGISTRIES, is_end, queue_key, registry_key
from stoker.new_job import JobOptions, NewJob, checked_queue_name, require_job_id
from stoker.operations import Command, Commands, Operation, ask, run, run_async
from stoker.submitting import enqueue
from stoker.waiting import wait_for_end
from stoker_shared.agents import (
    AgentAction,
    AgentForgotten,
    AgentForked,
    AgentInfo,
    AgentResult,
    AgentRolledBack,
    build_agent_request,
)
from stoker_shared.errors import JobNotFound
from stoker_shared.job_data import MAX_DATA_BYTES, read_json, unpacked
from stoker_shared.wire import FIELD_AGENT, REQUEST_KWARG, STREAM_KEY, TASK_PATH

R = TypeVar("R", bound=AgentResult)

PATIENCE_S: Final = 600.0
"""Default limit of the wait for the result, in seconds: the agent's earlier jobs run first."""


class LookOptions(TypedDict, total=False):
    """Keyword arguments of `info`.

    Attributes:
        queue: a queue other than the producer's own.
        job_id: your own id: repeating the call then makes no second job.
        timeout_s: how long to wait for the result, in seconds, 600 by default; ``None`` for no limit.
    """

    queue: str
    job_id: str
    timeout_s: float | None


class ChangeOptions(LookOptions, total=False):
    """Keyword arguments of `fork`, `rollback` and `forget`.

    Attributes:
        expect_version: fail unless the agent is at this version.
    """

    expect_version: int | None


@dataclass
class JobsOfAgent:
    """An agent's generation jobs in Redis by state, without those that were `removed`."""

    waiting: int = 0
    running: int = 0
    ended: int = 0
    removed: int = 0


class Agents:
    """Agents' memory; safe to use from any thread.

    Every method except `jobs` enqueues a job and waits for its end.

    Raises:
        JobFailed: the job failed; `reason` begins with the error's name, such as ``AgentNotFound``.
        JobCanceled, JobNotFound: as `Ticket.result`.
        ResultTimeout: the job has not ended within `timeout_s`; it continues.
        InvalidRequest: an argument is wrong; the message names it.
        DuplicateJob: `job_id` names another job.
        RedisUnavailable: no server answers. Whether the job was enqueued is then unknown; with a `job_id` the same call
            can be repeated, and finds the job if it was enqueued.
    """

    def __init__(self, connection: Redis, queue: str) -> None:
        self._connection = connection
        self._queue = queue

    def info(self, agent_id: str, **options: Unpack[LookOptions]) -> AgentInfo:
        """The agent's memory after all jobs enqueued before this one. For an unknown agent, `exists` is false."""
        return self._run(AgentInfo, options, agent_id=agent_id)

    def forget(self, agent_id: str, **options: Unpack[ChangeOptions]) -> AgentForgotten:
        """Remove the agent for good: its conversation, its results, and the cache that only it used."""
        return self._run(AgentForgotten, options, agent_id=agent_id)

    def jobs(self, agent_id: str, *, remove: bool = False) -> JobsOfAgent:
        """The agent's generation jobs in all queues of this Redis. Reads every job there; needs no worker.

        Args:
            remove: cancel the jobs that have not ended, and delete all of them with their prompts and answers.
        """
        return run(self._connection, jobs_of_agent(agent_id, remove=remove))

    def fork(self, agent_id: str, target: str, **options: Unpack[ChangeOptions]) -> AgentForked:
        """Make agent `target`, which continues from where this one is; both share the cache of their common past."""
        return self._run(AgentForked, options, agent_id=agent_id, target=target)

    def rollback(self, agent_id: str, version: int | None = None, **options: Unpack[ChangeOptions]) -> AgentRolledBack:
        """Return the agent to the conversation of `version`, by default the one before the newest. This makes a new
        version, so another rollback undoes it."""
        return self._run(AgentRolledBack, options, agent_id=agent_id, version=version)

    def _run(self, kind: type[R], options: Mapping[str, Any], **fields: Any) -> R:
        operation = agent_job(kind, self._queue, blocking_slice_s(self._connection), fields, **options)
        return run(self._connection, operation)


class AsyncAgents:
    """As `Agents`, for the tasks of one event loop."""

    def __init__(self, connection: AsyncRedis, queue: str) -> None:
        self._connection = connection
        self._queue = queue

    async def info(self, agent_id: str, **options: Unpack[LookOptions]) -> AgentInfo:
        """As `Agents.info`."""
        return await self._run(AgentInfo, options, agent_id=agent_id)

    async def forget(self, agent_id: str, **options: Unpack[ChangeOptions]) -> AgentForgotten:
        """As `Agents.forget`."""
        return await self._run(AgentForgotten, options, agent_id=agent_id)

    async def jobs(self, agent_id: str, *, remove: bool = False) -> JobsOfAgent:
        """As `Agents.jobs`."""
        return await run_async(self._connection, jobs_of_agent(agent_id, remove=remove))

    async def fork(self, agent_id: str, target: str, **options: Unpack[ChangeOptions]) -> AgentForked:
        """As `Agents.fork`."""
        return await self._run(AgentForked, options, agent_id=agent_id, target=target)

    async def rollback(
        self, agent_id: str, version: int | None = None, **options: Unpack[ChangeOptions]
    ) -> AgentRolledBack:
        """As `Agents.rollback`."""
        return await self._run(AgentRolledBack, options, agent_id=agent_id, version=version)

    async def _run(self, kind: type[R], options: Mapping[str, Any], **fields: Any) -> R:
        operation = agent_job(kind, self._queue, blocking_slice_s(self._connection), fields, **options)
        return await run_async(self._connection, operation)


def agent_job(
    kind: type[R],
    default_queue: str,
    slice_s: float,
    fields: Mapping[str, Any],
    *,
    queue: str | None = None,
    job_id: str | None = None,
    timeout_s: float | None = PATIENCE_S,
    expect_version: int | None = None,
) -> Operation[R]:
    """Enqueue the job whose result is of this kind, and wait for its result. Raises as `Agents`."""
    action = kind.model_fields["action"].default
    request = build_agent_request({"action": action, **fields, "expect_version": expect_version})
    if job_id is not None:
        require_job_id("job_id", job_id)
    queue = default_queue if queue is None else checked_queue_name(queue)
    job = NewJob(request, JobOptions(), queue, job_id)
    yield from enqueue([job], ids_are_new=job_id is None)
    record = yield from wait_for_end(job.job_id, timeout_s, slice_s)
    return record.agent_outcome(kind)


_PAGE: Final = 500
_REQUESTS: Final = 16
"""Requests read at once; each may have 8 MB."""

_PLACES: Final[tuple[tuple[str, Any, tuple[str, ...]], ...]] = (
    ("waiting", None, (JobStatus.QUEUED.value,)),
    ("waiting", ScheduledJobRegistry, (JobStatus.SCHEDULED.value,)),
    ("waiting", DeferredJobRegistry, (JobStatus.DEFERRED.value,)),
    ("running", StartedJobRegistry, (JobStatus.STARTED.value,)),
    ("ended", FinishedJobRegistry, (JobStatus.FINISHED.value,)),
    ("ended", FailedJobRegistry, (JobStatus.FAILED.value, JobStatus.STOPPED.value)),
    ("ended", CanceledJobRegistry, (JobStatus.CANCELED.value,)),
)


def jobs_of_agent(agent_id: str, *, remove: bool = False) -> Operation[JobsOfAgent]:
    """The agent's generation jobs in all queues. With `remove`, the jobs that have not ended are canceled, and all are
    deleted with their texts, except those whose turn is being saved."""
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
                        setattr(found, state, getattr(found, state) + 1)
                found.removed += n_removed
                n_kept += len(page) - n_removed
    return found


def _page(queue: str, registry: Any, n_kept: int) -> Operation[list[str]]:
    """The next page of ids, which are older than the newest `n_kept`."""
    span = (-n_kept - _PAGE, -n_kept - 1)
    if registry is None:
        found = yield from ask("LRANGE", queue_key(queue), *span)
    else:
        found = yield from ask("ZRANGE", registry_key(registry, queue), *span)
    return [member.decode(errors="replace").split(":")[0] for member in found]  # a run's entry is JOB_ID:RUN_ID


def _of_agent(agent_id: str, job_ids: list[str], statuses: tuple[str, ...]) -> Operation[list[str]]:
    """Those of these jobs that are the agent's and in one of these states. Others are found elsewhere, or are gone."""
    of_agent: list[str] = []
    in_doubt: list[str] = []
    fields = ("status", "created_at", FIELD_AGENT, "description")
    commands = [("HMGET", Job.key_for(job_id), *fields) for job_id in job_ids]
    for job_id, reply in zip(job_ids, (yield Commands(commands, errors_as_replies=True)), strict=True):
        if isinstance(reply, Exception):  # another client's key may be of another type
            continue
        status, *values = ((value or b"").decode(errors="replace") for value in reply)
        if status in statuses and (names_it := _names(agent_id, *values)) is not False:
            (in_doubt if names_it is None else of_agent).append(job_id)
    for start in range(0, len(in_doubt), _REQUESTS):
        group = in_doubt[start : start + _REQUESTS]
        requests = yield Commands([("HGET", Job.key_for(job_id), "data") for job_id in group])
        of_agent += [id_ for id_, data in zip(group, requests, strict=True) if _requests(agent_id, data or b"")]
    return of_agent


def _names(agent_id: str, created_at: str, noted: str, description: str) -> bool | None:
    """Whether the job's other fields name the agent; ``None`` if only its request can tell."""
    named = f"for agent {agent_id[:60]!r}"
    if description in {f"{action} {named}" for action in get_args(AgentAction)}:
        return False
    stamp, _, rest = noted.partition(" ")
    if not noted or stamp != created_at:  # another client's job, or its id was enqueued again
        return None
    if " " in rest:
        return rest.partition(" ")[2] == agent_id
    # The job uses no memory. If it names an agent all the same, its description has the beginning of the id.
    return None if description.endswith(named) else False


def _requests(agent_id: str, data: bytes) -> bool:
    try:
        call = read_json(unpacked(data), MAX_DATA_BYTES)
        return bool(call[0] == TASK_PATH and call[3][REQUEST_KWARG]["agent_id"] == agent_id)
    except (ValueError, TypeError, KeyError, IndexError):
        return False


def _remove(job_id: str, queue: str) -> Operation[bool]:
    """Cancel and delete a job; returns ``False`` if it stays, because its turn is being saved."""
    key = Job.key_for(job_id)
    with suppress(JobNotFound):  # the job is gone, or RQ does not allow its id
        yield from cancel_job(job_id)
    state = yield from ask("HGET", key, "status")
    if state is not None and not is_end(state):
        return False
    related = (Job.dependents_key_for(job_id), f"{Job.redis_job_namespace_prefix}:{job_id}:dependencies")  # as in RQ
    commands: list[Command] = [("DEL", key, *related, Result.get_key(job_id), STREAM_KEY.format(job_id=job_id))]
    yield Commands([*commands, *(("ZREM", registry_key(registry, queue), job_id) for registry in ENDED_REGISTRIES)])
    return True

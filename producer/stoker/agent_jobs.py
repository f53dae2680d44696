"""Jobs that read or change an agent's memory; each runs in order with the agent's other jobs.

Owns the operation, and the two thin classes behind `Producer.agents` and `AsyncProducer.agents`.
"""

from collections.abc import Mapping
from typing import Any, Final, TypedDict, TypeVar, Unpack

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from stoker.async_driver import run as run_async
from stoker.connection import blocking_slice_s
from stoker.driver import run
from stoker.enqueueing import enqueue
from stoker.job_options import JobOptions, checked_queue_name, require_job_id
from stoker.jobs_of_agent import JobsOfAgent, jobs_of_agent
from stoker.new_job import NewJob
from stoker.operations import Operation
from stoker.waiting import wait_for_end
from stoker_shared.agents import (
    AgentForgotten,
    AgentForked,
    AgentInfo,
    AgentResult,
    AgentRolledBack,
    build_agent_request,
)

R = TypeVar("R", bound=AgentResult)

PATIENCE_S: Final = 600.0
"""Default limit of the wait for the result, in seconds: the agent's earlier jobs run first."""


class LookOptions(TypedDict, total=False):
    """Keyword arguments of `info`.

    Attributes:
        queue: a queue other than the producer's own.
        job_id: an id of the caller's: the same call again is then the same job.
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


class Agents:
    """Agents' memory; safe to use from any thread.

    Every method but `jobs` enqueues a job, waits for its end, and raises:
        JobFailed: the job failed; `reason` begins with the error's name, such as ``AgentNotFound``.
        JobCanceled, JobNotFound: as `Ticket.result`.
        ResultTimeout: the job has not ended within `timeout_s`; it continues.
        InvalidRequest: an argument is wrong; the message names it.
        DuplicateJob: `job_id` names another job.
        RedisUnavailable: no server answers. Whether the job was enqueued is then unknown; with a `job_id` the same
            call can be repeated, and finds the job if it was enqueued.
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
        """The agent's jobs of generation in all queues of this Redis. Looks at every job there, and needs no worker.

        Args:
            remove: cancel those that have not ended, and delete all of them with their prompts and answers.
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
    """Enqueue the job whose result is of this kind, and wait for its result.

    Raises:
        StokerError: as `Agents`.
    """
    action = kind.model_fields["action"].default
    request = build_agent_request({"action": action, **fields, "expect_version": expect_version})
    if job_id is not None:
        require_job_id("job_id", job_id)
    queue = default_queue if queue is None else checked_queue_name(queue)
    job = NewJob(request, JobOptions(), queue, job_id)
    yield from enqueue(queue, [job], at_front=False, ids_are_new=job_id is None)
    record = yield from wait_for_end(job.job_id, timeout_s, slice_s)
    return record.agent_outcome(kind)

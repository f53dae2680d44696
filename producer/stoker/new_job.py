"""A new job as RQ writes it: its hash, and the commands that put it into a queue or behind other jobs. No I/O.

RQ's own enqueueing makes several round trips and does not support asyncio, so the keys are written here, from RQ's
`Job` and with RQ's names. The tests compare them with the keys that RQ's enqueueing writes.
"""

import json
from typing import Any
from uuid import uuid4

from rq.job import Dependency, Job, JobStatus
from rq.queue import Queue
from rq.registry import DeferredJobRegistry
from rq.utils import current_timestamp, now, utcformat

from stoker.job_options import JobOptions
from stoker.operations import Command
from stoker.rq_keys import NO_CONNECTION, queue_key, registry_key
from stoker_shared.agents import AgentRequest
from stoker_shared.request import GenerationRequest
from stoker_shared.wire import AGENT_TASK_PATH, FIELD_AGENT, FIELD_STREAM, REQUEST_KWARG, TASK_PATH


class WireJson:
    """Text stays UTF-8: escaped to ASCII, a request within the size limit could become larger than workers accept."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    @staticmethod
    def loads(data: bytes) -> Any:
        return json.loads(data)


class NewJob:
    """A job that is not in Redis yet.

    Attributes:
        task: path of its function.
        data: the call with the request, as RQ stores it: JSON, compressed.
        queue: it begins there.
        dependency_ids: jobs that have to end first.
        runs_after_failures: whether these may fail.
        size_bytes: size of the request on the wire, before it is compressed.
    """

    def __init__(
        self, request: GenerationRequest | AgentRequest, options: JobOptions, queue: str, job_id: str | None = None
    ) -> None:
        """
        Raises:
            RequestTooLarge, InvalidRequest: as `GenerationRequest.as_payload`.
        """
        self.task, action = (
            (AGENT_TASK_PATH, request.action) if isinstance(request, AgentRequest) else (TASK_PATH, "generate")
        )
        self.queue = queue
        self.dependency_ids = options.dependency_ids
        self.runs_after_failures = options.allow_dependency_failures
        self._ttl_s = options.ttl_s
        job = Job.create(
            self.task,
            kwargs={REQUEST_KWARG: request.as_payload()},
            # RQ's own description would be the whole call with its prompt, which every dashboard shows.
            description=action + (f" for agent {request.agent_id[:60]!r}" if request.agent_id else ""),
            timeout=options.job_timeout_s,
            result_ttl=options.result_ttl_s,
            failure_ttl=options.failure_ttl_s,
            ttl=options.ttl_s,
            id=job_id or str(uuid4()),
            origin=queue,
            retry=options.rq_retry,
            depends_on=_depends_on(options),
            connection=NO_CONNECTION,
            serializer=WireJson,
        )
        hint = [utcformat(job.created_at), request.access]
        if request.agent_id is not None and request.access != "none":
            hint.append(request.agent_id)
        self._fields: dict[str, Any] = {**job.to_dict(), FIELD_AGENT: " ".join(hint)}
        if options.stream:
            self._fields[FIELD_STREAM] = 1
        self.size_bytes = len(job.data)
        self.data: bytes = self._fields["data"]
        self.job_id = str(job.id)  # the `Job` itself is not kept: it has the whole request a second time
        self.key = Job.key_for(self.job_id)
        self._dependents_key, self._dependencies_key = job.dependents_key, job.dependencies_key

    def commands(self, *, deferred: bool) -> list[Command]:
        """All commands except the push to the queue, which is one command for many jobs (`push`).

        Args:
            deferred: jobs that it depends on have not ended yet.
        """
        commands: list[Command] = []
        if deferred:
            commands.append(("ZADD", registry_key(DeferredJobRegistry, self.queue), current_timestamp(), self.job_id))
            for dependency_id in self.dependency_ids:
                commands.append(("SADD", Job.dependents_key_for(dependency_id), self.job_id))
                commands.append(("SADD", self._dependencies_key, dependency_id))
            state = {"status": JobStatus.DEFERRED.value}
        else:
            state = {"status": JobStatus.QUEUED.value, "enqueued_at": utcformat(now())}
        commands.append(("HSET", self.key, *_flat({**self._fields, **state})))
        if self._ttl_s is not None:
            keys = (self.key, self._dependents_key, self._dependencies_key)
            commands += [("EXPIRE", key, self._ttl_s) for key in keys]
        return commands


def push(queue: str, jobs: list[NewJob], *, at_front: bool) -> list[Command]:
    """The commands that put the jobs into the queue, in their order; at its front in reverse order."""
    if not jobs:
        return []
    return [("LPUSH" if at_front else "RPUSH", queue_key(queue), *(job.job_id for job in jobs))]


def make_queue_known(queue: str) -> Command:
    """The command that adds the queue to RQ's set of queues, from which `rq info` and dashboards list them."""
    return ("SADD", Queue.redis_queues_keys, queue_key(queue))


def _depends_on(options: JobOptions) -> Dependency | list[Dependency | Job | str] | None:
    if not options.dependency_ids:
        return None
    ids: list[Dependency | Job | str] = [*options.dependency_ids]
    if not (options.at_front or options.allow_dependency_failures):
        return ids
    return Dependency(
        options.dependency_ids, allow_failure=options.allow_dependency_failures, enqueue_at_front=options.at_front
    )


def _flat(fields: dict[str, Any]) -> list[Any]:
    return [part for field in fields.items() for part in field]

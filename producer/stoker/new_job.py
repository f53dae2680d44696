"""A new job as RQ writes it: its options, its hash, and the commands that enqueue it. No I/O.

RQ's own enqueueing takes several round trips and does not support asyncio, so this module writes the keys, from RQ's
`Job` and with RQ's names. The tests compare them with the keys that RQ writes.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias
from uuid import uuid4

from rq.job import Dependency, Job, JobStatus, Retry, validate_job_id
from rq.queue import Queue
from rq.registry import DeferredJobRegistry
from rq.utils import current_timestamp, now, utcformat

from stoker.job_record import NO_CONNECTION, queue_key, registry_key
from stoker.operations import Command
from stoker.tickets import AnyTicket
from stoker_shared.agents import AgentRequest
from stoker_shared.errors import InvalidRequest
from stoker_shared.request import GenerationRequest
from stoker_shared.wire import (
    AGENT_TASK_PATH,
    DEFAULT_FAILURE_TTL_S,
    DEFAULT_JOB_TIMEOUT_S,
    DEFAULT_RESULT_TTL_S,
    FIELD_AGENT,
    FIELD_STREAM,
    REQUEST_KWARG,
    TASK_PATH,
)

FOREVER = -1
_MOST_S = 10**10  # servers count in milliseconds from now, and cannot count further


DependsOn: TypeAlias = str | AnyTicket | Iterable[str | AnyTicket]


@dataclass(frozen=True)
class JobOptions:
    """A job's options. Times are whole seconds; -1 means for ever, where it is allowed.

    Attributes:
        job_timeout_s: how long the job may run.
        result_ttl_s: how long its result is kept.
        failure_ttl_s: how long the job is kept if it failed.
        ttl_s: how long it may wait in the queue before it is dropped; ``None`` for no limit.
        at_front: put it before all waiting jobs; with `depends_on`, as soon as those jobs have finished.
        retry: how often the job is tried again, immediately, after it failed; or an `rq.Retry`, which can have
            intervals. A job that can never succeed is not tried again.
        depends_on: tickets or ids of jobs that have to finish first. Until then the job is in RQ's deferred registry;
            if one of them fails, is canceled or is deleted, it stays there.
        allow_dependency_failures: run the job even if one of them has failed.
        stream: let the worker publish the text from the first token on. Without it, the worker publishes the text from
            the first call of `Ticket.stream` on.

    Raises:
        InvalidRequest: RQ does not accept a value; the message names the option.
    """

    job_timeout_s: int = DEFAULT_JOB_TIMEOUT_S
    result_ttl_s: int = DEFAULT_RESULT_TTL_S
    failure_ttl_s: int = DEFAULT_FAILURE_TTL_S
    ttl_s: int | None = None
    at_front: bool = False
    retry: int | Retry | None = None
    depends_on: DependsOn = ()
    allow_dependency_failures: bool = False
    stream: bool = False
    dependency_ids: tuple[str, ...] = field(init=False)
    rq_retry: Retry | None = field(init=False)

    def __post_init__(self) -> None:
        for name in ("job_timeout_s", "result_ttl_s", "failure_ttl_s"):
            if getattr(self, name) != FOREVER:
                _require_seconds(name, getattr(self, name), " or -1 for ever")
        if self.ttl_s is not None:
            _require_seconds("ttl_s", self.ttl_s)
        object.__setattr__(self, "rq_retry", _checked_retry(self.retry))
        object.__setattr__(self, "dependency_ids", _ids_of(self.depends_on))
        if self.allow_dependency_failures and not self.dependency_ids:
            raise InvalidRequest("allow_dependency_failures: needs depends_on")


def require_job_id(name: str, job_id: object) -> str:
    """Raises `InvalidRequest`: RQ does not allow such an id; the message begins with `name`."""
    try:
        validate_job_id(job_id)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"{name}: RQ allows letters of the English alphabet, digits, '-' and '_', at least one"
        ) from None
    return str(job_id)


def checked_queue_name(name: str) -> str:
    """Raises `InvalidRequest`: no worker could listen to a queue of this name."""
    if not name or not name.isprintable() or "," in name or name != name.strip():
        raise InvalidRequest("queue: a queue name is a non-empty printable string without commas or surrounding spaces")
    return name


def _require_seconds(name: str, value: object, also: str = "") -> None:
    # RQ would accept a float or "1h" and cut it to whole seconds, and would delete a result with a ttl of 0 at once.
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_S:
        raise InvalidRequest(f"{name}: must be a whole number of seconds, from 1 to {_MOST_S}{also}")


def _checked_retry(retry: object) -> Retry | None:
    if retry is None or isinstance(retry, Retry):
        return retry
    if not isinstance(retry, int) or isinstance(retry, bool) or retry < 1:
        raise InvalidRequest("retry: must be a whole number, at least 1, or an rq.Retry")
    return Retry(max=retry)


def _ids_of(depends_on: DependsOn) -> tuple[str, ...]:
    jobs = [depends_on] if isinstance(depends_on, str | AnyTicket) else list(depends_on)
    ids = [job.job_id if isinstance(job, AnyTicket) else job for job in jobs]
    return tuple(dict.fromkeys(require_job_id("depends_on", job_id) for job_id in ids))


class WireJson:
    """Text stays UTF-8: escaped to ASCII, a request within the size limit could become larger than workers accept."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    @staticmethod
    def loads(data: bytes) -> Any:
        return json.loads(data)


class NewJob:
    """A job that is not in Redis yet. Its constructor raises as `GenerationRequest.as_payload`.

    Attributes:
        task: path of its function.
        data: the call with the request, as RQ stores it: JSON, compressed.
        queue: the queue in which it begins.
        options: its options.
        size_bytes: size of the request on the wire, before compression.
    """

    def __init__(
        self, request: GenerationRequest | AgentRequest, options: JobOptions, queue: str, job_id: str | None = None
    ) -> None:
        self.task, action = (
            (AGENT_TASK_PATH, request.action) if isinstance(request, AgentRequest) else (TASK_PATH, "generate")
        )
        self.queue = queue
        self.options = options
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
        written = {name: value for name, value in job.to_dict().items() if value != ""}  # RQ reads both as missing
        self._fields: dict[str, Any] = {**written, FIELD_AGENT: " ".join(hint)}
        if options.stream:
            self._fields[FIELD_STREAM] = 1
        self.size_bytes = len(job.data)
        self.data: bytes = self._fields["data"]
        self.job_id = str(job.id)  # the `Job` itself is not kept, because it has the whole request a second time
        self.key = Job.key_for(self.job_id)
        self._dependents_key, self._dependencies_key = job.dependents_key, job.dependencies_key

    def commands(self, *, deferred: bool) -> list[Command]:
        """All commands except the push to the queue, which is one command for many jobs (`push`). `deferred`: jobs on
        which this one depends have not ended yet."""
        commands: list[Command] = []
        if deferred:
            commands.append(("ZADD", registry_key(DeferredJobRegistry, self.queue), current_timestamp(), self.job_id))
            for dependency_id in self.options.dependency_ids:
                commands.append(("SADD", Job.dependents_key_for(dependency_id), self.job_id))
                commands.append(("SADD", self._dependencies_key, dependency_id))
            state = {"status": JobStatus.DEFERRED.value}
        else:
            state = {"status": JobStatus.QUEUED.value, "enqueued_at": utcformat(now())}
        commands.append(("HSET", self.key, *chain.from_iterable({**self._fields, **state}.items())))
        if self.options.ttl_s is not None:
            keys = (self.key, self._dependents_key, self._dependencies_key)
            commands += [("EXPIRE", key, self.options.ttl_s) for key in keys]
        return commands


def push(queue: str, jobs: list[NewJob], *, at_front: bool) -> list[Command]:
    """The commands that put the jobs into the queue in their order; at its front, in reverse order."""
    if not jobs:
        return []
    return [("LPUSH" if at_front else "RPUSH", queue_key(queue), *(job.job_id for job in jobs))]


def make_queue_known(queue: str) -> Command:
    """The command that adds the queue to RQ's set of queues, which `rq info` and dashboards list."""
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

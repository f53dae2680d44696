"""Submits requests: validates them, makes jobs of them, and enqueues each job once, in chunks. Keeps no state.

Neither a lost reply nor a repeated call makes a second job. redis-py sends a transaction again when its reply is lost,
and a packet can arrive long after its sender gave up. So the transaction watches the job's key, and the server refuses
it if the job has been made since. In doubt, the producer checks whether the job exists and has the same request. The
transaction also watches the jobs on which the new one depends: if one of them ended unnoticed, the new job would wait
for ever.

It pauses after every few milliseconds of work, so that other tasks of an event loop can run.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from typing import Any, Final, Literal, NamedTuple, TypedDict

from redis.exceptions import RedisError, WatchError
from rq.job import Job, JobStatus, Retry

from stoker.cascade.routing import Models, Routing
from stoker.connection import LOST, REFUSED
from stoker.new_job import DependsOn, JobOptions, NewJob, checked_queue_name, make_queue_known, push, require_job_id
from stoker.operations import Command, Commands, Operation, Pause, Watched
from stoker_shared.agents import build_agent_request
from stoker_shared.check import Check
from stoker_shared.errors import DuplicateJob, InvalidRequest, JobNotFound, RequestError, StokerError
from stoker_shared.job_data import MAX_DATA_BYTES, read_json, unpacked
from stoker_shared.message import Message
from stoker_shared.request import GenerationRequest, build_request, request_digest
from stoker_shared.wire import REQUEST_KWARG, TASK_PATH

CHUNK_JOBS: Final = 100
CHUNK_BYTES: Final = 8 * 2**20  # a chunk is one transaction, which both this process and the server hold in memory
_BUSY_S = 0.005
_OPTIONS: Final = frozenset(field.name for field in dataclass_fields(JobOptions) if field.init)
_ROUTING: Final = frozenset({"models", "min_trust"})


class ManyFields(TypedDict, total=False):
    """Further keyword arguments of `submit_many`: options as in `JobOptions`, and `models` and `min_trust` as in
    `Routing.routed`."""

    job_timeout_s: int
    result_ttl_s: int
    failure_ttl_s: int
    ttl_s: int | None
    retry: int | Retry | None
    depends_on: DependsOn
    allow_dependency_failures: bool
    stream: bool
    models: Models | None
    min_trust: float | None


class SubmitFields(ManyFields, total=False):
    """Further keyword arguments of `submit`: those of `GenerationRequest` and of `JobOptions`."""

    agent_id: str | None
    session: str | None
    prompt: str | None
    prompt_token_ids: Sequence[int] | None
    messages: Sequence[Message | Mapping[str, Any]] | None
    context: Literal["full", "append"]
    expect_version: int | None
    must_exist: bool
    cache: Literal["readwrite", "read", "off"]
    max_tokens: int
    fit_max_tokens: bool
    min_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[str | int, float] | None
    n: int
    logprobs: bool
    top_logprobs: int | None
    prompt_logprobs: int | None
    prompt_logprobs_start: int
    return_prompt: bool
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    response_format: Mapping[str, Any] | None
    guide: Mapping[str, Any] | None
    max_reasoning_tokens: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    cache_salt: str | None
    model: str | None
    check: Check | Mapping[str, Any] | None
    route: Sequence[Mapping[str, Any]]
    max_cost_s: float | None
    task: str | None
    metadata: Mapping[str, str] | None
    at_front: bool


class Submitted(NamedTuple):
    """A job that is enqueued: by this call, or by an earlier one with the same id. `is_new`: this call generated the
    id."""

    job_id: str
    queue: str
    is_new: bool


def submit(queue: str, routing: Routing, fields: Mapping[str, Any], job_id: str | None) -> Operation[Submitted]:
    """Enqueue one job. Raises as `Producer.submit`, with redis-py's errors in place of `RedisUnavailable`."""
    options = JobOptions(**{name: value for name, value in fields.items() if name in _OPTIONS})
    request = _request({name: value for name, value in fields.items() if name not in _OPTIONS | _ROUTING})
    request = yield from _routed(routing, request, fields)
    if job_id is not None:
        require_job_id("job_id", job_id)
    job = NewJob(request, options, queue_of(request, queue), job_id)
    yield from enqueue([job], ids_are_new=job_id is None)
    return Submitted(job.job_id, job.queue, job_id is None)


def submit_many(
    queue: str,
    requests: Iterable[GenerationRequest | Mapping[str, Any]],
    routing: Routing,
    given: Mapping[str, Any],
    job_ids: Sequence[str] | None,
) -> Operation[list[Submitted]]:
    """Enqueue many jobs, in the order of `requests`; `given` has the fields of `ManyFields`. Raises as
    `Producer.submit_many`, with redis-py's errors in place of `RedisUnavailable`."""
    options = JobOptions(**{name: value for name, value in given.items() if name not in _ROUTING})
    if options.at_front:
        raise InvalidRequest("at_front: only for one job, by `submit`")
    if job_ids is not None:
        requests = list(requests)
        _require_ids_for(requests, job_ids)
    busy = _Busy()
    checked: list[GenerationRequest] | None = None
    if isinstance(requests, Sequence):
        checked = []
        for index, request in enumerate(tuple(requests)):  # the caller may change its own list meanwhile
            checked.append((yield from _checked(index, request, routing, given)))
            yield from busy.rest()
    ids = iter(job_ids) if job_ids is not None else None
    submitted: list[Submitted] = []
    chunk: list[NewJob] = []
    chunk_bytes = 0
    for index, request in enumerate(requests if checked is None else checked):
        valid = checked[index] if checked is not None else (yield from _checked(index, request, routing, given))
        job = NewJob(valid, options, queue_of(valid, queue), next(ids) if ids else None)
        if chunk and (len(chunk) == CHUNK_JOBS or chunk_bytes + job.size_bytes > CHUNK_BYTES):
            submitted += yield from _enqueue_chunk(chunk, ids is None)
            chunk, chunk_bytes = [], 0
        chunk.append(job)
        chunk_bytes += job.size_bytes
        yield from busy.rest()
    if chunk:
        submitted += yield from _enqueue_chunk(chunk, ids is None)
    return submitted


def _enqueue_chunk(chunk: list[NewJob], ids_are_new: bool) -> Operation[list[Submitted]]:
    for queue in dict.fromkeys(job.queue for job in chunk):
        yield from enqueue([job for job in chunk if job.queue == queue], ids_are_new=ids_are_new)
    return [Submitted(job.job_id, job.queue, ids_are_new) for job in chunk]


def queue_of(request: GenerationRequest, usual: str) -> str:
    """The queue in which the job begins."""
    return checked_queue_name(request.route[0].queue) if request.route else usual


def _routed(routing: Routing, request: GenerationRequest, given: Mapping[str, Any]) -> Operation[GenerationRequest]:
    models, min_trust = given.get("models"), given.get("min_trust")
    if models is None:
        if min_trust is not None:
            raise InvalidRequest("min_trust: needs 'models'")
        return request
    return (yield from routing.routed(request, models, min_trust))


def _checked(
    index: int, request: GenerationRequest | Mapping[str, Any], routing: Routing, given: Mapping[str, Any]
) -> Operation[GenerationRequest]:
    """The request with its route."""
    try:
        built = request if isinstance(request, GenerationRequest) else _request(request)
        routed = yield from _routed(routing, built, given)
        routed.as_payload()  # raises if it is too large
        queue_of(routed, "")  # raises if the queue in which its route begins has an impossible name
    except RequestError as error:
        raise type(error)(f"request {index}: {error}") from None
    return routed


def _require_ids_for(requests: Sequence[Any], job_ids: Sequence[str]) -> None:
    for job_id in job_ids:
        require_job_id("job_id", job_id)
    if len(set(job_ids)) != len(job_ids):
        raise InvalidRequest("job_ids: an id occurs twice")
    if len(job_ids) != len(requests):
        raise InvalidRequest(f"job_ids: {len(job_ids)} ids for {len(requests)} requests")


def _request(fields: Mapping[str, Any]) -> GenerationRequest:
    try:
        plain = {name: _plain(value) for name, value in fields.items()}
    except RecursionError:
        raise InvalidRequest("the request cannot be written as JSON: a value is nested too deeply") from None
    if plain.get("metadata", {}) is None:
        del plain["metadata"]
    return build_request(plain)


def _plain(value: Any) -> Any:
    """Mappings and sequences as dicts and lists, which strict validation requires; other values unchanged."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


class _Busy:
    """Measures how long this thread has worked without a pause."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def rest(self) -> Operation[None]:
        """Pause if that is long."""
        now = time.monotonic()
        if now - self._since >= _BUSY_S:
            self._since = now
            yield Pause(0)


_TRIES: Final = 5  # in each of them, redis-py tries several times too
_TRIES_OF_A_RACE: Final = 100  # a running job's hash changes twice a second, and this job may depend on it


def enqueue(jobs: list[NewJob], *, ids_are_new: bool) -> Operation[None]:
    """Enqueue those of `jobs` that do not exist yet, in one transaction.

    Args:
        jobs: of one queue, and with the same options.
        ids_are_new: the ids were generated just now, so no other job can have them.

    Raises:
        DuplicateJob: an id names another job; none of `jobs` was enqueued.
        JobNotFound: a job that one of `jobs` depends on does not exist; none was enqueued.
        redis.exceptions.RedisError: whether the jobs were enqueued is unknown; it is safe to repeat the call.
    """
    left, look_first = jobs, not ids_are_new
    losses = races = 0
    while True:
        try:
            if (yield from _enqueued(left, look_first=look_first)):
                return
        except REFUSED:
            raise
        except LOST:
            losses += 1
            if losses == _TRIES:
                raise
        except WatchError:
            races += 1
            if races == (_TRIES_OF_A_RACE if left[0].options.dependency_ids else _TRIES):
                raise
        look_first, left = True, (yield from _without_existing(left))
        if not left:
            return


def _enqueued(jobs: list[NewJob], *, look_first: bool) -> Operation[bool]:
    """Try the transaction. Returns ``False`` if a job with one of these ids exists; nothing was written then."""
    keys = [job.key for job in jobs]
    queue, at_front = jobs[0].queue, jobs[0].options.at_front
    dependency_ids = list(dict.fromkeys(job_id for job in jobs for job_id in job.options.dependency_ids))
    reads: list[Command] = [("EXISTS", *keys)] if look_first else []
    reads += [("HGET", Job.key_for(job_id), "status") for job_id in dependency_ids]

    def write(replies: list[Any]) -> list[Command] | None:
        if look_first and replies.pop(0):
            return None
        states = dict(zip(dependency_ids, replies, strict=True))
        commands: list[Command] = [make_queue_known(queue)]
        ready = []
        for job in jobs:
            deferred = _has_to_wait(job, states)
            commands += job.commands(deferred=deferred)
            if not deferred:
                ready.append(job)
        return commands + push(queue, ready, at_front=at_front)

    watched = keys + [Job.key_for(job_id) for job_id in dependency_ids]
    return (yield Watched(watched, reads, write)) is not None


def _has_to_wait(job: NewJob, states: dict[str, bytes | None]) -> bool:
    """Raises `JobNotFound`: a dependency does not exist; RQ would treat it as finished."""
    met = [JobStatus.FINISHED.value, *([JobStatus.FAILED.value] if job.options.allow_dependency_failures else [])]
    waits = False
    for dependency_id in job.options.dependency_ids:
        state = states[dependency_id]
        if state is None:
            raise JobNotFound(dependency_id, f"job {job.job_id} cannot wait for it: it never existed, or has expired")
        waits |= state.decode(errors="replace") not in met
    return waits


def _without_existing(jobs: list[NewJob]) -> Operation[list[NewJob]]:
    """Raises `DuplicateJob`: an existing job has another request or is in another queue."""
    looks: list[Command] = []
    for job in jobs:
        looks += [("HMGET", job.key, "data", "origin"), ("EXISTS", job.key)]
    replies = yield Commands(looks, errors_as_replies=True)  # a key of another type also means that the id is taken
    left = []
    for job, found, exists in zip(jobs, replies[::2], replies[1::2], strict=True):
        if isinstance(exists, RedisError):
            raise exists
        if not exists:
            left.append(job)
        elif isinstance(found, Exception) or not _is_the_same(job, *found):
            raise DuplicateJob(f"job_id: {job.job_id!r} names another job already")
    return left


def _is_the_same(job: NewJob, data: bytes | None, origin: bytes | None) -> bool:
    """Compares request and queue; the job's times and its place in the queue do not matter."""
    if data == job.data and origin == job.queue.encode():  # the same call again: nothing has to be unpacked
        return True
    try:
        function, _, _, kwargs = read_json(unpacked(data or b""), MAX_DATA_BYTES)
        theirs = kwargs[REQUEST_KWARG]
        ours, queues = read_json(unpacked(job.data), MAX_DATA_BYTES)[3][REQUEST_KWARG], {job.queue}
        if ours.get("route") and theirs.get("route"):  # made from what was then known of the models
            queues = {step["queue"] for step in theirs["route"]}
            ours, theirs = ({**payload, "route": []} for payload in (ours, theirs))
        if function != job.task or (origin or b"").decode() not in queues:
            return False
        if request_digest(theirs) == request_digest(ours):
            return True
        # Another client, or an earlier version of this one, may write out defaults where this one does not.
        build = build_request if function == TASK_PATH else build_agent_request
        found, wanted = (build(payload).model_dump(mode="json", exclude={"v"}) for payload in (theirs, ours))
        return found == wanted
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StokerError):  # not a job of stoker's
        return False

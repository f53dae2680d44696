"""Enqueues jobs once: a lost reply, or a producer that asks again, makes no second job. Owns that; keeps no state.

redis-py sends a transaction again when its reply is lost, and a packet may arrive long after its sender gave it up. So
the job's key is watched first: a transaction that comes after another one that made the job is refused by the server.
After any doubt we look whether the job is there, and whether it is ours.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final
from uuid import uuid4

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, WatchError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq.job import Job, validate_job_id
from rq.queue import EnqueueData, Queue
from rq.utils import utcformat

from stoker.connection import REFUSED
from stoker.job_options import JobOptions
from stoker_shared.errors import InvalidRequest, JobIdTaken
from stoker_shared.request import build_request, request_digest
from stoker_shared.wire import FIELD_AGENT, MAX_REQUEST_BYTES, REQUEST_KWARG, TASK_PATH

_CHUNK_JOBS: Final = 500
_CHUNK_BYTES: Final = 8 * 2**20  # a chunk is one transaction: held whole here, and by the server while it runs
_TRIES: Final = 5  # each with redis-py's own tries in it
_MAX_DATA_BYTES: Final = MAX_REQUEST_BYTES + 4096


def job_data(payload: dict[str, Any], options: JobOptions, job_id: str | None = None) -> EnqueueData:
    """What `enqueue` takes; `job_id` is made up where the caller gives none."""
    return Queue.prepare_data(
        TASK_PATH,
        kwargs={REQUEST_KWARG: payload},
        # RQ's own description is the whole call, prompt included, and every dashboard shows it.
        description=_description(payload.get("agent_id")),
        timeout=options.job_timeout_s,
        result_ttl=options.result_ttl_s,
        failure_ttl=options.failure_ttl_s,
        ttl=options.ttl_s,
        job_id=job_id or str(uuid4()),
        at_front=options.at_front,
    )


def _description(agent_id: str | None) -> str:
    return "generate" if agent_id is None else f"generate for agent {agent_id[:60]!r}"


def chunks_of(payloads: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Requests that go into one transaction, in order."""
    chunk: list[dict[str, Any]] = []
    chunk_bytes = 0
    for payload in payloads:
        size = len(json.dumps(payload, ensure_ascii=False))
        if chunk and (len(chunk) == _CHUNK_JOBS or chunk_bytes + size > _CHUNK_BYTES):
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(payload)
        chunk_bytes += size
    if chunk:
        yield chunk


def require_job_ids(job_ids: Sequence[str]) -> None:
    """
    Raises:
        InvalidRequest: one of them is none RQ allows, or comes twice.
    """
    for job_id in job_ids:
        try:
            validate_job_id(job_id)
        except (TypeError, ValueError):
            raise InvalidRequest(
                "job_id: RQ allows letters of the English alphabet, digits, '-' and '_', at least one"
            ) from None
    if len(set(job_ids)) != len(job_ids):
        raise InvalidRequest("job_ids: an id comes twice")


def enqueue(queue: Queue, jobs: list[EnqueueData], *, ids_are_new: bool) -> None:
    """All of `jobs` that are not there yet, in one transaction.

    Args:
        ids_are_new: they were made up just now, so that nobody can have used them.

    Raises:
        JobIdTaken: an id names another job; none of `jobs` was enqueued.
        redis.exceptions.RedisError: whether they were enqueued is unknown; the same call again is safe.
    """
    queue.get_redis_server_version()  # RQ asks once per queue, and not in the middle of our transaction
    left, look_first = jobs, not ids_are_new
    doubt: RedisError = WatchError("the keys of these jobs are changed over and over")
    for _ in range(_TRIES):
        try:
            if _enqueued(queue, left, look_first=look_first):
                return
        except REFUSED:
            raise
        except (WatchError, RedisConnectionError, RedisTimeoutError) as error:
            doubt = error
        look_first, left = True, _without_those_there(queue, left)
        if not left:
            return
    raise doubt


def _enqueued(queue: Queue, jobs: list[EnqueueData], *, look_first: bool) -> bool:
    """Whether the transaction was carried out; not when there is a job of one of these ids."""
    with queue.connection.pipeline(transaction=True) as pipeline:
        keys = [Job.key_for(_id_of(job)) for job in jobs]
        pipeline.watch(*keys)  # type: ignore[no-untyped-call]
        if look_first and pipeline.exists(*keys):
            return False
        pipeline.multi()
        for job in queue.enqueue_many(jobs, pipeline=pipeline):
            request = build_request(job.kwargs[REQUEST_KWARG])
            use = "none" if request.access == "none" else f"{request.access} {request.agent_id}"
            pipeline.hset(job.key, FIELD_AGENT, f"{utcformat(job.created_at)} {use}")
        pipeline.execute()
    return True


def _without_those_there(queue: Queue, jobs: list[EnqueueData]) -> list[EnqueueData]:
    """
    Raises:
        JobIdTaken: what is there is not the same request in the same queue.
    """
    with queue.connection.pipeline(transaction=False) as pipeline:
        for job in jobs:
            pipeline.hmget(Job.key_for(_id_of(job)), "data", "origin")
            pipeline.exists(Job.key_for(_id_of(job)))
        replies = pipeline.execute(raise_on_error=False)  # a key that is no hash is one id that is taken
    left = []
    for job, found, exists in zip(jobs, replies[::2], replies[1::2], strict=True):
        if isinstance(exists, Exception):
            raise exists
        if not exists:
            left.append(job)
        elif isinstance(found, Exception) or not _is_the_same(queue, job, *found):
            raise JobIdTaken(f"job_id: {_id_of(job)!r} names another job already")
    return left


def _is_the_same(queue: Queue, job: EnqueueData, data: bytes | None, origin: bytes | None) -> bool:
    """By request and queue: times and place may have changed since, and are not what runs."""
    try:
        function, _, _, kwargs = json.loads(_decompressed(data or b""))
        digest = request_digest(kwargs[REQUEST_KWARG])
    except (ValueError, TypeError, KeyError, RecursionError):  # a pickle, or somebody else's
        return False
    ours = request_digest((job.kwargs or {})[REQUEST_KWARG])
    return function == TASK_PATH and origin == queue.name.encode() and digest == ours


def _decompressed(data: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, _MAX_DATA_BYTES)
    except zlib.error:  # other languages need not compress
        return data


def _id_of(job: EnqueueData) -> str:
    return str(job.job_id)

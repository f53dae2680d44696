"""Cancels one job: removes a waiting job from its queue, sends RQ's stop command for a running one. Keeps no state.

It writes the same as `rq.job.Job.cancel`, but only if the job's state has not changed since it was read: otherwise a
job that has just ended would be marked as canceled.
"""

import json
from typing import Any

from redis.exceptions import WatchError
from rq.command import PUBSUB_CHANNEL_TEMPLATE
from rq.executions import ExecutionRegistry
from rq.job import Job, JobStatus, validate_job_id
from rq.queue import Queue
from rq.rate_limit import RELEASE_STALE_AND_ENQUEUE_SCRIPT, RateLimitRegistry
from rq.registry import (
    CanceledJobRegistry,
    DeferredJobRegistry,
    ReadyJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)
from rq.utils import current_timestamp, now, utcformat

from stoker.job_record import ENDED
from stoker.operations import Command, Operation, Watched, ask
from stoker.rq_keys import NO_CONNECTION, queue_key, registry_key
from stoker_shared.errors import JobNotFound
from stoker_shared.wire import DEFAULT_FAILURE_TTL_S

_WAITS_IN: dict[str, Any] = {
    JobStatus.DEFERRED.value: DeferredJobRegistry,
    JobStatus.READY_TO_ENQUEUE.value: ReadyJobRegistry,
    JobStatus.SCHEDULED.value: ScheduledJobRegistry,
}
_FIELDS = ("status", "origin", "worker_name", "failure_ttl", "rate_limit_key")


def cancel_job(job_id: str) -> Operation[bool]:
    """Whether the job was canceled, or its worker was told to stop it; ``False`` when it had already ended.

    Raises:
        JobNotFound: there is no such job, or RQ does not allow such an id (a worker then fails the job).
        redis.exceptions.RedisError: no server answers, or it refused a command.
    """
    try:
        validate_job_id(job_id)
    except ValueError as error:
        raise JobNotFound(job_id, f"RQ does not allow such an id: {error}") from None
    while True:
        values = yield from ask("HMGET", Job.key_for(job_id), *_FIELDS)
        if values[0] is None:
            raise JobNotFound(job_id)
        state, queue, worker, failure_ttl_s, limit = ((value or b"").decode(errors="replace") for value in values)
        if state in ENDED:
            return False
        if state == JobStatus.STARTED.value and worker and (yield from _is_listening(worker)):
            stop = json.dumps({"command": "stop-job", "job_id": job_id})
            yield from ask("PUBLISH", PUBSUB_CHANNEL_TEMPLATE % worker, stop)
            return True
        # A job whose worker is gone is canceled in Redis, because nothing would receive a stop command.
        ttl_s = int(failure_ttl_s) if failure_ttl_s else DEFAULT_FAILURE_TTL_S
        if (yield from _cancel_unless_changed(job_id, state, queue, ttl_s)):
            if limit:
                yield from _release_rate_limit(job_id, limit)
            return True


def _is_listening(worker: str) -> Operation[bool]:
    [(_, listeners)] = yield from ask("PUBSUB NUMSUB", PUBSUB_CHANNEL_TEMPLATE % worker)
    return bool(listeners)


def _cancel_unless_changed(job_id: str, state: str, queue: str, ttl_s: int) -> Operation[bool]:
    executions: list[bytes] = []
    if state == JobStatus.STARTED.value:
        executions = yield from ask("ZRANGE", ExecutionRegistry(job_id, NO_CONNECTION).key, 0, -1)

    def write(replies: list[Any]) -> list[Command] | None:
        if replies[0] != state.encode():
            return None
        commands: list[Command] = [
            ("HSET", Job.key_for(job_id), "status", JobStatus.CANCELED.value),
            ("LREM", queue_key(queue), 1, job_id),
            ("ZADD", registry_key(CanceledJobRegistry, queue), current_timestamp(), job_id),
        ]
        if state in _WAITS_IN:
            commands.append(("ZREM", registry_key(_WAITS_IN[state], queue), job_id))
        if executions:
            members = [f"{job_id}:{execution.decode()}" for execution in executions]
            commands.append(("ZREM", registry_key(StartedJobRegistry, queue), *members))
        if ttl_s > 0:  # RQ would keep canceled jobs for ever, but prompts are private
            commands.append(("EXPIRE", Job.key_for(job_id), ttl_s))
        return commands

    try:
        replies = yield Watched([Job.key_for(job_id)], [("HGET", Job.key_for(job_id), "status")], write)
    except WatchError:  # its state has just changed: read it again
        return False
    return replies is not None


def _release_rate_limit(job_id: str, rate_limit_key: str) -> Operation[None]:
    """As RQ's `RateLimitRegistry.cancel`. Only producers other than stoker's enqueue jobs with a rate limit."""
    limit = RateLimitRegistry(rate_limit_key, NO_CONNECTION)
    yield from ask("ZREM", limit.rate_limited_key, job_id)
    concurrency = yield from ask("HGET", limit.config_key, "concurrency")
    job_keys = (Job.key_for(job_id), ExecutionRegistry(job_id, NO_CONNECTION).key)
    keys = [limit.allowed_key, limit.rate_limited_key, *job_keys]
    prefixes = (Queue.redis_queue_namespace_prefix, Job.redis_job_namespace_prefix)
    values = (int(concurrency or 0), current_timestamp(), utcformat(now()), *prefixes, job_id)
    yield from ask("EVAL", RELEASE_STALE_AND_ENQUEUE_SCRIPT, len(keys), *keys, *values)

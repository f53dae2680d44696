"""Cancels one job, whatever it is doing, in one transaction. Keeps no state.

It writes the same as `rq.job.Job.cancel`, with two differences. A run in progress keeps its entries: its worker finds
that the job is no longer its own, and removes them. And the job then expires after its failure_ttl. Everything else
that changes a job's state checks the status in its own transaction, so a canceled job no longer fails, and is not
retried, given back or sent on.
"""

import re
from typing import Any

from rq.job import Job, JobStatus, validate_job_id
from rq.registry import (
    CanceledJobRegistry,
    DeferredJobRegistry,
    FinishedJobRegistry,
    ReadyJobRegistry,
    ScheduledJobRegistry,
)
from rq.utils import current_timestamp

from stoker.job_record import ENDED, queue_key, registry_key
from stoker.operations import Command, Operation, Watched, undisturbed
from stoker_shared.errors import JobNotFound
from stoker_shared.wire import DEFAULT_FAILURE_TTL_S, FIELD_SAVING

_WAITS_IN: dict[str, Any] = {
    JobStatus.DEFERRED.value: DeferredJobRegistry,
    JobStatus.READY_TO_ENQUEUE.value: ReadyJobRegistry,
    JobStatus.SCHEDULED.value: ScheduledJobRegistry,
}
_TTL = re.compile("-?[0-9]{1,11}")  # any client may write anything
_FIELDS = ("status", "origin", "failure_ttl", "created_at", FIELD_SAVING)


def cancel_job(job_id: str) -> Operation[bool]:
    """Cancel a job. Returns ``False`` if it had ended, or if its agent's turn was being saved.

    Raises:
        JobNotFound: there is no such job, or RQ does not allow such an id (a worker then fails the job).
        redis.exceptions.RedisError: no server answers, or it refused a command.
    """
    try:
        validate_job_id(job_id)
    except ValueError as error:
        raise JobNotFound(job_id, f"RQ does not allow such an id: {error}") from None
    key, was_tried, is_canceled = Job.key_for(job_id), False, False

    def write(replies: list[Any]) -> list[Command] | None:
        nonlocal was_tried, is_canceled
        if replies[0][0] is None:
            raise JobNotFound(job_id)
        fields = ((value or b"").decode(errors="replace") for value in replies[0])
        state, queue, failure_ttl_s, created_at, saving = fields
        is_canceled = was_tried and state == JobStatus.CANCELED.value  # perhaps by that try, whose reply was lost
        was_tried = True
        if state in ENDED or saving == (created_at or "-"):
            return None
        is_canceled = True
        ttl_s = int(failure_ttl_s) if _TTL.fullmatch(failure_ttl_s) else DEFAULT_FAILURE_TTL_S
        return _commands(job_id, state, queue, ttl_s)

    # A running job's hash changes twice a second, so the transaction may need several tries.
    yield from undisturbed(Watched([key], [("HMGET", key, *_FIELDS)], write))
    return is_canceled


def _commands(job_id: str, state: str, queue: str, ttl_s: int) -> list[Command]:
    key = Job.key_for(job_id)
    commands: list[Command] = [
        ("HSET", key, "status", JobStatus.CANCELED.value),
        ("LREM", queue_key(queue), 1, job_id),
        ("ZADD", registry_key(CanceledJobRegistry, queue), current_timestamp(), job_id),
    ]
    # A job whose id was enqueued again after its end is among the finished ones too.
    for registry in filter(None, (_WAITS_IN.get(state), FinishedJobRegistry)):
        commands.append(("ZREM", registry_key(registry, queue), job_id))
    if ttl_s > 0:  # RQ would keep canceled jobs for ever, but prompts are private
        commands.append(("EXPIRE", key, ttl_s))
    return commands

"""Checks a job's answer; if the check rejects it, moves the job to its route's next model. Owns no state; any thread.

The job keeps its id, so its ticket, TTLs, stream and dependents need no change. The move is one of the ends of a run
(`end.py`): one script notes the attempt, counts the verdict and puts the id at the front of the next model's queue. So
neither a killed worker nor a lost reply moves a job twice or counts a verdict twice.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rq.job import JobStatus
from rq.queue import Queue
from rq.utils import utcformat

from stoker_shared.agents import AgentRequest
from stoker_shared.check import rejection
from stoker_shared.errors import BlockPoolTooSmall, ContextLimitExceeded
from stoker_shared.job_data import read_json
from stoker_shared.request import GenerationRequest
from stoker_shared.result import Attempt, Choice
from stoker_shared.route import RouteStep, next_step
from stoker_shared.trust import KEPT, MOST_PAIRS, field_of, task_of
from stoker_shared.wire import FIELD_TRIED, TRUST_KEY
from stoker_worker.queue.json_job import JobRun, JsonJob

_TOO_LONG: Final = (ContextLimitExceeded, BlockPoolTooSmall)
"""Errors of jobs for which another model may have room."""


@dataclass(frozen=True)
class CheckOutcome:
    """The verdict on a job's answer.

    Attributes:
        task: the class of tasks in which it counts.
        attempts: all of the job, this run's last; empty for a job without a check.
        next: the model to ask next, because the answer was rejected; ``None``: the job ends.
    """

    task: str
    attempts: tuple[Attempt, ...]
    next: RouteStep | None

    def as_fields(self) -> dict[str, Any]:
        """The verdict's fields of the job's result."""
        return {"task": self.task, "attempts": [one.model_dump(mode="json") for one in self.attempts] or None}


def model_of(job: JsonJob, request: GenerationRequest | AgentRequest) -> str | None:
    """The model that this run of the job is for; ``None``: any."""
    if isinstance(request, AgentRequest):
        return None
    route = request.route
    return route[min(len(_tried(job)), len(route) - 1)].model if route else request.model


def verdict_on(
    job: JsonJob, request: GenerationRequest | AgentRequest, result: Mapping[str, Any]
) -> CheckOutcome | None:
    """The verdict on an answer; ``None`` for a job whose answers are not judged. `result`: JSON values."""
    if isinstance(request, AgentRequest) or not request.is_judged:
        return None
    task = task_of(request)
    if request.check is None:
        return CheckOutcome(task, (), None)
    reason = rejection(request.check, Choice.model_validate(result))
    usage, timing = result["usage"], result["timing"]
    attempt = Attempt(
        model=result["model"],
        accepted=reason is None,
        reason=reason,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        seconds=round(timing["prefill_s"] + timing["decode_s"], 6),
    )
    return _verdict(job, request, task, attempt)


def verdict_after(job: JsonJob, request: GenerationRequest | AgentRequest, error: Exception) -> CheckOutcome | None:
    """The verdict on a job that is too long for this model; ``None`` after any other error or without a next model."""
    model = model_of(job, request)
    if isinstance(request, AgentRequest) or model is None or not isinstance(error, _TOO_LONG):
        return None
    attempt = Attempt(model=model, accepted=False, reason=type(error).__name__)
    verdict = _verdict(job, request, task_of(request), attempt)
    return verdict if verdict.next else None


def _verdict(job: JsonJob, request: GenerationRequest, task: str, attempt: Attempt) -> CheckOutcome:
    attempts = (*_tried(job), attempt)
    to = None if attempt.accepted else next_step(request.route, attempts, request.max_cost_s)
    return CheckOutcome(task, attempts, to)


def _tried(job: JsonJob) -> tuple[Attempt, ...]:
    """The attempts before this run; none if those in the hash are of an earlier job with this id, or unreadable."""
    noted_at, _, text = job.tried.partition(" ")
    if not text or noted_at != job.raw_created_at:
        return ()
    try:
        return tuple(Attempt.model_validate(attempt) for attempt in read_json(text.encode()))
    except (ValueError, TypeError, RecursionError):
        return ()


def count(verdict: CheckOutcome) -> Sequence[Any]:
    """The `count` command of `run.lua` for the last attempt; the earlier ones are counted already."""
    attempt = verdict.attempts[-1]
    return ("count", TRUST_KEY, field_of(attempt.model, verdict.task), int(attempt.accepted), KEPT, MOST_PAIRS)


def escalation(run: JobRun, verdict: CheckOutcome, to: RouteStep) -> Sequence[Sequence[Any]]:
    """The commands that put a job at the front of the next model's queue. The push, which may be refused, is first."""
    job = run.job
    # In RQ's own form, because a retry or RQ's requeue rewrites it so, and FIELD_TRIED must still match it.
    created_at = utcformat(job.created_at)
    attempts = json.dumps([attempt.model_dump(mode="json") for attempt in verdict.attempts])
    queue_key = Queue(to.queue, connection=job.connection).key
    moved = ("status", JobStatus.QUEUED, "origin", to.queue, "created_at", created_at)
    commands: list[Sequence[Any]] = [
        ("LPUSH", queue_key, job.id),
        ("SADD", Queue.redis_queues_keys, queue_key),
        ("HSET", job.key, *moved, FIELD_TRIED, f"{created_at} {attempts}"),
        count(verdict),
    ]
    return [*commands, ("EXPIRE", job.key, job.ttl)] if job.ttl and job.ttl > 0 else commands

"""Judges the answer of a job with a check; if it fails, sends the job on to the next model. Owns no state; any thread.

The job keeps its id, so its ticket, its times to live, its stream and the jobs that wait for it need nothing else. One
script checks that the run is still ours, ends it, notes the attempt, counts the verdict, and puts the id in front of
the next model's queue. So a job moves once and a verdict counts once, whichever worker is killed and whichever reply
is lost.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from redis import Redis
from redis.client import Pipeline
from rq.executions import ExecutionRegistry
from rq.queue import Queue
from rq.registry import StartedJobRegistry
from rq.utils import utcformat

from stoker_shared.agents import AgentRequest
from stoker_shared.check import rejection
from stoker_shared.errors import BlockPoolTooSmall, ContextLimitExceeded, OwnershipLost
from stoker_shared.job_data import read_json
from stoker_shared.request import GenerationRequest
from stoker_shared.result import Attempt, Choice
from stoker_shared.route import RouteStep, next_step
from stoker_shared.trust import KEPT, MOST_PAIRS, class_of_verdicts, field_of, task_of
from stoker_shared.wire import FIELD_TRIED, TRUST_KEY
from stoker_worker.queue.client import lua
from stoker_worker.queue.json_job import OF_THE_RUN, JobRun, JsonJob
from stoker_worker.queue.ownership import Ownership

_TOO_LONG: Final = (ContextLimitExceeded, BlockPoolTooSmall)
"""Another model may have room for such a job."""

_TRIES: Final = 3

_COUNT_ONE: Final = lua("count") + "count(KEYS[1], unpack(ARGV))"


@dataclass(frozen=True)
class CheckOutcome:
    """The result of a job's check of its answer.

    Attributes:
        task: the class under which it counts.
        attempts: all of the job, the last one that of this run; none for a job without a check.
        next: the model to ask now, because the answer is rejected; ``None``: the job ends.
    """

    task: str
    attempts: tuple[Attempt, ...]
    next: RouteStep | None

    def as_fields(self) -> dict[str, Any]:
        """The fields of the result."""
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
    """The verdict on an answer; ``None`` for a job whose answers nobody judges.

    Args:
        result: as JSON.
    """
    if isinstance(request, AgentRequest) or (task := class_of_verdicts(request)) is None:
        return None
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
    """The verdict on a job that is too long for this model; ``None`` after any other error, and at the last model."""
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
    """The attempts so far; none if those in the hash are an earlier job's with this id, or cannot be read."""
    noted_at, _, text = job.tried.partition(" ")
    if not text or noted_at != job.raw_created_at:
        return ()
    try:
        return tuple(Attempt.model_validate(attempt) for attempt in read_json(text.encode()))
    except (ValueError, TypeError, RecursionError):
        return ()


class Cascade:
    """Carries verdicts out."""

    def __init__(self, connection: Redis, ownership: Ownership) -> None:
        self._connection = connection
        self._ownership = ownership
        self._count = connection.register_script(_COUNT_ONE)
        self._go_on = connection.register_script(lua("holds", "count", "go_on"))

    def count(self, pipeline: Pipeline, verdict: CheckOutcome) -> None:
        """Count it with the transaction that ends the job; the earlier attempts are counted already."""
        if verdict.attempts:
            self._count(keys=[TRUST_KEY], args=_as_counted(verdict), client=pipeline)

    def go_on(self, run: JobRun, verdict: CheckOutcome, to: RouteStep) -> None:
        """End this run, count its verdict, and enqueue the job for the next model.

        Raises:
            OwnershipLost: the run is not ours (any more).
            RedisError: it may have been done or not; another call finds out.
        """
        for _ in range(_TRIES):
            if self._has_moved(run, verdict, to):
                return
            if self._ownership.of(run) != "ours":  # it puts the hash right if the same delivery was sent twice
                break
        raise OwnershipLost(f"job {run.job.id} is no longer this worker's, or has ended already")

    def _has_moved(self, run: JobRun, verdict: CheckOutcome, to: RouteStep) -> bool:
        job, execution, lease = run.job, run.execution, self._ownership.lease
        # In RQ's form, to which a retry or RQ's own requeue brings it: the attempts are this job's, and stay so.
        created_at = utcformat(job.created_at)
        attempts = json.dumps([attempt.model_dump(mode="json") for attempt in verdict.attempts])
        keys = [
            *(*lease.keys, job.key, execution.key),
            StartedJobRegistry(job.origin, connection=self._connection).key,
            ExecutionRegistry(job.id, connection=self._connection).key,
            execution.worker_executions_key,
            Queue.redis_queues_keys,
            Queue(to.queue, connection=self._connection).key,
            TRUST_KEY,
        ]
        args = [
            *(*lease.args, job.id, execution.id, execution.composite_key, to.queue, created_at),
            *(FIELD_TRIED, f"{created_at} {attempts}", job.ttl or 0),
            *_as_counted(verdict),
            *OF_THE_RUN,
        ]
        return bool(self._go_on(keys=keys, args=args))


def _as_counted(verdict: CheckOutcome) -> list[str | int | float]:
    attempt = verdict.attempts[-1]
    return [field_of(attempt.model, verdict.task), int(attempt.accepted), KEPT, MOST_PAIRS]

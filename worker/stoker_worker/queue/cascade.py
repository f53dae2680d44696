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
from stoker_shared.checking import rejection
from stoker_shared.errors import BlockPoolTooSmall, ContextLimitExceeded, OwnershipLost
from stoker_shared.job_data import read_json
from stoker_shared.request import GenerationRequest
from stoker_shared.result import Attempt, Choice
from stoker_shared.route import RouteStep, next_step
from stoker_shared.trust import KEPT, MOST_PAIRS, class_of_verdicts, field_of, task_of
from stoker_shared.wire import FIELD_TRIED, TRUST_KEY
from stoker_worker.queue.json_job import OF_THE_RUN, JobRun, JsonJob
from stoker_worker.queue.lease_scripts import HOLDS
from stoker_worker.queue.ownership import Ownership

_TOO_LONG: Final = (ContextLimitExceeded, BlockPoolTooSmall)
"""Another model may have room for such a job."""

_TRIES: Final = 3

# As `Counts.parsed` and `Counts.after`: anybody can write anything into the counts.
_COUNT: Final = """
local function count(counts, field, accepted, kept, most_pairs)
  local found = redis.pcall('HGET', counts, field)
  if not found and redis.call('HLEN', counts) >= tonumber(most_pairs) then return end
  local yes, no = string.match(type(found) == 'string' and found or '', '^([%d.]+) ([%d.]+)$')
  yes, no = (tonumber(yes) or 0) * kept + accepted, (tonumber(no) or 0) * kept + 1 - accepted
  redis.pcall('HSET', counts, field, string.format('%.4f %.4f', yes, no))
end
"""
_COUNT_ONE: Final = _COUNT + "count(KEYS[1], unpack(ARGV))"

# The push comes first: it may be refused, because of what the key holds, and then nothing has changed. The attempts
# that a lost reply was about are those in the hash, or the first of them, after the next model's answer.
_GO_ON: Final = (
    HOLDS
    + _COUNT
    + """
if not holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
local job, execution, started, executions, of_worker, queues, queue = unpack(KEYS, 3, 9)
local job_id, execution_id, member, origin, created_at, field, tried, ttl_s = unpack(ARGV, 4, 11)
if redis.call('EXISTS', execution) == 0 then
  local found = redis.pcall('HGET', job, field)
  return type(found) == 'string' and string.sub(found, 1, #tried - 1) == string.sub(tried, 1, -2) and 1 or 0
end
if redis.pcall('HGET', job, 'status') ~= 'started' then return 0 end
redis.call('LPUSH', queue, job_id)
redis.pcall('SADD', queues, queue)
redis.call('HSET', job, 'status', 'queued', 'origin', origin, 'created_at', created_at, field, tried)
redis.call('HDEL', job, 'worker_name', unpack(ARGV, 16))
if tonumber(ttl_s) > 0 then redis.call('EXPIRE', job, ttl_s) end
redis.call('DEL', execution)
redis.pcall('ZREM', started, member)
redis.pcall('ZREM', executions, execution_id)
redis.pcall('SREM', of_worker, member)
count(KEYS[10], unpack(ARGV, 12, 15))
return 1
"""
)


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
        self._go_on = connection.register_script(_GO_ON)

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

"""Judges an answer by its job's check, and sends the job on to the next model of its route. Finisher threads.

A rejected answer that another model replaces is never saved: it is no turn of its agent.
"""

from functools import partial
from typing import Final

from stoker_shared.checking import rejection
from stoker_shared.errors import BlockPoolTooSmall, ContextLimitExceeded
from stoker_shared.request import GenerationRequest
from stoker_shared.result import Attempt, Choice
from stoker_shared.route import next_step
from stoker_worker.events import log_job
from stoker_worker.pipeline.answer import Answer
from stoker_worker.pipeline.job import Job
from stoker_worker.pipeline.patience import Patience
from stoker_worker.ports import CompletedGeneration, LoadedModel, MetricsPort

_TOO_LONG: Final = (ContextLimitExceeded, BlockPoolTooSmall)
"""Another model may have room for such a job."""


class Escalating:
    """Each call returns whether the job left this worker; then nothing of it is left to do here."""

    def __init__(self, redis: Patience, metrics: MetricsPort) -> None:
        self._redis = redis
        self._metrics = metrics

    def after_answer(self, job: Job, completion: CompletedGeneration, answer: Answer, model: LoadedModel) -> bool:
        """Sets `job.attempt` if the job has a check."""
        check = job.request.check
        if check is None:
            return False
        reason = rejection(check, Choice(**answer.fields(), logprobs=completion.logprobs))
        job.attempt = Attempt(
            model=model.name,
            accepted=reason is None,
            reason=reason,
            prompt_tokens=len(job.prompt.ids),
            completion_tokens=len(completion.generated_ids),
            seconds=round(completion.timing.prefill_s + completion.timing.decode_s, 6),
        )
        n_prefilled = len(job.prompt.ids) - completion.cached_tokens
        return reason is not None and self._go_on(job, job.request, job.attempt, n_prefilled)

    def after_error(self, job: Job, error: Exception, model: LoadedModel) -> bool:
        request = job.claimed.request
        if not isinstance(error, _TOO_LONG) or not isinstance(request, GenerationRequest):
            return False
        return self._go_on(job, request, Attempt(model=model.name, accepted=False, reason=type(error).__name__), 0)

    def _go_on(self, job: Job, request: GenerationRequest, rejected: Attempt, n_prefilled: int) -> bool:
        step = next_step(request.route, (*job.claimed.tried, rejected), request.max_cost_s)
        if step is None:
            return False
        if not self._redis.wait(partial(job.claimed.escalate, rejected, step)):
            self._redis.wait(job.claimed.stop)
            self._metrics.ended("withdrawn")
            log_job("cancelled", job.job_id)
            return True
        self._metrics.escalated(n_prefilled)
        condition = (rejected.reason or "").partition(":")[0]  # the rest may quote the request
        log_job("escalated", job.job_id, agent=request.agent_id, reason=condition, to=step.model)
        return True

"""The result of a generated turn: saved with the turn, and built from what happened to the job. Finisher threads.

Decides the end of a job whose save fails: an `append` turn fails too, any other is answered all the same, once it is
noted that its turn is missing.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stoker_shared.errors import AgentVersionConflict, AgentVersionNotSaved, SharedStoreAway, VersionTaken
from stoker_shared.result import CacheReport, Choice, GenerationResult, Timing, Usage
from stoker_worker.pipeline.answer import Answer, read_answer
from stoker_worker.pipeline.job import Job
from stoker_worker.pipeline.prompt import next_transcript, replaced_version
from stoker_worker.ports import AgentVersion, CacheStorePort, CompletedGeneration, LoadedModel, Turn
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

log = logging.getLogger(__name__)


def build_result(
    job: Job, completion: CompletedGeneration, answers: Sequence[Answer], model: LoadedModel, cache: CacheReport
) -> GenerationResult:
    """The result as of now: `total_s` counts up to this call. There is an answer for each choice."""
    completions = (completion, *job.further_choices)
    choices = [
        Choice(**answer.fields(), logprobs=one.logprobs) for answer, one in zip(answers, completions, strict=True)
    ]
    claimed, timing = job.claimed, completion.timing
    first_token_at = job.submitted_at + timing.waited_s + timing.prefill_s
    return GenerationResult(
        job_id=claimed.job_id,
        agent_id=job.request.agent_id,
        **dict(choices[0]),
        usage=Usage(
            prompt_tokens=len(job.prompt.ids),
            cached_tokens=completion.cached_tokens,
            completion_tokens=sum(len(one.generated_ids) for one in completions),
            reasoning_tokens=sum(answer.reasoning_tokens for answer in answers),
        ),
        cache=cache,
        timing=Timing(
            queued_s=_seconds(claimed.claimed_at - claimed.enqueued_at),
            prefill_s=_seconds(timing.prefill_s),
            first_token_s=_seconds(first_token_at - claimed.enqueued_at),
            decode_s=_seconds(max(_ended_after_s(one) for one in completions) - timing.waited_s - timing.prefill_s),
            total_s=_seconds(time.time() - claimed.enqueued_at),
        ),
        model=model.name,
        attempt=claimed.attempt,
        prompt_logprobs=completion.prompt_logprobs,
        choices=choices if job.request.n > 1 else None,
        metadata=job.request.metadata,
    )


def _ended_after_s(completion: CompletedGeneration) -> float:
    """From its submission to the engine."""
    timing = completion.timing
    return timing.waited_s + timing.prefill_s + timing.decode_s


def with_total_until_now(result: Mapping[str, Any], job: Job) -> Mapping[str, Any]:
    """The same result (as JSON), with `total_s` extended to include the save; the stored copy was built before it."""
    return {**result, "timing": {**result["timing"], "total_s": _seconds(time.time() - job.claimed.enqueued_at)}}


def cache_report(
    job: Job,
    completion: CompletedGeneration,
    *,
    agent_version: int | None,
    saved: bool,
    save_error: str | None = None,
) -> CacheReport:
    """
    Args:
        saved: whether the turn is the agent's `agent_version`; then it may have replaced another conversation.
    """
    restored, agent = job.restored, job.agent
    # A restored prefix is lost when a step breaks: the sequence then begins again from its tokens.
    is_lost = restored.source != "none" and completion.cached_tokens == 0
    from_the_batch = restored.source == "none" and completion.cached_tokens > 0
    return CacheReport(
        source="none" if is_lost else "memory" if from_the_batch else restored.source,
        miss_reason=job.prompt.rendered_anew or ("step_broke" if is_lost else restored.miss_reason),
        agent_version=agent_version,
        saved=saved,
        save_error=save_error,
        replaced_version=replaced_version(job.prompt, agent) if saved and agent is not None else None,
    )


def _seconds(value: float) -> float:
    # The producer's clock is another machine's: a job from the future has waited no time, not a negative one.
    return round(max(0.0, value), 6)


def read_answers(job: Job, completion: CompletedGeneration, model: LoadedModel) -> list[Answer]:
    """One for each choice."""
    seed = repr(job.claimed.delivery)
    return [
        read_answer(job.request, job.prompt, one, model, f"{seed} {number}" if number else seed)
        for number, one in enumerate((completion, *job.further_choices))
    ]


def save_turn(
    job: Job, completion: CompletedGeneration, answers: Sequence[Answer], store: CacheStorePort, model: LoadedModel
) -> Mapping[str, Any]:
    """The result, as JSON.

    Raises:
        AgentVersionNotSaved: an `append` turn could not be saved, or one that waited for the shared store; or another
            one, and not even that could be noted.
        VersionTaken: another worker, or a command of the shell, has changed the agent meanwhile.
        SharedStoreAway: it may be saved or not.
    """
    agent, request = job.agent, job.request

    def result(version: int | None, saved: bool, save_error: str | None = None) -> Mapping[str, Any]:
        report = cache_report(job, completion, agent_version=version, saved=saved, save_error=save_error)
        return build_result(job, completion, answers, model, report).model_dump(mode="json")

    if agent is None:
        _save_shared(job, completion, store, model)
        return result(None, saved=False)
    if request.cache != "readwrite":
        return result(_number_of(agent), saved=False)
    turn = Turn(
        base=agent,
        delivery=job.claimed.delivery,
        transcript=next_transcript(job.prompt, completion, answers[0].message(), model),
        model=model,
        cache_salt=job.salt,
        cache=completion.cache,
        result=result(agent.number + 1, saved=True),
    )
    try:
        return store.save(turn)
    except AgentVersionConflict as error:
        raise VersionTaken(str(error)) from error
    except (VersionTaken, SharedStoreAway):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if request.context == "append" or job.waits_since is not None:
            raise AgentVersionNotSaved(reason) from error
        try:
            store.mark_unsaved(agent.agent_id)
        except OSError as not_noted:
            raise AgentVersionNotSaved(f"{reason}; and it cannot be noted: {not_noted}") from error
        return result(_number_of(agent), saved=False, save_error=reason)


def _number_of(agent: AgentVersion) -> int | None:
    return agent.known_number if agent.known_number > 0 else None


def _save_shared(job: Job, completion: CompletedGeneration, store: CacheStorePort, model: LoadedModel) -> None:
    """Save the beginning that other jobs without an agent have too. Its loss costs them time only."""
    cache, n_shared = completion.cache, job.restored.shared_blocks * BLOCK_TOKENS
    if cache is None or not cache.start < n_shared <= cache.stop:
        return
    try:
        store.save_blocks(job.prompt.ids[:n_shared], cache, model=model, salt=job.salt)
    except Exception as error:
        log.info("job %s: its blocks are not saved: %s: %s", job.job_id, type(error).__name__, error)

"""Builds the result of a job out of what happened to it. Pure; finaliser thread."""

from stoker_shared.result import CacheReport, GenerationResult, Timing, Usage
from stoker_worker.conversation import replaced_version
from stoker_worker.loader import Prepared
from stoker_worker.ports import ClaimedJob, Completion, LoadedModel


def build_result(
    job: ClaimedJob, prepared: Prepared, completion: Completion, model: LoadedModel, cache: CacheReport
) -> GenerationResult:
    """The result to post; only a finished completion has one."""
    assert completion.ended_by is not None
    timing = completion.timing
    in_engine_s = timing.waited_s + timing.prefill_s + timing.decode_s
    ended_at = prepared.submitted_at + in_engine_s
    return GenerationResult(
        job_id=job.job_id,
        agent_id=job.request.agent_id,
        text=completion.text,
        finish_reason="length" if completion.ended_by == "length" else "stop",
        usage=Usage(
            prompt_tokens=len(prepared.work.prompt_ids),
            cached_tokens=completion.cached_tokens,
            completion_tokens=len(completion.generated_ids),
        ),
        cache=cache,
        timing=Timing(
            queued_s=_seconds(job.claimed_at - job.enqueued_at),
            prefill_s=_seconds(timing.prefill_s),
            first_token_s=_seconds(ended_at - timing.decode_s - job.enqueued_at),
            decode_s=_seconds(timing.decode_s),
            total_s=_seconds(ended_at - job.enqueued_at),
        ),
        model=model.name,
        attempt=job.attempt,
        logprobs=completion.logprobs,
        metadata=prepared.work.request.metadata,
    )


def cache_report(
    prepared: Prepared,
    completion: Completion,
    *,
    agent_version: int | None,
    saved: bool = False,
    save_error: str | None = None,
) -> CacheReport:
    """`saved`: as `agent_version`, which then may have replaced another's conversation."""
    restored, agent = prepared.restored, prepared.agent
    # What was restored is lost when a step breaks: the row then begins again from its tokens.
    is_lost = restored.source != "none" and completion.cached_tokens == 0
    return CacheReport(
        source="none" if is_lost else restored.source,
        miss_reason=prepared.prompt.rendered_anew or ("step_broke" if is_lost else restored.miss_reason),
        agent_version=agent_version,
        saved=saved,
        save_error=save_error,
        replaced_version=replaced_version(prepared.prompt, agent) if saved and agent is not None else None,
    )


def _seconds(value: float) -> float:
    # The producer's clock is another machine's: a job from the future has waited no time, not a negative one.
    return round(max(0.0, value), 6)

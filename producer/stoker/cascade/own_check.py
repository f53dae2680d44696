"""Asks one model after the other until a function of the caller's own accepts an answer. Owns nothing.

A check that a job carries is evaluated where the answer is made, and needs nobody to wait. This is for checks that only
the caller can make: each model's answer is a job of its own, and the caller has to live until the end.
"""

from collections.abc import Callable, Sequence
from typing import Any

from stoker.producer import Producer
from stoker_shared.errors import InvalidRequest
from stoker_shared.result import Attempt, GenerationResult


def first_accepted(
    producer: Producer,
    accept: Callable[[GenerationResult], bool],
    *,
    models: Sequence[str],
    min_trust: float | None = None,
    timeout_s: float | None = None,
    **fields: Any,
) -> GenerationResult:
    """The first answer that `accept` accepts, else that of the last model. Each verdict counts for its model.

    Args:
        models: the cheapest first; the first of them that is trusted, or tried, is asked first.
        min_trust: as for `Producer.submit`.
        timeout_s: how long to wait for each answer, in seconds; ``None`` for no limit.
        fields: as for `Producer.submit`, without `job_id`.

    Raises:
        InvalidRequest: a field is wrong, or the job would write an agent's memory.
        NobodyServes: no live worker serves one of the models.
        JobFailed, JobCanceled, JobNotFound, ResultTimeout, RedisUnavailable: as `Ticket.result`.
    """
    if "job_id" in fields:
        raise InvalidRequest("job_id: each model's answer is a job of its own, and has its own id")
    if isinstance(models, str):
        raise InvalidRequest("models: a list of names")
    left, attempts = list(models), []
    while True:
        ticket = producer.submit(**fields, models=left, min_trust=min_trust)
        result = ticket.result(timeout_s)
        accepted = bool(accept(result))
        ticket.feedback(accepted=accepted)
        usage, timing = result.usage, result.timing
        attempts.append(
            Attempt(
                model=result.model,
                accepted=accepted,
                reason=None if accepted else "rejected by the caller",
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                seconds=round(timing.prefill_s + timing.decode_s, 6),
            )
        )
        left = left[left.index(result.model) + 1 :]
        if accepted or not left:
            return result.model_copy(update={"attempts": attempts})

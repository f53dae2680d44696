"""The result of a generation job. Plain data; written by the worker, read by producers."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """A result or a part of one. A producer may be older than the worker, so unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Usage(Record):
    """Token counts. `cached_tokens` are the prompt tokens whose cache was reused, so that they were not prefilled."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class CacheReport(Record):
    """How this job used the agent's memory.

    Attributes:
        source: where the reused prefix came from. ``memory`` also if a job that was running had computed it.
        miss_reason: why less was reused than the agent's history allowed, in a word or two; ``None`` if all was reused.
        agent_version: the agent's version after this job; ``None`` when it has none.
        saved: whether this job's turn is durable as that version.
        save_error: why the turn is not saved although it should be, else ``None``.
        replaced_version: the version whose conversation this turn replaced instead of continuing it, else ``None``.
            `rollback` brings that version back.
    """

    source: Literal["memory", "disk", "none"] = "none"
    miss_reason: str | None = None
    agent_version: int | None = None
    saved: bool = False
    save_error: str | None = None
    replaced_version: int | None = None


class TopLogprob(Record):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class Logprobs(Record):
    """OpenAI's chat form: one entry per generated token."""

    content: list[TokenLogprob] = Field(default_factory=list)


class Timing(Record):
    """Seconds. From enqueueing: `queued_s` to the claim, `first_token_s` to the first token, `total_s` until the result
    is posted.

    `prefill_s` is from entering the batch to the first token, `decode_s` from there to the end of the sequence. The
    rest of `first_token_s` is loading the agent's memory and waiting for the engine and for room in the batch; the
    rest of `total_s` is the save. An answer from the agent's history has the times of its first delivery, with a
    `total_s` that ends before the save.
    """

    queued_s: float
    prefill_s: float
    first_token_s: float
    decode_s: float
    total_s: float


class GenerationResult(Record):
    """The return value of a finished job.

    Attributes:
        text: the generated text, exactly as its tokens decode (leading white space kept), without end-of-sequence
            tokens and without the stop string.
        finish_reason: ``stop`` (end of sequence or a stop string) or ``length`` (`max_tokens`).
        model: the loaded model's name.
        attempt: 1, or more if a worker was lost with this job in flight.
    """

    job_id: str
    agent_id: str | None = None
    text: str
    finish_reason: Literal["stop", "length"]
    usage: Usage
    cache: CacheReport
    timing: Timing
    model: str
    attempt: int = 1
    logprobs: Logprobs | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

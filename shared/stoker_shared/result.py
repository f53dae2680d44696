"""The result: what a finished job returns. Plain data; written by the worker, read by producers."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Record(BaseModel):
    # Results are read by producers older than the worker that wrote them, so unknown fields are ignored here.
    model_config = ConfigDict(frozen=True, extra="ignore")


class Usage(_Record):
    """Token counts. `cached_tokens` is what was really not prefilled again."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class CacheReport(_Record):
    """What the agent's memory did for this job.

    Attributes:
        source: where the reused prefix came from.
        miss_reason: why less was reused than the agent's history allowed, in a word or two; ``None`` if nothing was
            missed.
        agent_version: the agent's version after this job; ``None`` when it has none.
        saved: whether this job's turn is durable as that version.
        save_error: why not, when it should have been.
        replaced_version: the version whose conversation this turn did not continue but replaced; ``None`` when it went
            on from it. `rollback` brings that version back.
    """

    source: Literal["memory", "disk", "none"] = "none"
    miss_reason: str | None = None
    agent_version: int | None = None
    saved: bool = False
    save_error: str | None = None
    replaced_version: int | None = None


class TopLogprob(_Record):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class Logprobs(_Record):
    """OpenAI's chat form: one entry per generated token."""

    content: list[TokenLogprob] = Field(default_factory=list)


class Timing(_Record):
    """Seconds. From enqueueing: `queued_s` to the claim, `first_token_s` to the first token, `total_s` to the end.

    `prefill_s` is from entering the batch to the first token, `decode_s` from there to the end. What `total_s` has
    beside them is waiting: for the claim, the loading of the agent's memory, and room in the batch.
    """

    queued_s: float
    prefill_s: float
    first_token_s: float
    decode_s: float
    total_s: float


class GenerationResult(_Record):
    """The return value of a finished job.

    Attributes:
        text: the generated text, exactly as its tokens decode (leading white space kept), without end-of-sequence
            tokens and without the stop string.
        finish_reason: ``stop`` (end of sequence or a stop string) or ``length`` (`max_tokens`).
        attempt: 1, or more after a worker died with this job in flight.
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

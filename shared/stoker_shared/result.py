"""The result of a generation job. Plain data; written by the worker, read by producers."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """A result or a part of one. A producer may be older than the worker, so unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Usage(Record):
    """Token counts. `cached_tokens` are the prompt tokens whose cache was reused instead of prefilled.
    `completion_tokens` are those of all choices, and `reasoning_tokens` the part of them that is thinking."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


class CacheReport(Record):
    """How this job used the agent's memory.

    Attributes:
        source: where the reused prefix came from; ``memory`` also if a running job had computed it.
        miss_reason: why less was reused than the agent's history allowed, in a word or two; ``None`` if all was reused.
        agent_version: the agent's version after this job; ``None`` if it has none.
        saved: whether this job's turn is durable as that version.
        save_error: why the turn, or the cache of a turn that is `saved`, could not be saved, else ``None``.
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


class PromptLogprobs(Record):
    """Log-probabilities of the prompt's tokens, each given the tokens before it.

    Attributes:
        start: index in the prompt of the first token.
        content: one entry per token; ``None`` for the prompt's very first token, which nothing predicts.
    """

    start: int = 0
    content: list[TokenLogprob | None] = Field(default_factory=list)


class ReturnedPrompt(Record):
    """All tokens of the prompt as the model read it, with the agent's history and the chat template. `text` is the
    tokens decoded, with control tokens."""

    text: str
    token_ids: list[int]


class CalledFunction(Record):
    """`arguments` is JSON text, as at OpenAI."""

    name: str
    arguments: str


class ToolCall(Record):
    """A tool call that the model asks for, in OpenAI's form. A `tool` message refers to its `id`."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


FinishReason = Literal["stop", "length", "tool_calls"]


class Choice(Record):
    """One answer.

    Attributes:
        text: the generated text, exactly as its tokens decode (leading white space kept), without end-of-sequence
            tokens and without the stop string.
        answer: the text without thinking and tool calls; ``None`` if that is `text` itself (see `content`).
        reasoning: the model's thinking, without its markers; ``None`` if there is none.
        tool_calls: ``None`` if there are none.
        tool_error: why text that looks like a tool call is not in `tool_calls`; that text is then part of `answer`.
        parsed: the value of a JSON answer asked for with `response_format`, if the answer is complete.
        finish_reason: ``stop`` (end of sequence, a stop string or stop token), ``length`` (`max_tokens`) or
            ``tool_calls``.
        stop_string: the one of `stop` that ended the answer, else ``None``.
    """

    text: str
    finish_reason: FinishReason
    answer: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_error: str | None = None
    parsed: Any = None
    stop_string: str | None = None
    logprobs: Logprobs | None = None

    @property
    def content(self) -> str:
        """The text without thinking and without tool calls."""
        return self.text if self.answer is None else self.answer


class Timing(Record):
    """Seconds. From enqueueing: `queued_s` to the claim, `first_token_s` to the first token, `total_s` to the posted
    result.

    `prefill_s` is from entering the batch to the first token, `decode_s` from there to the end of the sequence. The
    rest of `first_token_s` is loading the agent's memory and waiting for the engine and for room in the batch; the rest
    of `total_s` is the save. An answer taken from the agent's history has the times of its first delivery, with a
    `total_s` that ends before the save.
    """

    queued_s: float
    prefill_s: float
    first_token_s: float
    decode_s: float
    total_s: float


class Attempt(Record):
    """One model's answer to a job with a check, and the verdict on it.

    Attributes:
        reason: why it was rejected, else ``None``.
        seconds: time in the batch: prefill and decode.
    """

    model: str
    accepted: bool
    reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0


class GenerationResult(Choice):
    """The return value of a finished job, with the fields of its first choice.

    Attributes:
        model: the loaded model's name.
        attempt: 1, or more if workers were lost with this job in flight.
        prompt: of a job with `return_prompt`, else ``None``.
        choices: all choices of a job with `n` above 1, else ``None``.
        task: the class under which verdicts count, of a job with a check, a route or a `task`; else ``None``.
        attempts: of a job with a check: what each model did, in order; this answer is the last one's. Else ``None``.
    """

    job_id: str
    agent_id: str | None = None
    usage: Usage
    cache: CacheReport
    timing: Timing
    model: str
    attempt: int = 1
    prompt: ReturnedPrompt | None = None
    prompt_logprobs: PromptLogprobs | None = None
    choices: list[Choice] | None = None
    task: str | None = None
    attempts: list[Attempt] | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    @property
    def accepted(self) -> bool | None:
        """True if the answer passed the job's check; ``None`` without one."""
        return self.attempts[-1].accepted if self.attempts else None

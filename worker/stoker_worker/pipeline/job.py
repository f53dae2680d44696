"""The object that carries a job from its claim to its end, and the outcomes of a job. No I/O.

A stage owns the job while it has it: it fills in its part, and hands the job to the next stage with `put`. No other
thread writes to it; the claimed job inside is safe for any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from stoker_shared.agents import AgentRequest
from stoker_shared.errors import EngineFailed, GenerationTimedOut
from stoker_shared.request import GenerationRequest
from stoker_shared.text import one_line
from stoker_worker.pipeline.prompt import Prompt
from stoker_worker.ports import AgentVersion, AnswerGuide, CancelToken, ClaimedJob, CompletedGeneration, Restored

NOTHING_RESTORED = Restored(prefix=None, source="none")


@dataclass(eq=False)
class Job:
    """A claimed job and all that this worker knows of it.

    Attributes:
        agent: ``None`` for a job that uses no agent's memory.
        salt: part of the addresses of its cached blocks.
        is_saved, shares, guide: as in `GenerationWork`.
        has_next: the loader had its next job already when it put this one into the engine.
        submitted_at: Unix time at which the engine took it.
        further_choices: of a job with several choices, the ends of the sequences after the first, in their order.
        filled_in: its request with the worker's defaults and the limit that fits, once the loader has set them.
        waits_since: `time.monotonic()` at which the shared store was first away when its turn was to be saved.
    """

    claimed: ClaimedJob
    agent: AgentVersion | None = None
    prompt: Prompt = field(default=Prompt((), None, None), repr=False)
    restored: Restored = field(default=NOTHING_RESTORED, repr=False)
    salt: str | None = None
    is_saved: bool = False
    shares: tuple[str | None, ...] | None = None
    guide: AnswerGuide | None = field(default=None, repr=False)
    has_next: bool = False
    submitted_at: float = 0.0
    further_choices: tuple[CompletedGeneration, ...] = ()
    filled_in: GenerationRequest | None = field(default=None, repr=False)
    waits_since: float | None = None

    @property
    def job_id(self) -> str:
        return self.claimed.job_id

    @property
    def cancel(self) -> CancelToken:
        return self.claimed.cancel

    @property
    def request(self) -> GenerationRequest:
        """The request of a job that generates."""
        if self.filled_in is not None:
            return self.filled_in
        assert isinstance(self.claimed.request, GenerationRequest)
        return self.claimed.request

    @property
    def changed_agent(self) -> str | None:
        """The agent that the job is about, or for a fork, makes."""
        request = self.claimed.request
        return request.changed_agent if isinstance(request, AgentRequest) else request.agent_id

    def drop_arrays(self) -> None:
        """Drop the restored cache, once the engine has taken it over."""
        self.restored = replace(self.restored, prefix=None)


@dataclass(frozen=True)
class Finished:
    """Its sequences ended by themselves."""

    completion: CompletedGeneration


@dataclass(frozen=True)
class Failed:
    """It cannot be done, or it timed out: then `partial_text` is the text generated so far."""

    error: Exception
    partial_text: str | None = None

    @classmethod
    def by(cls, error: BaseException) -> Self:
        """For any error of a job's own. A panic in a Rust library, such as tokenizers, is not an `Exception`."""
        return cls(error if isinstance(error, Exception) else RuntimeError(one_line(error)))


@dataclass(frozen=True)
class Cancelled:
    """It was canceled, stopped or deleted."""


@dataclass(frozen=True)
class Replayed:
    """The agent's history has the answer to this delivery already."""

    answer: Mapping[str, Any]


@dataclass(frozen=True)
class GivenBack:
    """This worker cannot go on with it: it goes back to the queue. `counts_as_attempt`: the engine broke with it."""

    counts_as_attempt: bool


@dataclass(frozen=True)
class RunsAgain:
    """It goes back to the queue at once, without using up an attempt: the shared store does not answer, or another
    worker has made the agent's next version."""

    why: Exception


@dataclass(frozen=True)
class AgentChange:
    """It is about an agent's memory, and the finisher is to carry it out."""

    request: AgentRequest


Outcome = Finished | Failed | Cancelled | Replayed | GivenBack | RunsAgain | AgentChange


def outcome_of(job: Job, completion: CompletedGeneration) -> Outcome:
    """The outcome of a job whose sequence has left the engine."""
    if completion.outcome == "finished":
        return Finished(completion)
    if completion.outcome == "failed":
        return Failed(completion.error or EngineFailed("unknown"))
    return cut_short(job, completion)


def cut_short(job: Job, completion: CompletedGeneration | None = None) -> Outcome:
    """The outcome of a job that was cancelled. `completion`: its sequence so far, if it was in the engine."""
    match job.cancel.reason:
        case "stopping":
            return GivenBack(counts_as_attempt=False)
        case "timed out":
            ended = (completion, *job.further_choices) if completion else ()
            tokens = sum(len(one.generated_ids) for one in ended)
            error = GenerationTimedOut(f"the job's timeout passed after {tokens} generated tokens")
            return Failed(error, partial_text=completion.text if completion else "")
        case "withdrawn" | None:
            return Cancelled()

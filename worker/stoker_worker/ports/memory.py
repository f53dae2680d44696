"""The interface of agent memory: versions, turns, and the store that keeps them. No I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from stoker_shared.agent_request import AgentRequest
from stoker_shared.agent_result import AgentResult
from stoker_shared.request import Message
from stoker_worker.ports.engine import CacheSlice, EndedBy, RestoredPrefix
from stoker_worker.ports.model import LoadedModel


@dataclass(frozen=True)
class Delivery:
    """One enqueue of one job. Recovery and requeueing keep it; RQ's Repeat and a reused id make a new one.

    Attributes:
        created_at: from the job's hash; empty when its enqueuer wrote none.
        request: digest of the request; empty in records older than store format 3.
    """

    job_id: str
    created_at: str
    repeats_left: int | None = None
    request: str = ""


@dataclass(frozen=True)
class Transcript:
    """An agent's conversation up to a version. Small, and never evicted: it is the truth.

    Attributes:
        token_ids: every token, as the model saw or made it.
        tokenizer_fingerprint: of the tokenizer and template that the ids belong to.
        messages: the same conversation as chat messages, the model's answers included; ``None`` for raw prompts.
        text: the same conversation as text; ``None`` for chat messages.
        ended_by: how the last turn ended.
        carry_text: the end of the last answer, if `token_ids` does not cover it (see `CompletedGeneration`).
    """

    token_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    messages: tuple[Message, ...] | None
    text: str | None
    ended_by: EndedBy
    carry_text: str = ""


@dataclass(frozen=True)
class AgentVersion:
    """A state of an agent's transcript. An unknown agent is at `number` 0, without a transcript."""

    agent_id: str
    number: int
    transcript: Transcript | None
    results: Mapping[Delivery, Mapping[str, Any]] = field(default_factory=dict)
    """The result (as JSON) of every delivery in the agent's history."""

    def answer_to(self, delivery: Delivery) -> Mapping[str, Any] | None:
        """The answer that `delivery` was given, if any.

        A record without the digest of its request counts if it has the job's `created_at`. Without both, any later job
        of the same id would match, and an answer to another prompt is worse than a turn taken twice.
        """
        answer = self.results.get(delivery)
        if answer is None and delivery.created_at:
            answer = self.results.get(replace(delivery, request=""))
        return answer


@dataclass(frozen=True)
class Restored:
    """The cached prefix of a prompt, or none and the reason."""

    prefix: RestoredPrefix | None
    source: Literal["memory", "disk", "none"]
    saved_blocks: int = 0
    """Leading full blocks of the prompt that are on disk and need no second write. Verified if they were read."""
    miss_reason: str | None = None
    shared_blocks: int = 0
    """For a job without an agent: leading full blocks of the prompt that another such job's prompt had too."""


@dataclass(frozen=True)
class Turn:
    """Version `parent + 1` of an agent, to be saved.

    Attributes:
        cache: cache of [start, stop) of `transcript.token_ids`; `start` is a multiple of the block size and all
            blocks before it are on disk; ``None`` saves the transcript alone.
        result_of: returns the job's result, to remember and to answer with, for the new version's number.
    """

    agent_id: str
    parent: int
    delivery: Delivery
    transcript: Transcript
    model: LoadedModel
    cache_salt: str | None
    cache: CacheSlice | None
    result_of: Callable[[int], Mapping[str, Any]]


class CacheStorePort(Protocol):
    """Agent memory. `open_agent` and `restore` run on the loader thread, `save` on the finisher threads."""

    agent_jobs: "AgentJobsPort"
    """Carries out jobs about an agent's memory."""

    def open_agent(self, agent_id: str) -> AgentVersion:
        """The agent's newest version.

        Raises:
            AgentTranscriptUnreadable: a record is damaged, missing or foreign, or the last turn was not saved. The
                error's `.usable` is the version that `context="full"` may still continue from.
        """
        ...

    def restore(
        self,
        prompt_ids: Sequence[int],
        *,
        agent: AgentVersion | None,
        model: LoadedModel,
        salt: str | None,
        beside_others: bool = False,
    ) -> Restored:
        """The longest verified cached prefix of `prompt_ids`, at most all but its last token. Damaged, missing and
        foreign files are a miss with a reason, never an error.

        Args:
            agent: ``None`` for a job without one: it may use the blocks of its salt, and only the beginning of its
                prompt is remembered.
            beside_others: whether other sequences are running: they keep half of the cores.
        """
        ...

    def save(self, turn: Turn) -> tuple[int, Mapping[str, Any]]:
        """Make the turn durable as the agent's next version: blocks first, then the record, then HEAD.

        Returns:
            the new version's number, and the result that was saved with it.

        Raises:
            AgentVersionConflict: `turn.parent` is not the agent's newest version (any more).
            OSError: it could not be written; the agent is still at `turn.parent`.
        """
        ...

    def save_blocks(
        self, token_ids: tuple[int, ...], cache: CacheSlice, *, model: LoadedModel, salt: str | None
    ) -> None:
        """Save the full blocks of `token_ids` from `cache.start` on for other prompts that begin with these tokens. No
        agent owns them, so they are the first to be evicted.

        Raises:
            OSError: they could not be written.
        """
        ...

    def mark_unsaved(self, agent_id: str) -> None:
        """Remember that a finished turn of this agent is not in its transcript: `append` is refused from now on."""
        ...

    def pin(self, agents: frozenset[str]) -> None:
        """These agents, and no others, have work queued or running: they lose no cache. Any thread; never blocks."""
        ...

    def close(self) -> None: ...


class AgentJobsPort(Protocol):
    """Jobs about an agent's memory. Finisher threads; never two jobs of one agent at once."""

    def answer(self, request: AgentRequest, delivery: Delivery) -> AgentResult | None:
        """The answer of this delivery, if it has taken effect. Raises `OSError` when that cannot be known."""
        ...

    def run(self, request: AgentRequest, delivery: Delivery) -> AgentResult:
        """Carry the job out, durably, in one step that remembers the delivery.

        Raises:
            AgentMemoryError: it cannot be done, and nothing has changed.
            OSError: nothing has changed, or it is done and `answer` returns its result.
        """
        ...

    def ended(self, request: AgentRequest, delivery: Delivery) -> None:
        """Forget the answer that only this delivery can ask for: its end is written. Raises `OSError`."""
        ...

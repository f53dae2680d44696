"""The seam of agent memory: versions, turns, and the store that keeps them. No I/O."""

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
    """One enqueue of one job: recovery and requeueing keep it, RQ's Repeat and a reused id make a new one.

    Attributes:
        created_at: as the job's hash has it; empty where its enqueuer wrote none.
        request: digest of the request; empty in records older than store format 3.
    """

    job_id: str
    created_at: str
    repeats_left: int | None = None
    request: str = ""


@dataclass(frozen=True)
class Transcript:
    """An agent's conversation up to a version: small, the truth, never evicted.

    Attributes:
        token_ids: every token of it, as the model saw or made them.
        tokenizer_fingerprint: the tokenizer and template these ids belong to.
        messages: what the ids stand for, when the agent talks in chat messages (the model's answers included).
        text: what the ids stand for, when the agent talks in raw prompts.
        ended_by: how the last turn ended.
        carry_text: the end of the last answer that `token_ids` does not cover (see `Completion`).
    """

    token_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    messages: tuple[Message, ...] | None
    text: str | None
    ended_by: EndedBy
    carry_text: str = ""


@dataclass(frozen=True)
class AgentVersion:
    """A transcript state. `number` 0 with no transcript is an agent nobody has heard of."""

    agent_id: str
    number: int
    transcript: Transcript | None
    results: Mapping[Delivery, Mapping[str, Any]] = field(default_factory=dict)
    """Result (as JSON) of every delivery remembered in the agent's history."""

    def answer_to(self, delivery: Delivery) -> Mapping[str, Any] | None:
        """What `delivery` was answered, if it was.

        A record that does not say the request counts when it has the job's time: without one, any later job of the
        same id would be taken for it, and an answer to another prompt is worse than a turn taken twice.
        """
        answer = self.results.get(delivery)
        if answer is None and delivery.created_at:
            answer = self.results.get(replace(delivery, request=""))
        return answer


@dataclass(frozen=True)
class Restored:
    """What the store gives for a prompt: a prefix, or none and the reason."""

    prefix: RestoredPrefix | None
    source: Literal["memory", "disk", "none"]
    saved_blocks: int = 0
    """Full blocks of the prompt's chain that are on disk: they need no second write. Verified when read from there."""
    miss_reason: str | None = None
    shared_blocks: int = 0
    """For a job without an agent: full blocks of the prompt's chain that the prompt of another such job had too."""


@dataclass(frozen=True)
class Turn:
    """Everything that becomes version `parent + 1` of an agent.

    Attributes:
        cache: cache of [start, stop) of `transcript.token_ids`; `start` is a multiple of the block size and all
            blocks before it are on disk; ``None`` saves the transcript alone.
        result_of: called with the new version's number; returns the result to remember and to finalise with.
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
    """Agent memory. `open_agent` and `restore` run on the loader thread, `save` on the finaliser threads."""

    def open_agent(self, agent_id: str) -> AgentVersion:
        """The agent's newest version.

        Raises:
            AgentTranscriptUnreadable: a record is damaged, missing or foreign, or the last turn was not saved. The
                error's `.usable` holds what `context="full"` may still go on from.
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
        """The longest verified cache prefix of `prompt_ids`, at most all but its last token. Never raises for a
        damaged, missing or foreign piece: that is a miss with a reason.

        Args:
            agent: ``None`` for a job without one: it gets what others of its salt left, and nothing is noted of it but
                how its prompt begins.
            beside_others: whether other sequences are running: they keep half of the processor.
        """
        ...

    def save(self, turn: Turn) -> tuple[int, Mapping[str, Any]]:
        """Make the turn durable as the agent's next version: blocks first, then the record, then HEAD.

        Returns:
            the new version's number and the result that was remembered with it.

        Raises:
            OSError: it could not be written; the agent is still at `turn.parent`.
        """
        ...

    def save_blocks(
        self, token_ids: tuple[int, ...], cache: CacheSlice, *, model: LoadedModel, salt: str | None
    ) -> None:
        """Keep the full blocks of `token_ids` from `cache.start` on, for whoever begins with these tokens: no agent's,
        and the first to go when there is too much.

        Raises:
            OSError: they could not be written.
        """
        ...

    def mark_unsaved(self, agent_id: str) -> None:
        """Remember that a finished turn of this agent is not in its transcript: `append` must refuse from now on."""
        ...

    @property
    def agent_jobs(self) -> "AgentJobsPort":
        """What jobs about an agent's memory do."""
        ...

    def protect(self, agents: frozenset[str]) -> None:
        """Which agents have work queued or running, as of now: they lose no cache. Any thread, waits for nobody."""
        ...

    def close(self) -> None: ...


class AgentJobsPort(Protocol):
    """Jobs about an agent's memory. Finaliser threads; never two jobs of one agent at the same time."""

    def answer(self, request: AgentRequest, delivery: Delivery) -> AgentResult | None:
        """What this delivery was answered, if it has taken effect. Raises `OSError` where that cannot be known."""
        ...

    def run(self, request: AgentRequest, delivery: Delivery) -> AgentResult:
        """Do it, durably, in one step that remembers the delivery.

        Raises:
            AgentMemoryError: it cannot be done, and nothing has changed.
            OSError: likewise; or it is done, and `answer` gives its result.
        """
        ...

    def ended(self, request: AgentRequest, delivery: Delivery) -> None:
        """The job's end is written: nobody delivers it again. Raises `OSError`."""
        ...

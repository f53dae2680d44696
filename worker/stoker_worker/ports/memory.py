"""The interface of agent memory: versions, turns, and the store that keeps them. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol

from stoker_shared.agents import AgentRequest, AgentResult
from stoker_shared.message import Message
from stoker_worker.ports.engine import EndedBy, SequenceCache
from stoker_worker.ports.model import LoadedModel
from stoker_worker.ports.queue import Delivery, LastVersion, PlaceOf


class OwnMessage(Message):
    """A message that the model made, with the text as it was generated. Equal to a producer's copy (see `continues`).

    Templates get an answer's parts: content, thinking, calls. The token ids in the agent's transcript have the text
    itself, whose white space and notation a template may write differently. Producers cannot send this text.

    Attributes:
        generated: the answer's text.
        opened: the end of the prompt, from the marker on with which the template opened the thinking; else empty.
    """

    generated: str
    opened: str = ""

    def as_template_input(self) -> dict[str, Any]:
        """Its parts; never the generated text."""
        return self.model_dump(exclude_none=True, mode="json", exclude={"generated", "opened"})

    def as_generated(self) -> Message:
        """The message with the whole text as its content."""
        return Message(role=self.role, content=self.opened + self.generated)


StoredMessage = Message | OwnMessage


def is_stored_alike(left: Message, right: Message) -> bool:
    """True if a store writes the same for both messages, an answer's generated text included."""
    texts, others = ((m.generated, m.opened) if isinstance(m, OwnMessage) else None for m in (left, right))
    return texts == others and left.is_exactly(right)


def continues(sent: Message, stored: Message) -> bool:
    """True if `sent` is `stored` as a producer sends it back: without the thinking, or as the raw text."""
    if sent.is_exactly(stored):
        return True
    if not isinstance(stored, OwnMessage):
        return False
    without = stored.model_copy(update={"reasoning_content": sent.reasoning_content})
    in_raw_form = sent.content in (stored.generated, stored.opened + stored.generated) and not sent.tool_calls
    return sent.role == stored.role and (in_raw_form or sent.is_exactly(without))


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """The number of leading items that two sequences of the same type share."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:  # left[:low] is shared, left[: high + 1] is not
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class AgentJobsPort(Protocol):
    """Jobs about an agent's memory. Finisher threads; never two jobs of one agent at once."""

    def answer(self, request: AgentRequest, delivery: Delivery) -> AgentResult | None:
        """The answer of this delivery, if it has taken effect.

        Raises:
            AgentTranscriptUnreadable, AgentBusy, SharedStoreAway, OSError: that cannot be known.
        """
        ...

    def run(self, request: AgentRequest, delivery: Delivery) -> AgentResult:
        """Carry the job out, durably, in one step that remembers the delivery.

        Raises:
            AgentMemoryError: it cannot be done, and nothing has changed.
            VersionTaken: the same, because another worker has changed the agent at the same time.
            SharedStoreAway: it may be done or not; ask `answer` later.
            OSError: nothing has changed, or it is done and `answer` returns its result.
        """
        ...


@dataclass(frozen=True)
class Transcript:
    """An agent's conversation up to a version. Small, and never evicted: it is the truth.

    Attributes:
        token_ids: every token, as the model saw or made it.
        tokenizer_fingerprint: of the tokenizer and template that the ids belong to.
        messages: the conversation as chat messages, the model's answers included; ``None`` for raw prompts.
        text: the conversation as text; ``None`` for chat messages.
        ended_by: how the last turn ended.
        carry_text: the end of the last answer that `token_ids` does not cover (see `CompletedGeneration`).
    """

    token_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    messages: tuple[Message, ...] | None
    text: str | None
    ended_by: EndedBy
    carry_text: str = ""


@dataclass(frozen=True)
class CachedPrefix:
    """The part of a transcript whose cache was saved: its first `tokens` tokens.

    Their full blocks are in the shared block folder. The rest is in the agent's tail, or, with the states of window and
    recurrent layers, in its snapshots.

    Attributes:
        model: fingerprint of the model that made it.
        last_block: address of the last full block; the chain's root if there is none.
        snapshots: the tokens after which each snapshot was taken, ascending.
    """

    model: str
    salt: str | None
    tokens: int
    last_block: str
    snapshots: tuple[int, ...] = ()


UNKNOWN_VERSION: Final = -1
"""The number of a version that could not be read: nothing can be saved after it."""


@dataclass(frozen=True)
class AgentVersion:
    """A state of an agent's transcript. An unknown agent is at `number` 0, without a transcript.

    Attributes:
        head: identifies the version's content; empty at version 0.
        cache: ``None``: nothing of it was saved.
        since_full: versions since the last one that was written as a whole.
        evicted: whether some of its cache was evicted.
        begins_again: it was forgotten, which is no damage; its numbers go on.
    """

    agent_id: str
    number: int
    transcript: Transcript | None
    head: bytes = field(default=b"", repr=False)
    cache: CachedPrefix | None = None
    since_full: int = 0
    evicted: bool = False
    begins_again: bool = False

    @property
    def known_number(self) -> int:
        """The number that jobs see: 0 for an agent that was never made, or is forgotten."""
        return 0 if self.begins_again else self.number


@dataclass(frozen=True)
class Restored:
    """The cached prefix of a prompt, or none and the reason.

    Attributes:
        to_share: for a job without an agent: the length of the beginning that its prompt shares with an earlier such
            prompt, if not all of it is on disk; else 0.
        checkpoints_at: as in `GenerationWork`.
    """

    prefix: SequenceCache | None
    source: Literal["memory", "disk", "none"]
    miss_reason: str | None = None
    to_share: int = 0
    checkpoints_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class Turn:
    """The version after `base`, to be saved.

    Attributes:
        cache: of the first of `transcript.token_ids`; ``None`` saves the transcript alone.
        result: the job's result (as JSON), for a second delivery.
    """

    base: AgentVersion
    delivery: Delivery
    transcript: Transcript
    model: LoadedModel
    cache_salt: str | None
    cache: SequenceCache | None
    result: Mapping[str, Any]

    @property
    def agent_id(self) -> str:
        return self.base.agent_id

    @property
    def version(self) -> int:
        return self.base.number + 1

    def without_cache(self, reason: str) -> "Turn":
        """The same turn without its cache, and with the reason in its result."""
        report = {**self.result.get("cache", {}), "save_error": reason}
        return replace(self, cache=None, result={**self.result, "cache": report})


class CacheStorePort(Protocol):
    """Agent memory. `open_agent` and `restore` run on the loader thread, `save` on the finisher threads."""

    agent_jobs: AgentJobsPort
    """Carries out jobs about an agent's memory."""

    def look(self, agent_id: str, last: LastVersion | None = None) -> bool:
        """Bring in the versions that other workers have written of the agent, before `answer` and `open_agent`. Loader
        thread.

        Args:
            last: its newest version as Redis knows it. If this process made that one, the shared store is not asked.

        Returns:
            whether no other worker can know more: the shared store was asked, or there is none.

        Raises:
            SharedStoreAway: that cannot be known now.
            AgentTranscriptUnreadable: a version in the shared store is damaged; `.usable` as in `open_agent`.
        """
        ...

    def open_agent(self, agent_id: str) -> AgentVersion:
        """The agent's newest version here.

        Raises:
            AgentTranscriptUnreadable: a version is damaged, missing or foreign, or the last turn was not saved. The
                error's `.usable` is the version that `context="full"` may still continue from.
            SharedStoreAway: a version is damaged here, and may be whole in the shared store.
            AgentBusy: another process is changing the agent, and did not end in time; for ``full`` jobs too.
        """
        ...

    def answer(self, agent_id: str, delivery: Delivery) -> Mapping[str, Any] | None:
        """The result (as JSON) of the turn that this delivery made, or ``None`` if it made none. Loader and finisher
        threads.

        Raises:
            AgentTranscriptUnreadable: that cannot be known.
            AgentVersionConflict: it has made one, but the answer is no longer kept.
            SharedStoreAway, AgentBusy: as `open_agent`.
        """
        ...

    def restore(
        self,
        prompt_ids: Sequence[int],
        *,
        agent: AgentVersion | None,
        model: LoadedModel,
        salt: str | None,
        session: str | None = None,
        max_tokens: int = 0,
        is_saved: bool = True,
        beside_others: bool = False,
        system_tokens: int = 0,
    ) -> Restored:
        """The longest verified cached prefix of `prompt_ids`, at most all but its last token. Damaged, missing and
        foreign files are a miss with a reason, never an error.

        Args:
            agent: ``None`` for a job without one: it may use its salt's blocks, and only the beginning of its prompt is
                remembered.
            session: of a job without an agent, which may then also use caches of `save_session`.
            max_tokens: most tokens that come after `prompt_ids`.
            is_saved: whether the turn is to be saved, so that the engine returns its cache.
            beside_others: whether other sequences are running: they keep half of the cores.
            system_tokens: tokens of the system prompt and the tools at the beginning of `prompt_ids`, as far as known.
        """
        ...

    def save(self, turn: Turn) -> Mapping[str, Any]:
        """Make the turn durable as the agent's next version, with its result: cache files first, then the version in
        the shared store, if there is one, then one transaction. A cache that cannot be written is left out.

        Returns:
            the result as it is stored: the turn's, with the reason if its cache is not saved.

        Raises:
            AgentVersionConflict: `turn.base` is not the agent's newest version (any more).
            VersionTaken: another worker has made the next version meanwhile.
            SharedStoreAway: it may be there or not; `look`, then `answer`, show which.
            OSError: it could not be written; the agent is still at `turn.base`.
        """
        ...

    def close_number(self, agent_id: str) -> None:
        """Take the number of the agent's next version, and change nothing else: a turn that an earlier run may have
        sent takes no effect any more. Called before a job ends without that turn. Finisher threads.

        Raises:
            VersionTaken: that turn has taken effect just now; `look`, then `answer`, return its result.
            SharedStoreAway, OSError: it may still take effect.
        """
        ...

    def ended(self, agent_id: str, delivery: Delivery, *, remember_s: float) -> None:
        """The end of the delivery's job is recorded: its answer is needed for `remember_s` more seconds only. Never
        raises. Finisher threads."""
        ...

    def save_blocks(
        self, token_ids: tuple[int, ...], cache: SequenceCache, *, model: LoadedModel, salt: str | None
    ) -> None:
        """Save the full blocks of `token_ids` and their checkpoints, for other prompts that begin with these tokens. No
        agent owns these blocks, so they are evicted first. Raises `OSError` if they cannot be written."""
        ...

    def save_session(
        self,
        session: str,
        token_ids: tuple[int, ...],
        cache: SequenceCache,
        *,
        prompt_tokens: int,
        model: LoadedModel,
        salt: str | None,
    ) -> None:
        """Keep the cache of a call's prompt and answer for the session's next calls. What the session has of other
        conversations stays. Raises `OSError` if it cannot be written.

        Args:
            token_ids: of the prompt and the answer, as far as they are cached: `cache.n_tokens` of them.
        """
        ...

    def mark_unsaved(self, agent_id: str) -> None:
        """Remember durably, before its job finishes, that a turn of this agent is missing from its transcript: `append`
        is refused from now on. Raises `OSError` if that cannot be remembered."""
        ...

    def pin(self, running: frozenset[str], waiting: frozenset[str], *, is_all: bool = True) -> None:
        """Set the agents with work running or queued. Running ones lose no cache, and no other process changes them;
        waiting ones lose theirs after all others. Any thread; never blocks.

        Args:
            is_all: whether nobody else has work in the queue; until that is known no agent is removed for being unused.
        """
        ...

    def order_by(self, place_of: PlaceOf) -> None:
        """From now on, the waiting agent with the largest place loses its cache first. Any thread."""
        ...

    def is_away(self) -> bool:
        """True if there is a shared store and it does not answer. Any thread; never blocks."""
        ...

    def is_at_hand(self, agent_id: str) -> bool:
        """True if the agent's next job waits for no file, because its cache is in RAM or it has none; true for all
        agents while RAM holds nothing. A hint; any thread, never blocks."""
        ...

    def read_ahead(self, agents: Sequence[str]) -> None:
        """Read the caches of the queue's next jobs into RAM, in this order, as far as there is room; before the first
        `restore`, also those of the agents used last. Any thread; never blocks."""
        ...

    def model_loaded(self, model: LoadedModel) -> None:
        """The model is known: caches of other models leave the RAM. Any thread; never blocks."""
        ...

    def close(self) -> None: ...

"""The seams of the worker, and the values that cross them. No I/O, no MLX, no rq; every value is frozen.

Threads hand these to one another through queues and never share anything mutable. Arrays cross as NumPy arrays whose
bytes nobody else writes to; bfloat16 travels as uint16 (`ModelCacheSpec.dtype` says which it is).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stoker_shared.request import GenerationRequest, Message
from stoker_shared.result import Logprobs
from stoker_worker.cache_spec import ModelCacheSpec

Array = NDArray[Any]
LayerKV = tuple[Array, Array]
"""One layer's (keys, values): shapes (n_kv_heads, tokens, key_dim) and (n_kv_heads, tokens, value_dim)."""

EndedBy = Literal["eos", "stop", "length"]
"""Why a turn ended: an end-of-sequence token (its id is in the transcript), a stop string, or `max_tokens`."""


# --- the model -----------------------------------------------------------------------------------------------------


@runtime_checkable
class TextCodec(Protocol):
    """Text to token ids and back, and the chat template. Not thread-safe: each thread uses its own `fork()`."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token: no text of more than `context * max_token_bytes` bytes can fit."""
        ...

    def fork(self) -> "TextCodec": ...
    def encode(self, text: str, *, special_start: bool) -> list[int]:
        """Token ids of `text`. Control tokens written in it count as control tokens.

        `special_start` adds what the tokenizer puts before a text (BOS), unless the text begins with it already.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The exact text of `token_ids`, control tokens included, nothing tidied."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The conversation as the model's template writes it, for `encode_rendered` and for comparing.

        What looks like a control token in a message that is not the model's own is written in an escaped form; equal
        messages have equal escapes.

        Raises:
            TemplateError: there is no template, or it refused the messages.
        """
        ...

    def rest_of(self, rendered: str, *, after: str) -> str | None:
        """What of `rendered` follows the plain text `after`; ``None`` when it does not begin with it."""
        ...

    def encode_rendered(self, rendered: str) -> list[int]:
        """Token ids of a rendered conversation, or of its end.

        Control tokens that the template or the model wrote are control tokens; the same characters inside a system,
        user or tool message are plain text, so no message can forge a turn.

        Raises:
            TemplateError: this tokenizer cannot write them as plain text.
        """
        ...


@dataclass(frozen=True)
class LoadedModel:
    """What the rest of the worker knows of the model in the engine.

    Attributes:
        name: as given with ``--model`` (or the folder's name); `request.model` must equal it, if given.
        fingerprint: hex digest over weights, config, tokenizer, chat template, cache layout and dtype. Cache bytes of
            another fingerprint are never loaded.
        tokenizer_fingerprint: hex digest over tokenizer and chat template: token ids of another one mean nothing.
        context_tokens: the most tokens (prompt + generated) the model can attend to.
    """

    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    context_tokens: int
    spec: ModelCacheSpec
    codec: TextCodec


class ModelProviderPort(Protocol):
    """Makes the engine. Called on the engine thread, which then owns everything MLX."""

    def load(self) -> tuple["GenerationEnginePort", LoadedModel]:
        """Load the model.

        Raises:
            ModelNotLoadable: it is not there, or cannot be served.
        """
        ...

    def leave_thread(self) -> None:
        """The last call on the engine thread, also after a failed `load`: let go of what belongs to the thread."""
        ...


# --- the engine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RestoredPrefix:
    """Cache of the first `n_tokens` of a prompt, one contiguous array pair per layer."""

    n_tokens: int
    layers: tuple[LayerKV, ...]


@dataclass(frozen=True)
class CacheSlice:
    """Cache of tokens [start, stop) of a finished sequence, evaluated and owned by the receiver."""

    start: int
    stop: int
    layers: tuple[LayerKV, ...]


@dataclass(frozen=True)
class GenerationWork:
    """One sequence for the engine.

    Attributes:
        prompt_ids: the whole prompt, cached part included; at least one token more than `prefix` holds.
        save_from: first token whose cache the engine hands back at the end (a multiple of the block size, inside what
            was restored or just behind it); ``None``: nothing is handed back.
    """

    request: GenerationRequest
    prompt_ids: tuple[int, ...]
    prefix: RestoredPrefix | None = None
    save_from: int | None = 0


@dataclass(frozen=True)
class GenerationTiming:
    """Seconds in the engine: waiting for room, then restoring and prefill up to the first token, then the rest."""

    waited_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class Completion:
    """How a sequence ended.

    Attributes:
        generated_ids: every token generated and in the cache, in order; the last may be an end-of-sequence token.
        text: what they say, without end-of-sequence tokens and without the stop string.
        ended_by: ``None`` when the sequence did not end by itself (`outcome` is not ``finished``).
        kept: how many of `generated_ids` belong into the transcript: all, or those before a stop string.
        carry_text: the end of `text` that no whole kept token covers (the stop string began inside a token).
        cache: cache from `save_from` to the last kept token.
        outcome: ``finished``, ``cancelled`` (by `cancel`) or ``failed`` (then `error` says why).
    """

    uid: int
    outcome: Literal["finished", "cancelled", "failed"]
    generated_ids: tuple[int, ...] = ()
    text: str = ""
    ended_by: EndedBy | None = None
    kept: int = 0
    carry_text: str = ""
    cache: CacheSlice | None = None
    logprobs: Logprobs | None = None
    timing: GenerationTiming = field(default_factory=GenerationTiming)
    error: Exception | None = None


class GenerationEnginePort(Protocol):
    """One continuous batch. All calls come from the thread that made it."""

    def submit(self, work: GenerationWork) -> int:
        """Add a sequence; returns its uid.

        Raises:
            BlockPoolTooSmall: it could never fit into the pool.
            RequestNotServed: it asks for something this engine does not do.
        """
        ...

    def step(self) -> list[Completion]:
        """One round of prefill and decode; returns the sequences that ended in it."""
        ...

    def cancel(self, uid: int) -> Completion | None:
        """Take a sequence out at any stage; ``None`` when it is not there (any more)."""
        ...

    @property
    def in_flight(self) -> int:
        """Sequences submitted and not ended."""
        ...

    def progress(self) -> dict[int, int]:
        """Tokens generated so far, by uid."""
        ...

    def close(self) -> None: ...


# --- agent memory --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Delivery:
    """One enqueue of one job: recovery and requeueing keep it, RQ's Repeat and a reused id make a new one."""

    job_id: str
    created_at: str
    repeats_left: int | None = None


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


@dataclass(frozen=True)
class Restored:
    """What the store gives for a prompt: a prefix, or none and the reason."""

    prefix: RestoredPrefix | None
    source: Literal["memory", "disk", "none"]
    saved_blocks: int = 0
    """Full blocks of the prompt's chain that are on disk and verified: they need no second write."""
    miss_reason: str | None = None


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
    """Agent memory. `open_agent` and `restore` run on the loader thread, `save` on the finaliser thread."""

    def open_agent(self, agent_id: str) -> AgentVersion:
        """The agent's newest version.

        Raises:
            AgentTranscriptUnreadable: a record is damaged, missing or foreign, or the last turn was not saved. The
                error's `.usable` holds what `context="full"` may still go on from.
        """
        ...

    def restore(
        self, prompt_ids: Sequence[int], *, agent: AgentVersion, model: LoadedModel, salt: str | None
    ) -> Restored:
        """The longest verified cache prefix of `prompt_ids`, at most all but its last token. Never raises for a
        damaged, missing or foreign piece: that is a miss with a reason."""
        ...

    def save(self, turn: Turn) -> tuple[int, Mapping[str, Any]]:
        """Make the turn durable as the agent's next version: blocks first, then the record, then HEAD.

        Returns:
            the new version's number and the result that was remembered with it.

        Raises:
            OSError: it could not be written; the agent is still at `turn.parent`.
        """
        ...

    def mark_unsaved(self, agent_id: str) -> None:
        """Remember that a finished turn of this agent is not in its transcript: `append` must refuse from now on."""
        ...

    def close(self) -> None: ...


def as_uint16_if_bfloat16(dtype: str) -> "np.dtype[Any]":
    """NumPy dtype in which a cache dtype travels."""
    return np.dtype(np.uint16) if dtype == "bfloat16" else np.dtype(dtype)


# --- the queue -----------------------------------------------------------------------------------------------------


class Latch:
    """Set once, with a reason, by one thread; read by others."""

    def __init__(self) -> None:
        self._reason: CancelReason | None = None

    @property
    def reason(self) -> "CancelReason | None":
        return self._reason

    def set(self, reason: "CancelReason") -> None:
        self._reason = self._reason or reason


CancelReason = Literal["withdrawn", "timed out", "stopping"]
"""Somebody canceled, stopped or deleted the job; its own timeout passed; the worker stops and gives it back."""


@dataclass(frozen=True)
class ClaimedJob:
    """A job that is this worker's to run.

    Attributes:
        attempt: 1, or more after a worker died with this job in flight.
        enqueued_at, claimed_at: Unix time in seconds.
        deadline: `time.monotonic()` at which the job's own timeout passes; ``None`` for no timeout.
        handle: the queue adapter's own record of it; nobody else looks inside.
        cancel: set by the inbox when the job must not go on; the loader and the engine look at it.
    """

    job_id: str
    queue: str
    request: GenerationRequest
    delivery: Delivery
    attempt: int
    enqueued_at: float
    claimed_at: float
    deadline: float | None
    handle: Any = field(repr=False)
    cancel: Latch = field(default_factory=Latch, repr=False, compare=False)


class QueuePort(Protocol):
    """The durable queue. Claiming and watching run on the inbox thread, ending jobs on the finaliser thread."""

    def claim(self, limit: int, busy_agents: frozenset[str]) -> list[ClaimedJob]:
        """Take up to `limit` waiting jobs, in order, at most one per agent and none of a busy one."""
        ...

    def withdrawn(self, jobs: Sequence[ClaimedJob], progress: Mapping[str, int]) -> list[ClaimedJob]:
        """Which of `jobs` somebody canceled, stopped or deleted meanwhile; publishes `progress` (tokens by job id)."""
        ...

    def owns(self, job: ClaimedJob) -> bool:
        """Whether this execution is still this worker's to end."""
        ...

    def finish(self, job: ClaimedJob, result: Mapping[str, Any]) -> None:
        """
        Raises:
            OwnershipLost: the execution is not ours any more; nothing was written.
        """
        ...

    def fail(
        self, job: ClaimedJob, error: Exception, partial_text: str | None = None, *, may_retry: bool = True
    ) -> None:
        """Fail the job with one readable line; RQ retries it if it has retries left and `error` may pass by itself.

        Raises:
            OwnershipLost: the execution is not ours any more; nothing was written.
        """
        ...

    def stopped(self, job: ClaimedJob) -> None:
        """End a job that `withdrawn` named."""
        ...

    def drop(self, job: ClaimedJob) -> None:
        """Forget a job that is not ours any more: our execution is removed, the job's own state is left as it is."""
        ...

    def give_back(self, jobs: Sequence[ClaimedJob], *, counts_as_attempt: bool) -> None:
        """Put jobs back at the front of their queues, in their order."""
        ...

    def recover(self) -> int:
        """Put back what dead workers had in flight; returns how many jobs that were."""
        ...

    def tidy(self) -> None:
        """Housekeeping that no job waits for."""
        ...

    def is_empty(self) -> bool:
        """Whether no job waits in any of the queues."""
        ...

    def beat(self) -> bool:
        """Show that this worker lives; ``False`` when it has been deposed. Heartbeat thread."""
        ...

"""The engine's interface: one sequence's work goes in, its completion comes out. No I/O, no MLX."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker_shared.errors import StokerError
from stoker_shared.request import GenerationRequest
from stoker_shared.result import Logprobs, PromptLogprobs
from stoker_worker.ports.cache_spec import ModelCacheSpec

TokenMask = NDArray[np.uint32]
"""Bit j of word i is set if token ``32 * i + j`` may come next. Tokens after the last word may not."""


class AnswerGuide(Protocol):
    """One sequence's guide. One thread at a time: the loader makes it, then it is the engine thread's.

    Attributes:
        error: why it cannot go on, which fails its job. It allows every token then.
    """

    error: StokerError | None

    def start(self, generated: Sequence[int]) -> None:
        """Go to the place after these tokens of the answer, from any other place."""
        ...

    def after(self, token: int | None) -> TokenMask | None:
        """Take the answer's next token.

        Args:
            token: ``None``: take none, and stay at this place.

        Returns:
            the tokens that may follow; ``None`` if all may.
        """
        ...

    def fork(self) -> "AnswerGuide":
        """A guide for another answer to the same request, at its beginning."""
        ...


class GuideMaker(Protocol):
    """Makes the guides of a model's answers. Loader thread."""

    def guide_for(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> AnswerGuide | None:
        """``None`` for a request that leaves its answer free.

        Raises:
            GuideRefused: its grammar or schema is wrong, not supported, or too large.
        """
        ...


Array = NDArray[Any]
LayerKV = tuple[Array, Array]
"""One layer's (keys, values): shapes (n_kv_heads, tokens, key_dim) and (n_kv_heads, tokens, value_dim)."""

LayerState = tuple[Array, ...]
"""One window or recurrent layer after some tokens: the arrays of `LayerSpec.snapshot_arrays`, in its order."""

EndedBy = Literal["eos", "stop", "length"]
"""Why a turn ended: an end-of-sequence token (its id is in the transcript), a stop string or a stop token (not in the
transcript), or `max_tokens`."""


class PrefixRoom(Protocol):
    """Memory of the engine for one sequence's full-attention cache. A restored prefix is read straight into it, the
    engine goes on in it and gives it back at the sequence's end. Any thread, one at a time."""

    def has_room_for(self, n_tokens: int) -> bool:
        """True if a prompt of so many tokens and the beginning of an answer fit."""
        ...

    @property
    def is_viewed(self) -> bool:
        """True while there are views of its arrays: the engine cannot take it."""
        ...

    def layers(self) -> tuple[LayerKV, ...]:
        """Writable arrays, one pair per full-attention layer, with more tokens than the prompt has. They hold anything
        before they are filled. They and all views of them have to be gone before the room is given to the engine."""
        ...

    def take(self) -> list[tuple[Any, Any]]:
        """The engine's own arrays, once. Engine thread.

        Raises:
            ValueError: a view of them is left, or they were taken before.
        """
        ...


RoomType = Callable[[ModelCacheSpec, int, int], PrefixRoom]
"""Makes room for a prompt of so many tokens and an answer of at most so many."""


@dataclass(frozen=True)
class Snapshot:
    """The window and recurrent layers of a sequence after its first `n_tokens` tokens, and never usable elsewhere.

    Attributes:
        states: one entry per window or recurrent layer (`ModelCacheSpec.snapshot_layers`).
    """

    n_tokens: int
    states: tuple[LayerState, ...]


@dataclass(frozen=True)
class SequenceCache:
    """The cache of the first `n_tokens` tokens of a sequence, on its way from the store to the engine or back. Nobody
    writes to its arrays.

    Attributes:
        layers: one array pair of `n_tokens` tokens per full-attention layer (`ModelCacheSpec.full_layers`); they need
            not be contiguous. On its way to the engine they are copied; empty if it goes on in `room`.
        snapshots: in the order of their tokens; none lies after `n_tokens`. The engine goes on from the last one, which
            has to be at `n_tokens` then.
        room: holds the cache from its first token on.
        checkpoints: more snapshots, taken where `GenerationWork.checkpoints_at` asked for them, in the same order.
    """

    n_tokens: int
    layers: tuple[LayerKV, ...]
    snapshots: tuple[Snapshot, ...] = ()
    room: PrefixRoom | None = None
    checkpoints: tuple[Snapshot, ...] = ()

    def up_to(self, n_tokens: int) -> "SequenceCache":
        """The cache of the first `n_tokens` of them, in the same arrays; checkpoints are snapshots there."""
        layers = tuple((keys[:, :n_tokens], values[:, :n_tokens]) for keys, values in self.layers)
        taken = {one.n_tokens: one for one in (*self.checkpoints, *self.snapshots) if one.n_tokens <= n_tokens}
        snapshots = tuple(taken[n] for n in sorted(taken))
        return replace(self, n_tokens=n_tokens, layers=layers, snapshots=snapshots, checkpoints=())

    def copied_into(self, room: PrefixRoom) -> "SequenceCache":
        """The same cache, with a copy of `layers` in the engine's memory."""
        for (keys, values), (to_keys, to_values) in zip(self.layers, room.layers(), strict=True):
            to_keys[:, : self.n_tokens], to_values[:, : self.n_tokens] = keys, values
        return replace(self, layers=(), room=room)


@dataclass(frozen=True)
class GenerationWork:
    """One sequence for the engine.

    Attributes:
        prompt_ids: the whole prompt, cached part included; at least one token more than `prefix` holds.
        is_saved: whether the engine hands the cache back at the end.
        shares: sequences of one value may use each other's caches; ``None``: with no other.
        guide: which tokens its answer may have, from the answer's beginning on; ``None``: any. The engine owns it.
        checkpoints_at: after how many tokens of the prompt, ascending, a cache that is handed back has a checkpoint;
            those that lie within `prefix` are left out.
    """

    request: GenerationRequest
    prompt_ids: tuple[int, ...]
    prefix: SequenceCache | None = None
    is_saved: bool = True
    shares: tuple[str | None, ...] | None = None
    guide: AnswerGuide | None = None
    checkpoints_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationTiming:
    """Seconds in the engine: waiting for room, then restoring and prefill up to the first token, then the rest."""

    waited_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class CompletedGeneration:
    """How a sequence ended.

    Attributes:
        outcome: ``finished``, ``cancelled`` (by `cancel`) or ``failed`` (with `error`).
        generated_ids: every token generated, in order; the last may be an end-of-sequence or stop token.
        text: their text, without the token or the stop string that ended it.
        ended_by: ``None`` unless `outcome` is ``finished``.
        kept: how many of `generated_ids` belong to the transcript: all, or those before a stop string or token.
        carry_text: the end of `text` that no whole kept token covers, when the stop string began inside a token.
        cache: up to the last kept token, or without answer tokens up to the last but one of the prompt; ``None`` if it
            is not to be saved.
        cached_tokens: tokens of the prompt that were restored instead of prefilled.
        stop_string: the one that ended it, if one did.
    """

    uid: int
    outcome: Literal["finished", "cancelled", "failed"]
    generated_ids: tuple[int, ...] = ()
    text: str = ""
    ended_by: EndedBy | None = None
    kept: int = 0
    carry_text: str = ""
    cache: SequenceCache | None = None
    cached_tokens: int = 0
    stop_string: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    timing: GenerationTiming = field(default_factory=GenerationTiming)
    error: Exception | None = None


Stage = Literal["loading", "waiting", "prefill", "decode"]
"""Where a job is: its agent's memory is loaded, it waits for a place in the batch, its prompt is prefilled, or it
generates."""


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """How far a sequence has come.

    Attributes:
        tokens: generated so far.
        tokens_per_s: the mean since its first token; 0 before there are two.
    """

    stage: Stage
    tokens: int = 0
    tokens_per_s: float = 0.0

    @classmethod
    def since(cls, first_token_at: float, stage: Stage, tokens: int) -> "SequenceProgress":
        """
        Args:
            first_token_at: by `time.perf_counter`; not used before there are two tokens.
        """
        since_s = time.perf_counter() - first_token_at
        return cls(stage, tokens, (tokens - 1) / since_s if tokens > 1 and since_s > 0 else 0.0)


class KVMemory(Protocol):
    """Blocks of KV memory, as they are now, and how often a sequence had to leave the batch for want of one. Any
    thread."""

    total: int
    preemptions: int

    @property
    def used(self) -> int: ...


class GenerationEnginePort(Protocol):
    """One continuous batch. All calls come from the thread that made it.

    Attributes:
        kv: ``None`` for an engine without a budget.
    """

    kv: KVMemory | None = None

    def submit(self, work: GenerationWork) -> int:
        """Add a sequence; returns its uid.

        Raises:
            BlockPoolTooSmall: prompt + max_tokens could never fit into the pool.
        """
        ...

    def step(self) -> list[CompletedGeneration]:
        """One round of prefill and decode; returns the sequences that ended in it."""
        ...

    def cancel(self, uid: int) -> CompletedGeneration | None:
        """Take a sequence out at any stage; ``None`` when it is not, or no longer, in the engine."""
        ...

    @property
    def in_flight(self) -> int:
        """How many sequences were submitted and have not ended."""
        ...

    def progress(self) -> dict[int, SequenceProgress]:
        """How far each sequence in flight has come, by uid."""
        ...

    def text(self, uid: int) -> str:
        """The part of a sequence's answer that later tokens cannot change: it ends neither inside a character nor in
        the possible beginning of a stop string. Each call's text begins with that of the call before. Empty when the
        sequence is not in flight."""
        ...

    def close(self) -> None: ...


def as_uint16_if_bfloat16(dtype: str) -> "np.dtype[Any]":
    """The NumPy dtype in which arrays of a cache dtype leave MLX."""
    return np.dtype(np.uint16) if dtype == "bfloat16" else np.dtype(dtype)

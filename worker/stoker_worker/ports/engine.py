"""The engine's interface: takes the work of a sequence, returns its completion. No I/O, no MLX."""

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
    """The guide of one sequence. The loader thread makes it; from then on only the engine thread uses it.

    Attributes:
        error: set when the guide cannot continue. It allows every token from then on, and the engine fails its job.
    """

    error: StokerError | None

    def start(self, generated: Sequence[int]) -> None:
        """Restart the guide after the tokens `generated` of the answer."""
        ...

    def after(self, token: int | None) -> TokenMask | None:
        """Take the answer's next token, if not ``None``. Returns the tokens that may follow; ``None`` if all may."""
        ...

    def fork(self) -> "AnswerGuide":
        """A new guide for another answer to the same request."""
        ...


class GuideMaker(Protocol):
    """Makes the guides of a model's answers. Loader thread."""

    def guide_for(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> AnswerGuide | None:
        """The guide of an answer to this request, or ``None`` if any answer will do.

        Raises:
            GuideRefused: the grammar or schema is wrong, not supported, or too large.
        """
        ...


Array = NDArray[Any]
LayerKV = tuple[Array, Array]
"""One layer's (keys, values): shapes (n_kv_heads, tokens, key_dim) and (n_kv_heads, tokens, value_dim)."""

LayerState = tuple[Array, ...]
"""One window or recurrent layer after some tokens: arrays as in `LayerSpec.snapshot_arrays`, in the same order."""

EndedBy = Literal["eos", "stop", "length"]
"""Why a turn ended: an end-of-sequence token (its id is in the transcript), a stop string or a stop token (not in the
transcript), or `max_tokens`."""


class PrefixRoom(Protocol):
    """Engine memory for one sequence's full-attention cache. A restored prefix is read straight into it, the sequence
    continues in it, and its finished cache comes back in it. Any thread, one at a time."""

    def has_room_for(self, n_tokens: int) -> bool:
        """True if a prompt of `n_tokens` tokens and the beginning of an answer fit."""
        ...

    @property
    def is_viewed(self) -> bool:
        """True while NumPy views of the arrays exist. The engine cannot take the room until they are gone."""
        ...

    def layers(self) -> tuple[LayerKV, ...]:
        """Writable arrays, not initialised: one pair per full-attention layer, with room for more tokens than the
        prompt. Drop them and all views of them before the room is given to the engine."""
        ...

    def take(self) -> list[tuple[Any, Any]]:
        """The engine's own arrays. Engine thread.

        Raises:
            ValueError: a view of them is left, or they were taken before.
        """
        ...


RoomType = Callable[[ModelCacheSpec, int, int], PrefixRoom]
"""Makes a room for a model's spec, the tokens of a prompt, and the most tokens of its answer."""


@dataclass(frozen=True)
class Snapshot:
    """The window and recurrent layers of a sequence after its first `n_tokens` tokens, usable only exactly there.
    `states` has an entry for each of `ModelCacheSpec.snapshot_layers`."""

    n_tokens: int
    states: tuple[LayerState, ...]


@dataclass(frozen=True)
class SequenceCache:
    """The cache of the first `n_tokens` tokens of a sequence, on its way from the store to the engine or back. Its
    arrays are read-only by agreement.

    Attributes:
        layers: one array pair of `n_tokens` tokens per full-attention layer (`ModelCacheSpec.full_layers`), not
            necessarily contiguous. The engine copies them. Empty if the tokens are in `room` alone.
        snapshots: ascending, none after `n_tokens`. The engine continues from the last one, which has to be at
            `n_tokens` then.
        room: has the cache from its first token on.
        checkpoints: further snapshots, ascending, taken where `GenerationWork.checkpoints_at` asked for them.
    """

    n_tokens: int
    layers: tuple[LayerKV, ...]
    snapshots: tuple[Snapshot, ...] = ()
    room: PrefixRoom | None = None
    checkpoints: tuple[Snapshot, ...] = ()

    def up_to(self, n_tokens: int) -> "SequenceCache":
        """The cache of the first `n_tokens` tokens, as views of the same arrays. Checkpoints become snapshots."""
        layers = tuple((keys[:, :n_tokens], values[:, :n_tokens]) for keys, values in self.layers)
        taken = {one.n_tokens: one for one in (*self.checkpoints, *self.snapshots) if one.n_tokens <= n_tokens}
        snapshots = tuple(taken[n] for n in sorted(taken))
        return replace(self, n_tokens=n_tokens, layers=layers, snapshots=snapshots, checkpoints=())

    def copied_into(self, room: PrefixRoom) -> "SequenceCache":
        """The same cache with its `layers` copied into `room`."""
        for (keys, values), (to_keys, to_values) in zip(self.layers, room.layers(), strict=True):
            to_keys[:, : self.n_tokens], to_values[:, : self.n_tokens] = keys, values
        return replace(self, layers=(), room=room)


@dataclass(frozen=True)
class GenerationWork:
    """One sequence for the engine.

    Attributes:
        prompt_ids: the whole prompt, at least one token longer than `prefix`.
        is_saved: whether the engine returns the cache at the end.
        shares: sequences with equal values may use each other's caches; ``None``: this one shares nothing.
        guide: which tokens the answer may have; ``None``: any. The engine owns it.
        checkpoints_at: numbers of prompt tokens, ascending, after which the returned cache has a checkpoint. Those
            inside `prefix` are skipped.
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
    """Seconds in the engine: waiting for room; restoring and prefill, up to the first token; the rest."""

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
        kept: how many of `generated_ids` belong to the transcript: all, or those before a stop string or stop token.
        carry_text: the end of `text` that no whole kept token covers, if the stop string began inside a token.
        cache: of prompt and kept tokens; with `max_tokens` 0, of the prompt but its last token. ``None``: not saved.
        cached_tokens: tokens of the prompt that were restored instead of prefilled.
        stop_string: the one that ended the sequence, if one did.
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
"""Where a job is: its agent's memory is loaded, it waits for a place in the batch, is prefilled, or generates."""


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """The stage of a sequence, its `tokens` so far, and their mean rate since the first (0 until there are two)."""

    stage: Stage
    tokens: int = 0
    tokens_per_s: float = 0.0

    @classmethod
    def since(cls, first_token_at: float, stage: Stage, tokens: int) -> "SequenceProgress":
        """`first_token_at` is a time of `time.perf_counter`; it is not used before there are two tokens."""
        since_s = time.perf_counter() - first_token_at
        return cls(stage, tokens, (tokens - 1) / since_s if tokens > 1 and since_s > 0 else 0.0)


class KVMemory(Protocol):
    """The engine's blocks of KV memory, and how often a sequence was preempted for lack of them. Any thread."""

    total: int
    preemptions: int

    @property
    def used(self) -> int: ...


class GenerationEnginePort(Protocol):
    """One continuous batch, for the thread that made it alone. `kv` is ``None`` if there is no budget."""

    kv: KVMemory | None = None

    def submit(self, work: GenerationWork) -> int:
        """Add a sequence; returns its uid.

        Raises:
            BlockPoolTooSmall: prompt + max_tokens could never fit into the pool.
            ValueError: the prefix does not fit the model, or its room is still viewed.
        """
        ...

    def step(self) -> list[CompletedGeneration]:
        """One round of prefill and decode; returns the sequences that ended in it."""
        ...

    def cancel(self, uid: int) -> CompletedGeneration | None:
        """Take a sequence out at any stage; ``None`` if it is not in the engine."""
        ...

    @property
    def in_flight(self) -> int:
        """The number of sequences that were submitted and have not ended."""
        ...

    def progress(self) -> dict[int, SequenceProgress]:
        """The progress of each sequence in flight, by uid."""
        ...

    def text(self, uid: int) -> str:
        """The part of a sequence's answer that later tokens cannot change: it ends neither inside a character nor in
        the possible beginning of a stop string, and only grows. Empty if the sequence is not in flight."""
        ...

    def close(self) -> None: ...


def as_uint16_if_bfloat16(dtype: str) -> "np.dtype[Any]":
    """The NumPy dtype in which arrays of a cache dtype leave MLX."""
    return np.dtype(np.uint16) if dtype == "bfloat16" else np.dtype(dtype)

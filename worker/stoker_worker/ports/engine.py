"""The seam of the engine: one sequence's work in, its end out. No I/O, no MLX."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker_shared.request import GenerationRequest
from stoker_shared.result import Logprobs

Array = NDArray[Any]
LayerKV = tuple[Array, Array]
"""One layer's (keys, values): shapes (n_kv_heads, tokens, key_dim) and (n_kv_heads, tokens, value_dim)."""

LayerState = tuple[Array, ...]
"""One window or recurrent layer after some tokens: the arrays of `LayerSpec.snapshot_arrays`, in its order."""

EndedBy = Literal["eos", "stop", "length"]
"""Why a turn ended: an end-of-sequence token (its id is in the transcript), a stop string, or `max_tokens`."""


@dataclass(frozen=True)
class RestoredPrefix:
    """Cache of the first `n_tokens` of a prompt.

    Attributes:
        layers: one contiguous array pair per full-attention layer (`ModelCacheSpec.full_layers`).
        states: one entry per window or recurrent layer (`ModelCacheSpec.snapshot_layers`), as after `n_tokens`.
    """

    n_tokens: int
    layers: tuple[LayerKV, ...]
    states: tuple[LayerState, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """The window and recurrent layers of a sequence after its first `n_tokens` tokens, and never usable elsewhere."""

    n_tokens: int
    states: tuple[LayerState, ...]


@dataclass(frozen=True)
class CacheSlice:
    """Cache of a finished sequence, evaluated and owned by the receiver.

    Attributes:
        layers: tokens [start, stop) of the full-attention layers.
        snapshots: for models with window or recurrent layers: where the sequence can be taken up again, in order.
            None is after `stop`.
    """

    start: int
    stop: int
    layers: tuple[LayerKV, ...]
    snapshots: tuple[Snapshot, ...] = ()


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
        cached_tokens: how many of the prompt's tokens this answer did not have to prefill.
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
    cached_tokens: int = 0
    logprobs: Logprobs | None = None
    timing: GenerationTiming = field(default_factory=GenerationTiming)
    error: Exception | None = None


Stage = Literal["loading", "waiting", "prefill", "decode"]
"""Where a job is: its agent's memory is read; it waits for a place in the batch; its prompt is read; it generates."""


@dataclass(frozen=True, slots=True)
class RowProgress:
    """How far a sequence is.

    Attributes:
        tokens: generated so far.
        tokens_per_s: the mean since its first token; 0 before there are two.
    """

    stage: Stage
    tokens: int = 0
    tokens_per_s: float = 0.0

    @classmethod
    def since(cls, first_token_at: float, stage: Stage, tokens: int) -> "RowProgress":
        """
        Args:
            first_token_at: by `time.perf_counter`; counts only when there are two tokens.
        """
        since_s = time.perf_counter() - first_token_at
        return cls(stage, tokens, (tokens - 1) / since_s if tokens > 1 and since_s > 0 else 0.0)


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

    def progress(self) -> dict[int, RowProgress]:
        """How far each sequence is, by uid."""
        ...

    def text(self, uid: int) -> str:
        """The beginning of a sequence's answer, as far as nothing that comes can change it: no half character, nothing
        that may be the beginning of a stop string. Each call's text begins with that of the call before; empty when
        the sequence is not there."""
        ...

    def close(self) -> None: ...


def as_uint16_if_bfloat16(dtype: str) -> "np.dtype[Any]":
    """NumPy dtype in which a cache dtype travels."""
    return np.dtype(np.uint16) if dtype == "bfloat16" else np.dtype(dtype)

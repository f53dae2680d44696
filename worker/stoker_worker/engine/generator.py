"""Rows through mlx-lm: `BatchGenerator` behind the few calls that the engine needs. Engine thread.

Owns what has to be known of mlx-lm's insides: where the token waits that was sampled and not said yet. Models with a
cache that cannot be batched are `lone_generator`'s.
"""

from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from stoker_worker.engine.probe import leaves

PREFILL_ROWS: Final = 8
"""Most rows prefilled together, mlx-lm's own number: their chunks are padded to the longest."""


@dataclass(frozen=True)
class RowStart:
    """A row for the generator.

    Attributes:
        segments: token ids to prefill; it says when it has come to the end of each.
        caches: the model's own caches, holding `cached_ids`; ``None`` for a fresh start.
    """

    segments: list[list[int]]
    caches: list[Any] | None
    cached_ids: list[int]
    max_tokens: int
    sampler: Any
    processors: Any


@dataclass(frozen=True)
class Prefilled:
    """How far a row's prefill has come: `n_tokens` of those it was inserted with."""

    uid: int
    n_tokens: int
    at_segment_end: bool
    at_prompt_end: bool


@dataclass(frozen=True)
class Said:
    """A row's next token, which is in its cache now. `caches` and `at_eos` come with its last."""

    uid: int
    token: int
    logprobs: Any
    is_last: bool
    at_eos: bool
    caches: list[Any] | None


@dataclass(frozen=True)
class TakenOut:
    """A row's own caches and how many tokens they hold; `pending` was sampled and is not in them."""

    caches: list[Any]
    n_tokens: int
    pending: int | None
    pending_logprobs: Any


class Generator(Protocol):
    """What the engine drives: decode steps of some rows, prefill of others."""

    def insert(self, row: RowStart) -> int: ...
    def next(self, chunk_tokens: int) -> tuple[list[Prefilled], list[Said]]:
        """One decode step of every row that decodes, and up to `chunk_tokens` tokens of every row in prefill."""
        ...

    def peek(self, uid: int) -> list[Any]:
        """A row's own caches, lazily: only what is evaluated of them costs anything."""
        ...

    def take_out(self, uid: int) -> TakenOut: ...
    def remove(self, uid: int) -> None: ...
    @property
    def nbytes(self) -> int:
        """Bytes of all caches in it."""
        ...

    def close(self) -> None: ...


class BatchedRows:
    """`Generator` over mlx-lm's `BatchGenerator`."""

    def __init__(
        self, model: Any, *, eos_ids: frozenset[int], max_batch: int, prefill_rows: int, most_chunk_tokens: int
    ) -> None:
        self._generator = BatchGenerator(
            model,
            stop_tokens=[[token_id] for token_id in sorted(eos_ids)],
            completion_batch_size=max_batch,
            prefill_batch_size=min(prefill_rows, max_batch),
            prefill_step_size=most_chunk_tokens,
        )

    def insert(self, row: RowStart) -> int:
        (uid,) = self._generator.insert_segments(
            [row.segments],
            max_tokens=[row.max_tokens],
            caches=[row.caches],
            all_tokens=[row.cached_ids],
            samplers=[row.sampler],
            logits_processors=[list(row.processors)],
        )
        return int(uid)

    def next(self, chunk_tokens: int) -> tuple[list[Prefilled], list[Said]]:
        self._generator.prefill_step_size = chunk_tokens
        prefilled, said = self._generator.next()
        return (
            [Prefilled(x.uid, x.progress[0], x.end_of_segment, x.end_of_prompt) for x in prefilled],
            [
                Said(x.uid, x.token, x.logprobs, x.finish_reason is not None, x.finish_reason == "stop", x.prompt_cache)
                for x in said
            ],
        )

    def peek(self, uid: int) -> list[Any]:
        caches: list[Any] = self._generator.extract_cache([uid])[uid][0]
        return caches

    def take_out(self, uid: int) -> TakenOut:
        batch = self._generator._generation_batch
        pending, logprobs = None, None
        if uid in batch.uids:
            index = batch.uids.index(uid)
            pending, logprobs = int(batch._next_tokens[index].item()), batch._next_logprobs[index]
        caches, tokens = self._generator.remove([uid], return_prompt_caches=True)[uid]
        mx.eval([cache.state for cache in leaves(caches) if not cache.empty()])
        return TakenOut(caches, len(tokens), pending, logprobs)

    def remove(self, uid: int) -> None:
        self._generator.remove([uid])

    @property
    def nbytes(self) -> int:
        return int(self._generator.prompt_cache_nbytes)

    def close(self) -> None:
        self._generator.close()

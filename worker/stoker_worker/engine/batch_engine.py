"""The engine: mlx-lm's `BatchGenerator` with a block pool, stop strings and caches handed over. Engine thread only.

Owns which sequences are in the batch and what becomes of them. Does not know agents, jobs, disk or Redis: work comes
in as token ids and a restored prefix, and leaves as tokens, text and the cache bytes that are new.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlx_lm.generate import BatchGenerator

from stoker_shared.errors import RequestNotServed
from stoker_shared.request import GenerationRequest
from stoker_worker.engine.arrays import prefix_to_caches, slice_caches, take_snapshot
from stoker_worker.engine.block_pool import BlockPool
from stoker_worker.engine.sampling import row_sampler
from stoker_worker.engine.stop_scanner import StopScanner
from stoker_worker.ports import CacheSlice, Completion, EndedBy, GenerationTiming, GenerationWork, LoadedModel, Snapshot


@dataclass
class _Row:
    """One sequence from submission to its end."""

    uid: int
    work: GenerationWork
    stops: StopScanner | None
    generator_uid: int | None = None  # None while it waits for a slot and blocks
    generated: list[int] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.perf_counter)
    inserted_at: float = 0.0
    first_token_at: float = 0.0
    snapshots: list[Snapshot] = field(default_factory=list)

    @property
    def reserved_tokens(self) -> int:
        return len(self.work.prompt_ids) + self.work.request.max_tokens


class BlockPoolBatchEngine:
    """Continuous batching over mlx-lm, by composition: rows join and leave between two decode steps."""

    def __init__(
        self, model: Any, loaded: LoadedModel, *, pool: BlockPool, max_batch: int, prefill_step_tokens: int
    ) -> None:
        """
        Args:
            model: an mlx-lm model, evaluated on this thread.
            pool: KV memory; a row enters the batch only with its blocks reserved.
            max_batch: most rows decoding at once.
            prefill_step_tokens: most prompt tokens of one row prefilled between two decode steps.
        """
        self._model = model
        self._spec = loaded.spec
        self._codec = loaded.codec.fork()
        self._pool = pool
        self._max_batch = max_batch
        self._generator = BatchGenerator(
            model,
            stop_tokens=[[token_id] for token_id in sorted(loaded.codec.eos_ids)],
            completion_batch_size=max_batch,
            prefill_batch_size=min(4, max_batch),
            prefill_step_size=prefill_step_tokens,
        )
        self._waiting: deque[_Row] = deque()
        self._batch: dict[int, _Row] = {}  # by the generator's uid
        self._next_uid = 0

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._batch)

    def progress(self) -> dict[int, int]:
        return {row.uid: len(row.generated) for row in (*self._waiting, *self._batch.values())}

    def submit(self, work: GenerationWork) -> int:
        request = work.request
        _refuse_unserved(request)
        self._pool.check(len(work.prompt_ids) + request.max_tokens)
        stops = StopScanner(self._codec, request.stop) if request.stop else None
        row = _Row(uid=self._next_uid, work=work, stops=stops)
        self._next_uid += 1
        self._waiting.append(row)
        return row.uid

    def step(self) -> list[Completion]:
        """One decode step of every row in the batch and one chunk of prefill.

        Only the rows that end in this step are copied out; the others are not disturbed.
        """
        self._admit()
        if not self._batch:
            return []
        prompt_responses, responses = self._generator.next()
        self._look_at_prompts(prompt_responses)
        return list(self._advance(responses))

    def cancel(self, uid: int) -> Completion | None:
        row = next((row for row in (*self._waiting, *self._batch.values()) if row.uid == uid), None)
        if row is None:
            return None
        if row.generator_uid is None:
            self._waiting.remove(row)
        else:
            self._generator.remove([row.generator_uid])
            self._drop(row)
        return self._completion(row, outcome="cancelled", text=self._text(row))

    def close(self) -> None:
        self._generator.close()

    def _admit(self) -> None:
        """Move waiting rows into the batch, oldest first, while there is a slot and their blocks are free."""
        while self._waiting and len(self._batch) < self._max_batch:
            row = self._waiting[0]
            if not self._pool.allocate(row.uid, row.reserved_tokens):
                return
            self._waiting.popleft()
            self._insert(row)

    def _insert(self, row: _Row) -> None:
        work, prefix = row.work, row.work.prefix
        reused = prefix.n_tokens if prefix else 0
        row.inserted_at = time.perf_counter()
        (row.generator_uid,) = self._generator.insert(
            [list(work.prompt_ids[reused:])],
            max_tokens=[work.request.max_tokens],
            caches=[prefix_to_caches(self._model, prefix, self._spec) if prefix else None],
            all_tokens=[list(work.prompt_ids[:reused])],
            samplers=[row_sampler(work.request)],
        )
        if prefix and prefix.states and reused == len(work.prompt_ids) - 1:
            row.snapshots.append(Snapshot(reused, prefix.states))  # nothing is prefilled before this point
        row.work = replace(work, prefix=None)  # the generator has its own copy
        self._batch[row.generator_uid] = row

    def _look_at_prompts(self, responses: Any) -> None:
        """Take a snapshot of each row that has just been prefilled up to its last prompt token.

        mlx-lm always stops there. One token earlier than the end of the prompt, because the same prompt may come again
        and a model must see at least one token of it.
        """
        if not self._spec.snapshot_layers:
            return
        for response in responses:
            row = self._batch[response.uid]
            if response.end_of_segment and not response.end_of_prompt and row.work.save_from is not None:
                caches, _ = self._generator.extract_cache([response.uid])[response.uid]
                row.snapshots.append(take_snapshot(caches, len(row.work.prompt_ids) - 1, self._spec))

    def _advance(self, responses: Any) -> Iterator[Completion]:
        now = time.perf_counter()
        for response in responses:
            row = self._batch[response.uid]
            row.first_token_at = row.first_token_at or now
            row.generated.append(response.token)
            at_eos = response.finish_reason == "stop"
            if row.stops and not at_eos and row.stops.add(response.token):
                yield self._end_at_stop_string(row, response)
            elif response.finish_reason is not None:
                yield self._end(row, response.prompt_cache, "eos" if at_eos else "length")

    def _end(self, row: _Row, caches: list[Any], ended_by: EndedBy) -> Completion:
        self._drop(row)
        return self._completion(
            row, outcome="finished", text=self._text(row), ended_by=ended_by, kept=len(row.generated), caches=caches
        )

    def _end_at_stop_string(self, row: _Row, response: Any) -> Completion:
        assert row.stops is not None
        text, kept, carry_text = row.stops.cut()
        if response.finish_reason is None:
            removed = self._generator.remove([response.uid], return_prompt_caches=True)
            caches, _ = removed[response.uid]
        else:
            caches = response.prompt_cache
        self._drop(row)
        return self._completion(
            row, outcome="finished", text=text, ended_by="stop", kept=kept, carry_text=carry_text, caches=caches
        )

    def _drop(self, row: _Row) -> None:
        assert row.generator_uid is not None
        del self._batch[row.generator_uid]
        self._pool.release(row.uid)

    def _completion(
        self,
        row: _Row,
        *,
        outcome: Literal["finished", "cancelled"],
        text: str,
        ended_by: EndedBy | None = None,
        kept: int = 0,
        carry_text: str = "",
        caches: list[Any] | None = None,
    ) -> Completion:
        return Completion(
            uid=row.uid,
            outcome=outcome,
            generated_ids=tuple(row.generated),
            text=text,
            ended_by=ended_by,
            kept=kept,
            carry_text=carry_text,
            cache=self._cache_of(row, caches, kept) if caches is not None else None,
            timing=_timing(row),
        )

    def _cache_of(self, row: _Row, caches: list[Any], kept: int) -> CacheSlice | None:
        """What of a finished row's caches is to be saved."""
        start, n_prompt = row.work.save_from, len(row.work.prompt_ids)
        if start is None or not self._spec.can_be_stored:
            return None
        snapshots = row.snapshots
        if self._spec.snapshot_layers and kept == len(row.generated):  # a window cannot be cut back to a stop string
            snapshots = [*snapshots, take_snapshot(caches, n_prompt + kept, self._spec)]
        return slice_caches(caches, start, n_prompt + kept, self._spec, tuple(snapshots))

    def _text(self, row: _Row) -> str:
        ids = row.generated
        return self._codec.decode(ids[:-1] if ids and ids[-1] in self._codec.eos_ids else ids)


def _timing(row: _Row) -> GenerationTiming:
    now = time.perf_counter()
    inserted = row.inserted_at or now
    first = row.first_token_at or now
    return GenerationTiming(waited_s=inserted - row.submitted_at, prefill_s=first - inserted, decode_s=now - first)


def _refuse_unserved(request: GenerationRequest) -> None:
    for name, is_asked in (
        ("repetition_penalty", request.repetition_penalty not in (None, 1.0)),
        ("logprobs", request.logprobs),
    ):
        if is_asked:
            raise RequestNotServed(f"this version of the worker does not serve '{name}'")

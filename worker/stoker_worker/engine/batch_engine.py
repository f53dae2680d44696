"""The engine: one continuous batch within a KV memory budget. Engine thread only.

Owns what becomes of the rows: what they say, how they end, and what happens when a step breaks. Does not know agents,
jobs, disk or Redis: work comes in as token ids and a restored prefix, and leaves as tokens, text and new cache bytes.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from stoker_shared.errors import BlockPoolTooSmall, EngineFailed
from stoker_shared.result import TokenLogprob
from stoker_worker.engine.arrays import slice_caches, take_snapshot
from stoker_worker.engine.batch_width import BatchWidth
from stoker_worker.engine.block_pool import BlockPool
from stoker_worker.engine.generator import Generator, Prefilled, Said
from stoker_worker.engine.pace import PrefillPace
from stoker_worker.engine.pricing import BatchPricing
from stoker_worker.engine.roster import Roster
from stoker_worker.engine.row import Row
from stoker_worker.engine.sampling import RowSampling
from stoker_worker.engine.stop_scanner import StopScanner
from stoker_worker.engine.token_logprobs import token_logprob
from stoker_worker.ports import CacheSlice, Completion, EndedBy, GenerationWork, LoadedModel, RowProgress

_MOST_BREAKS: Final = 2
"""Steps that a row may break alone before it is failed."""

_log = logging.getLogger(__name__)


class BlockPoolBatchEngine:
    """Continuous batching over mlx-lm, by composition: rows join and leave between two decode steps."""

    def __init__(
        self,
        model: Any,
        loaded: LoadedModel,
        *,
        make_generator: Callable[[], Generator],
        pool: BlockPool,
        pricing: BatchPricing,
        pace: PrefillPace,
        max_batch: int,
        prefill_rows: int,
    ) -> None:
        """
        Args:
            model: an mlx-lm model, evaluated on this thread.
            make_generator: a fresh, empty generator; called again after a step that broke.
            max_batch, prefill_rows: most rows in the batch, and of those in prefill.
        """
        self._spec = loaded.spec
        self._has_memory = loaded.has_memory
        self._codec = loaded.codec.fork()
        self._make_generator = make_generator
        self._generator = make_generator()
        self._pool = pool
        self._pricing = pricing
        self._pace = pace
        self._width = BatchWidth(max_batch)
        self._roster = Roster(
            model,
            loaded.spec,
            pool=pool,
            pricing=pricing,
            pace=pace,
            width=self._width,
            prefill_rows=min(prefill_rows, max_batch),
        )
        self._next_uid = 0

    @property
    def in_flight(self) -> int:
        return sum(1 for _ in self._roster)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the batch's caches may take now, by the pool's reckoning; never less than they do."""
        return self._roster.held_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes that the batch's caches do take now."""
        return self._generator.nbytes

    def progress(self) -> dict[int, RowProgress]:
        return {row.uid: row.progress(stage) for row, stage in self._roster.by_stage()}

    def text(self, uid: int) -> str:
        row = self._row(uid)
        return "" if row is None else row.text(self._codec)

    def submit(self, work: GenerationWork) -> int:
        request, n_tokens = work.request, len(work.prompt_ids) + work.request.max_tokens
        if self._pricing.row_blocks(n_tokens) > self._pool.total:
            raise BlockPoolTooSmall(
                f"prompt + max_tokens is {n_tokens} tokens; this worker's KV memory holds "
                f"{self._pricing.longest_row(self._pool.total)} (--kv-max-bytes)"
            )
        stops = StopScanner(self._codec, request.stop) if request.stop else None
        if not self._has_memory:
            work = replace(work, save_from=None)
        row = Row(uid=self._next_uid, work=work, sampling=RowSampling(request), stops=stops)
        self._next_uid += 1
        self._roster.waiting.add(row)
        return row.uid

    def step(self) -> list[Completion]:
        """One decode step of every row in the batch and one chunk of prefill.

        Only the rows that end in this step are copied out; the others are not disturbed.
        """
        ended: list[Completion] = []
        try:
            ended.extend(self._step())
        except Exception as error:  # out of memory, or a fault in a kernel: whatever it is, the caches are unsure now
            ended.extend(self._start_over(error))
        return ended

    def cancel(self, uid: int) -> Completion | None:
        row = self._row(uid)
        if row is None:
            return None
        if row.generator_uid is not None:
            self._generator.remove(row.generator_uid)
        self._roster.drop(row)
        return self._completion(row, outcome="cancelled", text=self._text(row))

    def close(self) -> None:
        self._generator.close()

    def _row(self, uid: int) -> Row | None:
        return next((row for row in self._roster if row.uid == uid), None)

    # --- a step ---

    def _step(self) -> Iterator[Completion]:
        roster = self._roster
        while (row := roster.surplus()) is not None:
            yield from self._set_aside(row)
        roster.let_in(self._generator)
        decoding, prefilling = len(roster.decoding), len(roster.prefilling)
        if not decoding and not prefilling:
            return
        chunk = 0
        if prefilling:
            chunk = self._pace.chunk_tokens(decoding=decoding, prefilling=prefilling, waiting=len(roster.waiting))
        began = time.perf_counter()
        prefilled, said = self._generator.next(chunk)
        self._note(time.perf_counter() - began, decoding, prefilled)
        yield from self._look_at_prefill(prefilled)
        yield from self._advance(said)
        self._width.went_well()

    def _note(self, step_s: float, decoding: int, prefilled: list[Prefilled]) -> None:
        """Let the pace learn from a step; not from one where a row only changed over."""
        roster = self._roster
        moved = [x.n_tokens - roster.prefilling[x.uid].n_prefilled for x in prefilled if not x.at_prompt_end]
        widest = max(moved, default=0)
        if widest or len(moved) == len(prefilled):
            wanting = len(roster.prefilling) + len(roster.waiting)
            self._pace.note(step_s, decoding=decoding, wanting=wanting, prefill_tokens=len(moved) * widest)

    def _look_at_prefill(self, prefilled: Iterable[Prefilled]) -> Iterator[Completion]:
        """Take a snapshot of each row that stands just before its last prompt token.

        One token earlier than the end of the prompt, because the same prompt may come again, and a model must see at
        least one token of it.
        """
        roster = self._roster
        for at in prefilled:
            row = roster.prefilling[at.uid]
            row.n_prefilled = at.n_tokens
            if at.at_prompt_end:
                roster.decoding[at.uid] = roster.prefilling.pop(at.uid)
                if row.ended_by is not None:  # its last token was said before it was set aside, and is in the cache now
                    yield self._end(row, None)
            elif self._spec.snapshot_layers and row.wants_snapshot and at.at_segment_end:
                row.snapshots.append(take_snapshot(self._generator.peek(at.uid), row.n_prompt - 1, self._spec))

    def _advance(self, said: Iterable[Said]) -> Iterator[Completion]:
        now = time.perf_counter()
        for one in said:
            row = self._roster.decoding[one.uid]
            row.first_token_at = row.first_token_at or now
            self._say(row, one.token, one.logprobs)
            if row.ended_by is not None:
                yield self._end(row, one.caches)
            elif row.sampling.error is not None:
                self._generator.remove(one.uid)
                self._roster.drop(row)
                yield self._failed(row, row.sampling.error)

    def _say(self, row: Row, token: int, logprobs: Any) -> None:
        """Add `token` to the answer, and note whether the row ends with it."""
        row.generated.append(token)
        if row.work.request.logprobs:
            row.logprobs.append(self._logprob(row, token, logprobs))
        if token in self._codec.eos_ids:
            row.ended_by = "eos"
        elif row.stops and row.stops.add(token):
            row.ended_by = "stop"
        elif row.n_left <= 0:
            row.ended_by = "length"

    def _set_aside(self, row: Row) -> Iterator[Completion]:
        """Take a row out of the batch with its state; it comes back as if it had never left."""
        assert row.generator_uid is not None
        out = self._generator.take_out(row.generator_uid)
        self._roster.set_aside(row)
        row.caches, row.n_cached = out.caches, out.n_tokens
        if out.pending is not None:
            # It is said now and fed later: a token that was sampled must not be sampled again, or a row with a seed
            # would draw another one.
            self._say(row, out.pending, out.pending_logprobs)
            if row.ended_by == "stop":
                yield self._end(row, out.caches)

    # --- ends ---

    def _end(self, row: Row, caches: list[Any] | None) -> Completion:
        """The row has ended; `caches` are its own, when the generator has handed them over already."""
        if caches is None:
            assert row.generator_uid is not None
            caches = self._generator.take_out(row.generator_uid).caches
        text, kept, carry_text = self._text(row), len(row.generated), ""
        if row.ended_by == "stop":
            assert row.stops is not None
            text, kept, carry_text = row.stops.cut()
        cache = self._cache(row, caches, kept)
        self._roster.drop(row)
        ended_by: EndedBy | None = row.ended_by
        return self._completion(
            row, outcome="finished", text=text, ended_by=ended_by, kept=kept, carry_text=carry_text, cache=cache
        )

    def _failed(self, row: Row, error: Exception) -> Completion:
        failed = EngineFailed(f"{type(error).__name__}: {error}")
        return self._completion(row, outcome="failed", text=self._text(row), error=failed)

    def _completion(self, row: Row, **how: Any) -> Completion:
        return Completion(
            uid=row.uid,
            generated_ids=tuple(row.generated),
            cached_tokens=row.n_reused,
            logprobs=row.all_logprobs(),
            timing=row.timing(),
            **how,
        )

    def _cache(self, row: Row, caches: list[Any], kept: int) -> CacheSlice | None:
        """What of a finished row's caches is to be saved: up to the last of `kept` tokens of its answer."""
        start = row.work.save_from
        if start is None:
            return None
        snapshots = row.snapshots
        if self._spec.snapshot_layers and kept == len(row.generated):  # a window cannot be cut back to a stop string
            snapshots = [*snapshots, take_snapshot(caches, row.n_tokens, self._spec)]
        return slice_caches(caches, start, row.n_prompt + kept, self._spec, tuple(snapshots))

    def _logprob(self, row: Row, token: int, logprobs: Any) -> TokenLogprob:
        return token_logprob(token, logprobs, n_top=row.work.request.top_logprobs or 0, codec=self._codec)

    def _text(self, row: Row) -> str:
        ids = row.generated
        return self._codec.decode(ids[:-1] if ids and ids[-1] in self._codec.eos_ids else ids)

    def _start_over(self, error: Exception) -> Iterator[Completion]:
        """Rebuild from token ids what was in the batch, half as many rows at a time, so that what broke it is found."""
        rows = self._roster.empty()
        self._width.broke([row.uid for row in rows])
        _log.error("a step of %d rows broke; starting over from their tokens", len(rows), exc_info=error)
        if not rows:
            raise error
        self._generator.close()
        self._generator = self._make_generator()
        for row in rows:
            row.restart()
            row.breaks += len(rows) == 1
            if row.breaks >= _MOST_BREAKS:
                self._width.blame(row.uid)
                yield self._failed(row, error)
            else:
                self._roster.waiting.add(row)

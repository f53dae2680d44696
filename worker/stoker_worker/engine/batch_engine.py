"""The engine: one continuous batch within a KV memory budget. Engine thread only.

Owns the steps: prefill, decode, the ends of sequences, and the recovery from a step that breaks. Does not know agents,
jobs, disk or Redis: work comes in as token ids and a restored prefix, and leaves as tokens, text and new cache bytes.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Final

from stoker_shared.errors import BlockPoolTooSmall, EngineFailed, RequestError
from stoker_worker.engine.generator import Generator, Prefilled, TokenOutput
from stoker_worker.engine.kv_memory import BlockPool, KVCost
from stoker_worker.engine.mlx_generators import (
    MOST_PREFILLING,
    REFERENCE_CHUNK_TOKENS,
    BatchedGenerator,
    SingleGenerator,
)
from stoker_worker.engine.prompt_scores import MOST_TOKENS, PromptScorer
from stoker_worker.engine.rows.rows_generator import RowsGenerator
from stoker_worker.engine.sampling import SequenceSampling, token_logprob
from stoker_worker.engine.scheduler import ConcurrentScheduler
from stoker_worker.engine.sequence import EndIds, Sequence
from stoker_worker.engine.step_limits import BatchWidth, PrefillBudget
from stoker_worker.engine.text import StopScanner
from stoker_worker.engine.transfer import cache_to_save, caches_at, prefix_to_caches, take_snapshot
from stoker_worker.ports import (
    CompletedGeneration,
    GenerationEnginePort,
    GenerationWork,
    LoadedModel,
    SequenceProgress,
    Snapshot,
)
from stoker_worker.ports.model import Batching

_MOST_BREAKS: Final = 2
"""A sequence fails after so many steps that broke while it ran alone."""

_log = logging.getLogger(__name__)


class BlockPoolBatchEngine(GenerationEnginePort):
    """Continuous batching over mlx-lm, by composition: sequences join and leave between two decode steps."""

    def __init__(
        self,
        model: Any,
        loaded: LoadedModel,
        *,
        make_generator: Callable[[], Generator],
        pool: BlockPool,
        kv_cost: KVCost,
        budget: PrefillBudget,
        max_batch: int,
        max_prefilling: int,
        shares_beginnings: bool = False,
        resumes_at_snapshots: bool = False,
    ) -> None:
        """`model` is an mlx-lm model, evaluated on this thread.

        Args:
            make_generator: makes an empty generator; called again after a step that broke.
            max_batch, max_prefilling: most sequences in the batch, and most of them in prefill.
            shares_beginnings: whether prompts that begin alike are prefilled once, wherever they part.
            resumes_at_snapshots: whether they are prefilled once, up to a snapshot that is taken where they part.
        """
        self._model = model
        self._loaded = loaded
        self._spec = loaded.spec
        self._tokenizer = loaded.tokenizer.fork()
        self._make_generator = make_generator
        self._generator = make_generator()
        self._pool = self.kv = pool
        self._kv_cost = kv_cost
        self._budget = budget
        self._width = BatchWidth(max_batch)
        self._scheduler = ConcurrentScheduler(
            pool=pool,
            kv_cost=kv_cost,
            width=self._width,
            max_prefilling=min(max_prefilling, max_batch),
            shares_beginnings=shares_beginnings,
            resume=partial(caches_at, model, self._spec) if resumes_at_snapshots else None,
        )
        self._next_uid = 0

    @property
    def longest_sequence(self) -> int:
        """Most tokens, prompt and answer, of a sequence that has all the KV memory to itself."""
        return self._kv_cost.longest_sequence(self._pool.total)

    @property
    def in_flight(self) -> int:
        return sum(1 for _ in self._scheduler)

    def progress(self) -> dict[int, SequenceProgress]:
        return {sequence.uid: sequence.progress(stage) for sequence, stage in self._scheduler.by_stage()}

    def text(self, uid: int) -> str:
        sequence = self._sequence(uid)
        return "" if sequence is None else sequence.text(self._tokenizer)

    def submit(self, work: GenerationWork) -> int:
        n_tokens = len(work.prompt_ids) + work.request.max_tokens
        if (n_blocks := self._kv_cost.sequence_blocks(n_tokens)) > self._pool.total:
            raise BlockPoolTooSmall(
                f"Cannot allocate {n_blocks} blocks: prompt + max_tokens is {n_tokens} tokens; this worker's KV memory "
                f"holds {self.longest_sequence} (--kv-max-bytes)"
            )
        sequence = self._make_sequence(self._next_uid, work)  # a fault in its prefix must end no other sequence
        self._next_uid += 1
        self._scheduler.waiting.add(sequence)
        return sequence.uid

    def _make_sequence(self, uid: int, work: GenerationWork) -> Sequence:
        """Raises `ValueError` if the restored prefix is not one of this model, or its memory is still in use."""
        request, prefix = work.request, work.prefix
        work = replace(work, prefix=None, is_saved=work.is_saved and self._loaded.has_memory)
        stops = StopScanner(self._tokenizer, request.stop, min_tokens=request.min_tokens) if request.stop else None
        end_ids = EndIds.of(request, self._tokenizer.eos_ids)
        sampling = SequenceSampling(request, n_prompt=len(work.prompt_ids), end_ids=end_ids.all)
        sequence = Sequence(uid, work, sampling, stops, end_ids, scorer=PromptScorer.of(work, self._tokenizer))
        if work.is_saved and self._spec.snapshot_layers:
            sequence.cut_at.update(work.checkpoints_at)
        if prefix is not None:
            sequence.take_prefix(prefix, prefix_to_caches(self._model, prefix, self._spec))
        return sequence

    def step(self) -> list[CompletedGeneration]:
        """One decode step of every sequence in the batch, and a chunk of each one in prefill. Ends do not disturb the
        others."""
        ended: list[CompletedGeneration] = []
        try:
            ended.extend(self._step())
        except Exception as error:  # out of memory, or a fault in a kernel: the caches cannot be trusted now
            ended.extend(self._start_over(error))
        return ended

    def cancel(self, uid: int) -> CompletedGeneration | None:
        sequence = self._sequence(uid)
        if sequence is None:
            return None
        self._remove(sequence)
        return sequence.completion("cancelled", self._tokenizer)

    def close(self) -> None:
        self._generator.close()

    def _sequence(self, uid: int) -> Sequence | None:
        return next((sequence for sequence in self._scheduler if sequence.uid == uid), None)

    # --- a step ---

    def _step(self) -> Iterator[CompletedGeneration]:
        scheduler = self._scheduler
        while (victim := scheduler.victim()) is not None:
            yield from self._preempt(victim)
        scheduler.let_in(self._generator)
        for sequence in scheduler.prefilled():
            assert sequence.generator_uid is not None
            sequence.ended_by = "length"
            yield self._end(sequence, self._generator.take_out(sequence.generator_uid).caches)
        decoding, prefilling = len(scheduler.decoding), len(scheduler.prefilling)
        if not decoding and not prefilling:
            return
        chunk = 0
        if prefilling:
            chunk = self._budget.chunk_tokens(decoding=decoding, prefilling=prefilling, waiting=len(scheduler.waiting))
            if any(sequence.scorer is not None for sequence in scheduler.prefilling.values()):
                chunk = min(chunk, MOST_TOKENS // prefilling)
        began = time.perf_counter()
        prefilled, outputs = self._generator.next(chunk)
        self._measure(time.perf_counter() - began, decoding, prefilled)
        yield from self._after_prefill(prefilled)
        yield from self._advance(outputs)
        self._width.went_well(decoding + prefilling)

    def _measure(self, step_s: float, decoding: int, prefilled: list[Prefilled]) -> None:
        """Let the budget learn from a step, unless its only prefill was the last tokens of prompts."""
        scheduler = self._scheduler
        moved = [x.n_tokens - scheduler.prefilling[x.uid].n_prefilled for x in prefilled if not x.at_prompt_end]
        if any(moved) or len(moved) == len(prefilled):
            wanting = len(scheduler.prefilling) + len(scheduler.waiting)
            self._budget.note(step_s, decoding=decoding, wanting=wanting, prefill_tokens=sum(moved))

    def _after_prefill(self, prefilled: Iterable[Prefilled]) -> Iterator[CompletedGeneration]:
        """Note the progress of prefill, and take each sequence's snapshots: where its prompt is cut, and just before
        its last token: the same prompt may come again, and a model must see at least one token of it."""
        scheduler = self._scheduler
        for at in prefilled:
            sequence = scheduler.prefilling[at.uid]
            sequence.n_prefilled = at.n_tokens
            if sequence.error is not None:
                yield self._failed(sequence, sequence.error)
            elif at.at_prompt_end:
                scheduler.decoding[at.uid] = scheduler.prefilling.pop(at.uid)
                if sequence.ended_by is not None:  # its last token was output when it was preempted, and is cached now
                    yield self._end(sequence, None)
            elif self._spec.snapshot_layers and at.at_segment_end:
                sequence.note_prefilled(at.n_tokens, partial(self._snapshot, at.uid))

    def _snapshot(self, generator_uid: int, n_tokens: int) -> Snapshot:
        return take_snapshot(self._generator.peek(generator_uid), n_tokens, self._spec)

    def _advance(self, outputs: Iterable[TokenOutput]) -> Iterator[CompletedGeneration]:
        now = time.perf_counter()
        for uid, of_sequence in groupby(outputs, key=lambda output: output.uid):
            new = list(of_sequence)
            sequence = self._scheduler.decoding[uid]
            sequence.first_token_at = sequence.first_token_at or now
            for n_done, output in enumerate(new, start=1):
                self._add(sequence, output.token, output.logprobs)
                if sequence.ended_by is not None:
                    yield self._end(sequence, new[-1].caches, len(new) - n_done)
                    break
            if sequence.ended_by is None and sequence.error is not None:
                yield self._failed(sequence, sequence.error)

    def _add(self, sequence: Sequence, token: int, logprobs: Any) -> None:
        request = sequence.work.request
        if request.logprobs:
            n_top = request.top_logprobs or 0
            sequence.logprobs.append(token_logprob(token, logprobs, n_top=n_top, tokenizer=self._tokenizer))
        sequence.add(token)

    def _preempt(self, victim: Sequence) -> Iterator[CompletedGeneration]:
        """Take a sequence out of the batch with its state; it returns as if it had never left."""
        assert victim.generator_uid is not None
        out = self._generator.take_out(victim.generator_uid)
        self._scheduler.preempt(victim)
        victim.caches, victim.n_cached = out.caches, out.n_tokens
        if out.pending is not None:
            # The token is output now and fed later: sampled again, a sequence with a seed would draw another one.
            victim.first_token_at = victim.first_token_at or time.perf_counter()
            self._add(victim, out.pending, out.pending_logprobs)
            if victim.ended_by == "stop":
                yield self._end(victim, out.caches)

    def _end(self, sequence: Sequence, caches: list[Any] | None, n_after: int = 0) -> CompletedGeneration:
        """End a sequence. `caches` are its own, if the generator has returned them already. Its cache also has the
        `n_after` tokens behind its end."""
        if caches is None:
            assert sequence.generator_uid is not None
            out = self._generator.take_out(sequence.generator_uid)
            if out.n_tokens != sequence.n_tokens + n_after:
                raise ValueError(f"a sequence of {sequence.n_tokens} tokens has {out.n_tokens} in its cache")
            caches = out.caches
        cache = cache_to_save(sequence, caches, self._spec)
        self._scheduler.drop(sequence)
        return sequence.completion("finished", self._tokenizer, cache=cache)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.generator_uid is not None:
            self._generator.remove(sequence.generator_uid)
        self._scheduler.drop(sequence)

    def _failed(self, sequence: Sequence, error: Exception) -> CompletedGeneration:
        self._remove(sequence)
        failed = error if isinstance(error, RequestError) else EngineFailed(f"{type(error).__name__}: {error}")
        return sequence.completion("failed", self._tokenizer, error=failed)

    def _start_over(self, error: Exception) -> Iterator[CompletedGeneration]:
        """Rebuild the batch from token ids, with half as many sequences at a time, so that the cause is found."""
        sequences = self._scheduler.empty()
        self._width.broke(len(sequences))
        said = "a step of %d sequences broke; starting over from their tokens, %d at a time"
        _log.error(said, len(sequences), self._width.now, exc_info=error)
        if not sequences:
            raise error
        self._generator.close()
        self._generator = self._make_generator()
        for sequence in sequences:
            sequence.restart()
            sequence.breaks += len(sequences) == 1
            if sequence.breaks >= _MOST_BREAKS:
                self._width.blame_one()
                yield self._failed(sequence, error)
            else:
                self._scheduler.waiting.add(sequence)


def assemble(
    model: Any,
    loaded: LoadedModel,
    *,
    max_bytes: int,
    max_batch: int,
    prefill_tokens: int,
    max_step_s: float,
    draft_ngram: bool = False,
    make: "Callable[..., BlockPoolBatchEngine]" = BlockPoolBatchEngine,
) -> BlockPoolBatchEngine:
    """An engine over `model` with `max_bytes` of KV memory, in the mode of `loaded`.

    Args:
        draft_ngram: whether rows may get drafts, if all layers are full attention.
        make: makes the engine; a trial has its own kind.
    """
    batching = loaded.mode.batching
    if batching in (Batching.ONE_AT_A_TIME, Batching.AS_MLX_LM):
        max_batch = max_prefilling = 1
        chunk_tokens = REFERENCE_CHUNK_TOKENS if batching == Batching.AS_MLX_LM else None
        make_generator: Callable[[], Generator] = partial(SingleGenerator, model, chunk_tokens=chunk_tokens)
    elif batching == Batching.ROWS:
        max_prefilling = MOST_PREFILLING
        make_generator = partial(RowsGenerator, model, loaded.spec, draft_ngram=draft_ngram)
    else:
        max_prefilling = 1 if batching == Batching.SINGLE_PREFILL else MOST_PREFILLING
        make_generator = partial(
            BatchedGenerator,
            model,
            max_batch=max_batch,
            max_prefilling=max_prefilling,
            max_chunk_tokens=prefill_tokens,
        )
    kv_cost = KVCost(loaded.spec, prefill_tokens, in_rows=batching == Batching.ROWS)
    pool = BlockPool(max_bytes // kv_cost.block_bytes)
    return make(
        model,
        loaded,
        make_generator=make_generator,
        pool=pool,
        kv_cost=kv_cost,
        budget=PrefillBudget(max_step_s, prefill_tokens),
        max_batch=max_batch,
        max_prefilling=max_prefilling,
        shares_beginnings=batching == Batching.ROWS and loaded.has_memory and loaded.spec.has_only_full_layers,
        resumes_at_snapshots=max_batch > 1 and loaded.has_memory and bool(loaded.spec.snapshot_layers),
    )

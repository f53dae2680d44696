"""Both generators over mlx-lm's own caches: a batch in mlx-lm's `BatchGenerator`, and one sequence at a time.

Owns all knowledge of the internals of `BatchGenerator`, such as the place of a token sampled and not yet in the cache.
Engine thread.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import make_prompt_cache

from stoker_worker.engine.generator import Generator, Prefilled, Scorer, SequenceStart, TakenOut, TokenOutput
from stoker_worker.engine.sampling import GuideProcessor, guided
from stoker_worker.models.cache_probe import leaves

MOST_PREFILLING: Final = 8
"""Most sequences prefilled together, as in mlx-lm: their chunks are padded to the longest."""


@dataclass
class _ScoredPrompt:
    scorer: Scorer
    n_before: int
    """Tokens in its cache before the next pass."""


class BatchedGenerator(Generator):
    """Sequences of unequal length in one batch."""

    def __init__(self, model: Any, *, max_batch: int, max_prefilling: int, max_chunk_tokens: int) -> None:
        self._model = model
        self._scored: dict[int, _ScoredPrompt] = {}
        # mlx-lm's batch would wire memory, and panics of macOS have been seen with that (--wired-memory).
        vars(import_module(BatchGenerator.__module__))["maybe_set_recommended_wired_limit"] = lambda: None
        self._generator = BatchGenerator(
            model,
            completion_batch_size=max_batch,
            prefill_batch_size=min(max_prefilling, max_batch),
            prefill_step_size=max_chunk_tokens,
        )
        self._generator._prompt_batch.model = self._prefill_pass

    def insert(self, start: SequenceStart) -> int:
        (uid,) = self._generator.insert_segments(
            [start.segments],
            max_tokens=[start.max_tokens],
            caches=[start.caches],
            all_tokens=[start.cached_ids],
            samplers=[start.sampler],
            logits_processors=[[*start.processors, *([GuideProcessor(start.guide)] if start.guide else [])]],
            stop_sequences=[StopSequences([[token_id] for token_id in sorted(start.end_ids)])],
        )
        if start.scorer is not None:
            self._scored[uid] = _ScoredPrompt(start.scorer, len(start.cached_ids))
        return int(uid)

    def next(self, chunk_tokens: int) -> tuple[list[Prefilled], list[TokenOutput]]:
        self._generator.prefill_step_size = chunk_tokens
        prefilled, outputs = self._generator.next()
        for x in prefilled:
            if x.end_of_prompt:
                self._scored.pop(x.uid, None)
        return (
            [Prefilled(x.uid, x.progress[0], x.end_of_segment, x.end_of_prompt) for x in prefilled],
            [TokenOutput(x.uid, x.token, x.logprobs, x.prompt_cache) for x in outputs],
        )

    def peek(self, uid: int) -> list[Any]:
        caches: list[Any] = self._generator.extract_cache([uid])[uid][0]
        return caches

    def take_out(self, uid: int) -> TakenOut:
        batch, prompts = self._generator._generation_batch, self._generator._prompt_batch
        self._scored.pop(uid, None)
        if uid in prompts.uids and not prompts.tokens[prompts.uids.index(uid)]:  # after a step without prefill
            self._generator.remove([uid])  # mlx-lm cannot extract a cache without tokens
            return TakenOut(make_prompt_cache(self._model), 0, None, None)
        pending, logprobs = None, None
        if uid in batch.uids:
            index = batch.uids.index(uid)
            pending, logprobs = int(batch._next_tokens[index].item()), batch._next_logprobs[index]
        caches, tokens = self._generator.remove([uid], return_prompt_caches=True)[uid]
        mx.eval([cache.state for cache in leaves(caches) if not cache.empty()])
        return TakenOut(caches, len(tokens), pending, logprobs)

    def remove(self, uid: int) -> None:
        self._scored.pop(uid, None)
        self._generator.remove([uid])

    def close(self) -> None:
        self._generator._prompt_batch.model = self._model  # a cycle would keep the caches until Python looks for cycles
        self._generator.close()

    def _prefill_pass(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """The model as mlx-lm's prompt batch calls it: once a step, with some tokens of each prompt, padded on the
        right. It is also called for the last token of sequences that leave the batch, with other caches."""
        logits: mx.array = self._model(inputs, cache=cache)
        batch = self._generator._prompt_batch
        if cache is batch.prompt_cache:
            for row, (uid, tokens) in enumerate(zip(batch.uids, batch.tokens, strict=True)):
                if (scored := self._scored.get(uid)) is not None:
                    scored.scorer.take(logits[row, : len(tokens) - scored.n_before], scored.n_before)
                    scored.n_before = len(tokens)
        return logits


REFERENCE_CHUNK_TOKENS: Final = 2048
"""The chunk size of `mlx_lm.generate`'s prefill."""


class SingleGenerator(Generator):
    """Holds one sequence; the engine inserts no second one."""

    def __init__(self, model: Any, *, chunk_tokens: int | None = None) -> None:
        """`chunk_tokens`: the size of prefill's chunks, if not that given to `next`."""
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._uid = -1
        self._start: SequenceStart | None = None
        self._caches: list[Any] = []
        self._tokens: list[int] = []
        self._n_generated = 0
        self._segments: list[list[int]] = []
        self._pending: int | None = None
        self._logprobs: Any = None

    def insert(self, start: SequenceStart) -> int:
        assert self._start is None
        self._uid += 1
        self._start = start
        self._caches = start.caches if start.caches is not None else make_prompt_cache(self._model)
        self._tokens, self._n_generated = list(start.cached_ids), 0
        self._segments = [list(segment) for segment in start.segments]
        self._pending = self._logprobs = None
        return self._uid

    def next(self, chunk_tokens: int) -> tuple[list[Prefilled], list[TokenOutput]]:
        start = self._start
        if start is None:
            return [], []
        if self._pending is not None:
            return [], [self._output(start, self._pending)]
        segment = self._segments[0]
        is_last = len(self._segments) == 1
        if is_last and len(segment) == 1:
            self._feed(segment)
            self._segments.clear()
            self._sample(start, None)
            return [self._prefilled(start, at_segment_end=True, at_prompt_end=True)], []
        # The very last token of the prompt gives the first logits.
        n = min(self._chunk_tokens or chunk_tokens, len(segment) - is_last)
        self._feed(segment[:n])
        mx.eval(self._logits)
        del segment[:n]
        if not segment:
            self._segments.pop(0)
        at_end = not segment or (is_last and len(segment) == 1)
        return [self._prefilled(start, at_segment_end=at_end, at_prompt_end=False)], []

    def peek(self, uid: int) -> list[Any]:
        return self._caches

    def take_out(self, uid: int) -> TakenOut:
        out = TakenOut(self._caches, len(self._tokens), self._pending, self._logprobs)
        self.remove(uid)
        return out

    def remove(self, uid: int) -> None:
        self.close()

    def close(self) -> None:
        self._start, self._caches = None, []

    def _prefilled(self, start: SequenceStart, *, at_segment_end: bool, at_prompt_end: bool) -> Prefilled:
        return Prefilled(self._uid, len(self._tokens) - len(start.cached_ids), at_segment_end, at_prompt_end)

    def _feed(self, ids: list[int]) -> None:
        logits = self._model(mx.array([ids]), cache=self._caches)
        if self._start is not None and self._start.scorer is not None:
            self._start.scorer.take(logits[0], len(self._tokens))
        self._logits = logits[:, -1, :]
        mx.async_eval(self._logits, [cache.state for cache in self._caches])  # type: ignore[no-untyped-call]
        self._tokens += ids

    def _sample(self, start: SequenceStart, fed: int | None) -> None:
        """Draw the token after `fed`, the answer's newest; ``None`` after the prompt."""
        logits = self._logits
        for processor in start.processors:
            logits = processor(mx.array(self._tokens), logits)
        if start.guide is not None:
            logits = guided(logits, [(0, start.guide, fed)])
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = start.sampler(logprobs) if start.sampler else mx.argmax(logprobs, axis=-1)
        mx.eval(token, logprobs)
        (self._pending,), self._logprobs = np.asarray(token).tolist(), logprobs[0]

    def _output(self, start: SequenceStart, token: int) -> TokenOutput:
        logprobs = self._logprobs
        self._feed([token])
        self._sample(start, token)
        self._n_generated += 1
        is_last = token in start.end_ids or self._n_generated >= start.max_tokens
        output = TokenOutput(self._uid, token, logprobs, self._caches if is_last else None)
        if is_last:
            self.close()
        return output

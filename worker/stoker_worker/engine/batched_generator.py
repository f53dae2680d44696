"""`Generator` over mlx-lm's `BatchGenerator`, for models whose caches mlx-lm can batch. Engine thread.

Owns all knowledge of mlx-lm's internals, such as the place of a token that is sampled and not yet in the cache.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences

from stoker_worker.engine.generator import Prefilled, Scorer, SequenceStart, TakenOut, TokenOutput
from stoker_worker.engine.guiding import GuideProcessor
from stoker_worker.models.cache_probe import leaves

MOST_PREFILLING: Final = 8
"""Most sequences prefilled together, mlx-lm's own number: their chunks are padded to the longest."""


@dataclass
class _ScoredPrompt:
    scorer: Scorer
    n_before: int
    """Tokens in its cache before the next pass."""


class BatchedGenerator:
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

    def beginning(self, uid: int, n_tokens: int) -> list[Any]:
        raise NotImplementedError

    def share(self, uid: int, n_tokens: int) -> Any:
        raise NotImplementedError

    def take_out(self, uid: int) -> TakenOut:
        batch = self._generator._generation_batch
        self._scored.pop(uid, None)
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
        """The model, as mlx-lm's prompt batch calls it: once a step, with some tokens of each prompt, padded on the
        right. Sequences that leave the batch call it for their last token too, with other caches."""
        logits: mx.array = self._model(inputs, cache=cache)
        batch = self._generator._prompt_batch
        if cache is batch.prompt_cache:
            for row, (uid, tokens) in enumerate(zip(batch.uids, batch.tokens, strict=True)):
                if (scored := self._scored.get(uid)) is not None:
                    scored.scorer.take(logits[row, : len(tokens) - scored.n_before], scored.n_before)
                    scored.n_before = len(tokens)
        return logits

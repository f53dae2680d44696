"""`Generator` over mlx-lm's `BatchGenerator`, for models whose caches mlx-lm can batch. Engine thread.

Owns all knowledge of mlx-lm's internals, such as the place of a token that is sampled and not yet in the cache.
"""

from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from stoker_worker.engine.generator import Prefilled, SequenceStart, TakenOut, TokenOutput
from stoker_worker.models.cache_probe import leaves

MOST_PREFILLING: Final = 8
"""Most sequences prefilled together, mlx-lm's own number: their chunks are padded to the longest."""


class BatchedGenerator:
    """Sequences of unequal length in one batch."""

    def __init__(
        self, model: Any, *, eos_ids: frozenset[int], max_batch: int, max_prefilling: int, max_chunk_tokens: int
    ) -> None:
        self._generator = BatchGenerator(
            model,
            stop_tokens=[[token_id] for token_id in sorted(eos_ids)],
            completion_batch_size=max_batch,
            prefill_batch_size=min(max_prefilling, max_batch),
            prefill_step_size=max_chunk_tokens,
        )

    def insert(self, start: SequenceStart) -> int:
        (uid,) = self._generator.insert_segments(
            [start.segments],
            max_tokens=[start.max_tokens],
            caches=[start.caches],
            all_tokens=[start.cached_ids],
            samplers=[start.sampler],
            logits_processors=[list(start.processors)],
        )
        return int(uid)

    def next(self, chunk_tokens: int) -> tuple[list[Prefilled], list[TokenOutput]]:
        self._generator.prefill_step_size = chunk_tokens
        prefilled, outputs = self._generator.next()
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
        pending, logprobs = None, None
        if uid in batch.uids:
            index = batch.uids.index(uid)
            pending, logprobs = int(batch._next_tokens[index].item()), batch._next_logprobs[index]
        caches, tokens = self._generator.remove([uid], return_prompt_caches=True)[uid]
        mx.eval([cache.state for cache in leaves(caches) if not cache.empty()])
        return TakenOut(caches, len(tokens), pending, logprobs)

    def remove(self, uid: int) -> None:
        self._generator.remove([uid])

    def close(self) -> None:
        self._generator.close()

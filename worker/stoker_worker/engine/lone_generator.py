"""One row at a time, for models that mlx-lm cannot batch, or batches wrongly. Engine thread.

Behaves as `BatchedRows` does with a batch of one: a token is said once it is in the cache, with the next one sampled.
"""

from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from stoker_worker.engine.generator import Prefilled, RowStart, Said, TakenOut

REFERENCE_CHUNK_TOKENS: Final = 2048
"""The chunks in which `mlx_lm.generate` prefills."""


class LoneRow:
    """`Generator` that holds one row; the engine inserts no second one."""

    def __init__(self, model: Any, *, eos_ids: frozenset[int], chunk_tokens: int | None = None) -> None:
        """
        Args:
            chunk_tokens: prefill in chunks of so many tokens, whatever a step is asked for.
        """
        self._model = model
        self._eos_ids = eos_ids
        self._chunk_tokens = chunk_tokens
        self._uid = -1
        self._row: RowStart | None = None
        self._caches: list[Any] = []
        self._tokens: list[int] = []
        self._n_start = 0
        self._n_said = 0
        self._segments: list[list[int]] = []
        self._pending: int | None = None
        self._logprobs: Any = None

    def insert(self, row: RowStart) -> int:
        assert self._row is None
        self._uid += 1
        self._row = row
        self._caches = row.caches if row.caches is not None else make_prompt_cache(self._model)
        self._tokens, self._n_start, self._n_said = list(row.cached_ids), len(row.cached_ids), 0
        self._segments = [list(segment) for segment in row.segments]
        self._pending = self._logprobs = None
        return self._uid

    def next(self, chunk_tokens: int) -> tuple[list[Prefilled], list[Said]]:
        if self._row is None:
            return [], []
        if self._pending is not None:
            return [], [self._say(self._row, self._pending)]
        segment = self._segments[0]
        is_last = len(self._segments) == 1
        if is_last and len(segment) == 1:
            self._feed(segment)
            self._segments.clear()
            self._sample(self._row)
            return [Prefilled(self._uid, len(self._tokens) - self._n_start, True, True)], []
        # The very last token gives the first logits.
        n = min(self._chunk_tokens or chunk_tokens, len(segment) - is_last)
        self._feed(segment[:n])
        del segment[:n]
        if not segment:
            self._segments.pop(0)
        at_end = not segment or (is_last and len(segment) == 1)
        return [Prefilled(self._uid, len(self._tokens) - self._n_start, at_end, False)], []

    def peek(self, uid: int) -> list[Any]:
        return self._caches

    def take_out(self, uid: int) -> TakenOut:
        out = TakenOut(self._caches, len(self._tokens), self._pending, self._logprobs)
        self.remove(uid)
        return out

    def remove(self, uid: int) -> None:
        self._row, self._caches = None, []

    @property
    def nbytes(self) -> int:
        return sum(int(cache.nbytes) for cache in self._caches)

    def close(self) -> None:
        self._row, self._caches = None, []

    def _feed(self, ids: list[int]) -> None:
        logits = self._model(mx.array([ids]), cache=self._caches)
        self._logits = logits[:, -1, :]
        mx.eval(self._logits, [cache.state for cache in self._caches])
        self._tokens += ids

    def _sample(self, row: RowStart) -> None:
        logits = self._logits
        for processor in row.processors:
            logits = processor(mx.array(self._tokens), logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = row.sampler(logprobs) if row.sampler else mx.argmax(logprobs, axis=-1)
        mx.eval(token, logprobs)
        (self._pending,), self._logprobs = np.asarray(token).tolist(), logprobs[0]

    def _say(self, row: RowStart, token: int) -> Said:
        logprobs = self._logprobs
        self._feed([token])
        self._sample(row)
        self._n_said += 1
        at_eos = token in self._eos_ids
        is_last = at_eos or self._n_said >= row.max_tokens
        said = Said(self._uid, token, logprobs, is_last, at_eos, self._caches if is_last else None)
        if is_last:
            self.remove(self._uid)
        return said

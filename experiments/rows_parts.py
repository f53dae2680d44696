"""Where the time of a batch's steps goes, for EXP-017: model, attention, sampling, joins, leaves, Python. No results.

MLX computes later than Python asks, and beside it. Here each part is computed before the next begins, so the parts of a
run add up to it, and the run takes longer than one that is not watched.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from stopwatch import Stopwatch

PARTS = ("model", "attention", "sampling", "prefill", "join", "leave", "python")
"""The model's decode passes without attention; attention, with the writing of keys and values; a prompt's passes; the
copies of rows that join or leave; the rest."""


class Parts(Stopwatch):
    """All of one run; what is in no other part is Python's. Implements `rows_bench.Watch`."""

    def __init__(self) -> None:
        super().__init__()
        self._stack.append("python")

    @property
    def now(self) -> str:
        return self._stack[-1]

    def model(self, model: Any) -> Any:
        return _WatchedModel(model, self)

    def sampler(self) -> Any:
        """mlx-lm's greedy sampler."""
        import mlx.core as mx

        return self._timed(lambda logprobs: mx.argmax(logprobs, axis=-1), "sampling", lambda drawn, *_: drawn)

    @contextmanager
    def during(self, network: Any) -> Iterator[None]:
        """Watch what runs inside the block."""
        from mlx_lm.models.cache import BatchKVCache

        from stoker_worker.engine.rows import attention, decode_batch
        from stoker_worker.engine.rows.attention import StepCache

        with ExitStack() as stack:

            def watch(owner: Any, name: str, timed: Callable[..., Any]) -> None:
                stack.enter_context(patch.object(owner, name, timed))

            for owner, name, part, results in _watched_methods():
                watch(owner, name, self._timed(getattr(owner, name), part, results))
            watch(decode_batch, "drawn", self._timed(decode_batch.drawn, "sampling", lambda drawn, *_: drawn))
            for module in list(attention._modules_of(network)):
                name = attention._NAME
                watch(module, name, self._attention(getattr(module, name), lambda out: out))
            watch(BatchKVCache, "update_and_fetch", self._attention(BatchKVCache.update_and_fetch, lambda kv: kv))
            of_rows = self._attention(StepCache.update_and_fetch, lambda kv: [x.arrays for x in kv])
            watch(StepCache, "update_and_fetch", of_rows)
            self._since = time.perf_counter()
            yield
            self._tick()

    def _timed(self, call: Callable[..., Any], part: str, results: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, as `part`, until its `results` are computed."""
        import mlx.core as mx

        def timed(*args: Any, **options: Any) -> Any:
            with self.part(part):
                out = call(*args, **options)
                mx.eval(results(out, *args))
                return out

        return timed

    def _attention(self, call: Callable[..., Any], results: Callable[[Any], Any]) -> Callable[..., Any]:
        """`call`, as attention, in the model's decode passes; its inputs are the model's work."""
        import mlx.core as mx

        def timed(*args: Any, **options: Any) -> Any:
            if self.now != "model":
                return call(*args, **options)
            mx.eval([x for x in args if isinstance(x, mx.array)])
            with self.part("attention"):
                out = call(*args, **options)
                mx.eval(results(out))
                return out

        return timed


class _WatchedModel:
    """A model whose decode passes are computed when it is called."""

    def __init__(self, model: Any, parts: Parts) -> None:
        self._model = model
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        import mlx.core as mx

        if self._parts.now != "python":
            return self._model(*args, **options)
        with self._parts.part("model"):
            logits = self._model(*args, **options)
            mx.eval(logits)
            return logits


def _watched_methods() -> list[tuple[Any, str, str, Callable[..., Any]]]:
    """Classes, methods, their parts, and what they leave to be computed."""
    from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch

    from stoker_worker.engine.rows.decode_batch import DecodeBatch
    from stoker_worker.engine.rows.rows_generator import PrefillRows, RowsGenerator

    def caches(_: Any, batch: Any, *__: Any) -> Any:
        return [x for cache in batch.prompt_cache for x in (cache.keys, cache.values) if x is not None]

    def both(apart: Any, batch: Any, *_: Any) -> Any:
        return [caches(None, batch), caches(None, apart)]

    def groups(_: Any, batch: Any, *__: Any) -> Any:
        return [(group._keys, group._values) for group in batch._groups.groups]

    def newest(_: Any, generator: Any, *__: Any) -> Any:
        return [x for cache in generator._prefill.rows[-1].caches for x in (cache.keys, cache.values)]

    def nothing(*_: Any) -> Any:
        return []

    return [
        (DecodeBatch, "join", "join", groups),
        (DecodeBatch, "_drop", "leave", groups),
        (PrefillRows, "next", "prefill", nothing),
        (RowsGenerator, "insert", "join", newest),
        (GenerationBatch, "extend", "join", caches),
        (PromptProcessingBatch, "split", "join", both),
        (PromptProcessingBatch, "extend", "join", caches),
        (BatchGenerator, "_make_batch", "join", nothing),
        (PromptProcessingBatch, "prompt", "prefill", nothing),
        (GenerationBatch, "filter", "leave", caches),
    ]

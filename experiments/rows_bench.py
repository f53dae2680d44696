"""Loads for EXP-011 and EXP-017, and the ways to run them: mlx-lm's `BatchGenerator`, and the product's two generators.

Experiments only. All get the same rows, whose lists and caches are made anew for each run, because all extend them in
place. MLX is imported after the BLAS library is loaded.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bench import Bench

MLX_PREFILL_ROWS = 8
MLX_PREFILL_TOKENS = 2048
"""mlx-lm's own settings."""


@dataclass(frozen=True)
class Job:
    """A row: restored tokens, the prompt after them, and how many tokens to generate. No token ends it earlier."""

    context: tuple[int, ...]
    prompt: tuple[int, ...]
    max_tokens: int

    @property
    def n_tokens(self) -> int:
        return len(self.context) + len(self.prompt) + self.max_tokens


@dataclass(frozen=True)
class Load:
    """Rows for a number of places."""

    key: str
    name: str
    places: int
    target: float
    jobs: list[Job]


@dataclass(frozen=True)
class Run:
    """
    Attributes:
        tokens: those generated, by row.
        peak: most bytes at any time, beyond those that were in use before the rows' caches.
    """

    seconds: float
    tokens: list[list[int]]
    steps: int
    peak: int


class MlxLm:
    """mlx-lm's `BatchGenerator` at its own settings; it lets waiting rows in itself."""

    name = "mlx-lm"

    def __init__(self, bench: Bench, load: Load, caches: list[Any]) -> None:
        from mlx_lm.generate import BatchGenerator

        self._generator = BatchGenerator(
            bench.network,
            completion_batch_size=load.places,
            prefill_batch_size=min(MLX_PREFILL_ROWS, load.places),  # or it would have eight places
            prefill_step_size=MLX_PREFILL_TOKENS,
        )
        uids = self._generator.insert(
            [list(job.prompt) for job in load.jobs],
            max_tokens=[job.max_tokens for job in load.jobs],
            caches=_given_away(caches),
            all_tokens=[list(job.context) for job in load.jobs],
        )
        self._index = {uid: index for index, uid in enumerate(uids)}

    def next(self) -> Iterator[tuple[int, int]]:
        return ((self._index[x.uid], x.token) for x in self._generator.next()[1])

    def close(self) -> None:
        self._generator.close()


class Rows:
    """The product's `RowsGenerator`, with the engine's rules for letting rows in and the worker's chunks."""

    name = "rows"

    def __init__(self, bench: Bench, load: Load, caches: list[Any]) -> None:
        from stoker_worker.engine.mlx_generators import MOST_PREFILLING

        self._generator = self._made(bench, load)
        self._most_prefilling = MOST_PREFILLING
        self._chunk_tokens = bench.worker_chunk
        self._places = load.places
        self._waiting = list(zip(load.jobs, _given_away(caches), strict=True))[::-1]
        self._prefilling: set[int] = set()
        self._n_left: dict[int, int] = {}

    def _made(self, bench: Bench, load: Load) -> Any:
        from stoker_worker.engine.rows.rows_generator import RowsGenerator

        return RowsGenerator(bench.network, bench.model.spec)

    def next(self) -> Iterator[tuple[int, int]]:
        self._let_in()
        prefilled, outputs = self._generator.next(self._chunk_tokens if self._prefilling else 0)
        self._prefilling -= {x.uid for x in prefilled if x.at_prompt_end}
        for output in outputs:
            self._n_left[output.uid] -= 1
            if output.caches is not None:
                del self._n_left[output.uid]
        return ((output.uid, output.token) for output in outputs)

    def _let_in(self) -> None:
        """A row whose next token is its last gives up its place now, as in the engine and in mlx-lm."""
        from stoker_worker.engine.generator import SequenceStart

        taken = sum(n > 1 or uid in self._prefilling for uid, n in self._n_left.items())
        while self._waiting and taken < self._places and len(self._prefilling) < self._most_prefilling:
            job, caches = self._waiting.pop()
            segments = [list(part) for part in (job.prompt[:-1], job.prompt[-1:]) if part]
            uid = self._generator.insert(SequenceStart(segments, caches, list(job.context), job.max_tokens, None, []))
            self._prefilling.add(uid)
            self._n_left[uid] = job.max_tokens
            taken += 1

    def close(self) -> None:
        self._generator.close()


class Rectangle(Rows):
    """The product's `BatchedGenerator`, its way for models that do not run in rows, with the same rules."""

    name = "rectangle"

    def _made(self, bench: Bench, load: Load) -> Any:
        from stoker_worker.engine.mlx_generators import MOST_PREFILLING, BatchedGenerator

        return BatchedGenerator(
            bench.network, max_batch=load.places, max_prefilling=MOST_PREFILLING, max_chunk_tokens=bench.worker_chunk
        )


Contestant = type[MlxLm] | type[Rows]
CONTESTANTS: tuple[Contestant, ...] = (MlxLm, Rows)


def run_once(bench: Bench, contexts: "Contexts", load: Load, contestant: Contestant) -> Run:
    """One contestant's run of all rows, timed from their insertion to the last token."""
    import mlx.core as mx

    contexts.learn(load)
    mx.clear_cache()
    before = mx.get_active_memory()
    caches = [contexts.caches(job) for job in load.jobs]
    mx.reset_peak_memory()  # after the contexts' own prefill
    tokens: list[list[int]] = [[] for _ in load.jobs]
    steps, n_left = 0, sum(job.max_tokens for job in load.jobs)
    begin = time.perf_counter()
    running = contestant(bench, load, caches)
    while n_left:
        for index, token in running.next():
            tokens[index].append(token)
            n_left -= 1
        steps += 1
    seconds = time.perf_counter() - begin
    peak = mx.get_peak_memory() - before
    running.close()
    return Run(seconds, tokens, steps, peak)


class Contexts:
    """Caches of restored tokens: prefilled once for each text, and copied for each row of a run."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._known: dict[tuple[int, ...], list[tuple[Any, Any]]] = {}

    def learn(self, load: Load) -> None:
        """Prefill the contexts of a load, unless they are known, and forget all others."""
        wanted = {job.context for job in load.jobs if job.context}
        self._known = {ids: arrays for ids, arrays in self._known.items() if ids in wanted}
        self._known |= {ids: self._prefilled(ids) for ids in wanted - set(self._known)}

    def caches(self, job: Job) -> list[Any] | None:
        """Caches that own their arrays, with room for the row's end, as a restore leaves them; evaluated."""
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache

        if not job.context:
            return None
        caches, n_tokens = [], len(job.context)
        room = -(-job.n_tokens // KVCache.step) * KVCache.step
        for arrays in self._known[job.context]:
            cache = KVCache()
            cache.keys, cache.values = (
                mx.concatenate([x, mx.zeros((*x.shape[:2], room - n_tokens, x.shape[3]), x.dtype)], axis=2)
                for x in arrays
            )
            cache.offset = n_tokens
            caches.append(cache)
        mx.eval([[cache.keys, cache.values] for cache in caches])
        return caches

    def _prefilled(self, ids: tuple[int, ...]) -> list[tuple[Any, Any]]:
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache, make_prompt_cache

        caches = make_prompt_cache(self._bench.network)
        if not all(type(cache) is KVCache for cache in caches):
            raise SystemExit("this experiment needs a model whose layers are all full attention")
        for start in range(0, len(ids), 256):
            self._bench.network(mx.array([ids[start : start + 256]]), cache=caches)
            mx.eval([cache.state for cache in caches])
        arrays = [tuple(mx.contiguous(x[..., : len(ids), :]) for x in (cache.keys, cache.values)) for cache in caches]
        mx.eval(arrays)
        return arrays


def _given_away(caches: list[Any]) -> list[Any]:
    """The caller's list is emptied, so that the generator alone holds the caches and may write to them in place."""
    given, caches[:] = list(caches), []
    return given


def same_tokens(runs: Iterable[Run]) -> int:
    """Rows whose tokens are the same in all runs."""
    return sum(all(row == rows[0] for row in rows) for rows in zip(*(run.tokens for run in runs), strict=True))

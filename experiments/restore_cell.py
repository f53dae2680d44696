"""One cell of EXP-006: a restore of some blocks and layers, beside copies of the same bytes, in turn. Experiments only.

Owns the copies that a restore is compared with, and the way through mlx-lm's batch. No model runs.
"""

import mmap
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from common import Json, percentiles, spread, timed
from synthetic_cache import SavedAgent, same

from stoker_worker.memory.lookup import n_readers
from stoker_worker.ports import Array, SequenceCache


@dataclass(frozen=True)
class Limits:
    """How often one cell is measured.

    Attributes:
        others_every: in every such round the other ways are taken too: a fresh copy, extract, round trip; 0: never.
    """

    rounds: int
    warm_up: int
    others_every: int = 1


def measured(saved: SavedAgent, n_tokens: int, limits: Limits) -> Json:
    """Restores of the first `n_tokens` tokens, and what is beside them.

    Returns:
        Milliseconds as `percentiles`. `of_floor` and `copies` are the time of a restore over that of a copy in the same
        round: the fastest into memory in use, and one into fresh memory.
    """
    n_bytes = len(saved.contents.memory) * n_tokens // len(saved.ids)
    copies = Copies(saved.contents.memory[:n_bytes])
    exact = saved.is_whole(saved.caches(saved.restore(n_tokens)), n_tokens)
    others: dict[str, Callable[[], Any]] = {}
    if limits.others_every:
        ways = BatchWays(saved, n_tokens)
        exact = exact and ways.are_exact()
        others = {"fresh_copy": copies.fresh, "extract": ways.extract, "round_trip": ways.round_trip}
    samples: dict[str, list[float]] = {}
    for done in range(-limits.warm_up, limits.rounds):
        into = samples if done >= 0 else {}
        restored_ms = _one_restore(saved, n_tokens, into)
        in_use = [timed(copy) for copy in (copies.in_use, copies.by_all)]
        _add(into, {"used_copy_ms": in_use[0], "threads_copy_ms": in_use[1], "of_floor": restored_ms / min(in_use)})
        if others and done % limits.others_every == 0:
            took = {name: timed(action) for name, action in others.items()}
            _add(into, {**{f"{name}_ms": ms for name, ms in took.items()}, "copies": restored_ms / took["fresh_copy"]})
    copies.close()
    cell: Json = {"blocks": n_tokens // 256, "layers": len(saved.model.spec.layers), "tokens": n_tokens}
    cell |= {"bytes": n_bytes, "exact": exact, "warm_up": limits.warm_up}
    for name, values in samples.items():
        cell[name] = percentiles(values) if name.endswith("_ms") else spread(values)
    return cell


def _one_restore(saved: SavedAgent, n_tokens: int, samples: dict[str, list[float]]) -> float:
    """Milliseconds from the prompt to evaluated caches."""
    faults, begin = page_faults(), time.perf_counter()
    prefix = saved.restore(n_tokens)
    restored = time.perf_counter()
    made = saved.caches(prefix)
    end = time.perf_counter()
    del made
    parts = {"reconstruct_ms": end - begin, "store_ms": restored - begin, "caches_ms": end - restored}
    _add(samples, {name: 1000 * seconds for name, seconds in parts.items()})
    _add(samples, {"page_faults": page_faults() - faults})
    return 1000 * (end - begin)


def _add(samples: dict[str, list[float]], one: dict[str, float]) -> None:
    for name, value in one.items():
        samples.setdefault(name, []).append(value)


class Copies:
    """Copies of the same bytes. None verifies or assembles anything, and a restore has to move every byte as well."""

    def __init__(self, source: Array) -> None:
        self._source = source
        self._used = np.ones_like(source)
        threads = n_readers(False)
        ends = np.linspace(0, len(source), threads + 1).astype(int).tolist()
        self._parts = [slice(*part) for part in pairwise(ends)]
        self._threads = ThreadPoolExecutor(threads)

    def in_use(self) -> None:
        """Into memory that the process already holds, by one thread."""
        np.copyto(self._used, self._source)

    def by_all(self) -> None:
        """The same by as many threads as a restore has."""
        list(self._threads.map(lambda part: np.copyto(self._used[part], self._source[part]), self._parts))

    def fresh(self) -> Array:
        """Into pages newly allocated by the system: huge pages where available, as for NumPy's own large arrays."""
        pages = mmap.mmap(-1, self._source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        target = np.frombuffer(pages, self._source.dtype)
        np.copyto(target, self._source)
        return target

    def close(self) -> None:
        self._threads.shutdown()


class BatchWays:
    """Into mlx-lm's batch and out of it, as models go that do not run in rows."""

    def __init__(self, saved: SavedAgent, n_tokens: int) -> None:
        self._saved, self._n_tokens = saved, n_tokens
        self._batch = _joined([saved.caches(saved.restore(n_tokens - 1)) for _ in range(2)])

    def extract(self) -> SequenceCache:
        """One sequence of a batch of two."""
        return self._sliced(self._batch, self._n_tokens)

    def round_trip(self) -> SequenceCache:
        """Restore, join a batch of one, take one more token, extract."""
        return self._sliced(_joined([self._saved.caches(self._saved.restore(self._n_tokens))]), self._n_tokens + 1)

    def are_exact(self) -> bool:
        layers, n_tokens = self._saved.contents.layers, self._n_tokens
        return same(self.round_trip().layers, layers, n_tokens) and same(self.extract().layers, layers, n_tokens - 1)

    def _sliced(self, batch: Sequence[Any], n_tokens: int) -> SequenceCache:
        from stoker_worker.engine.transfer import slice_caches

        return slice_caches([cache.extract(0) for cache in batch], n_tokens, self._saved.model.spec)


def _joined(rows: Sequence[Any]) -> list[Any]:
    """Sequences in one batch that has taken one more token: `BatchGenerator`'s own caches after a step."""
    import mlx.core as mx
    from mlx_lm.models.cache import BatchKVCache

    batch = [BatchKVCache.merge(list(layer)) for layer in zip(*rows, strict=True)]
    for cache in batch:
        n_rows, heads, _, dim = cache.keys.shape
        token = mx.zeros((n_rows, heads, 1, dim), cache.keys.dtype)
        cache.update_and_fetch(token, token)
    mx.eval([(cache.keys, cache.values) for cache in batch])
    return batch


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

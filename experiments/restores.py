"""The restores of EXP-006: beside copies of the same bytes, of five agents at once, and with a real model, as round
trips through the engine and as whole answers with and without a restored cache. No token ends an answer early."""

import mmap
import resource
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from bench import Bench, Prepared
from common import Json, in_turn, note, percentiles, spread, timed
from prompts import text_of
from synthetic_cache import SavedAgent, same, smollm2_layers
from timed_turns import COLD, DISK, Turns

from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.lookup import n_readers
from stoker_worker.memory.ram_cache import RamCacheEntry
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import Array, CompletedGeneration, LayerKV, SequenceCache
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

# --- a restore of some blocks and layers, beside copies of the same bytes, in turn ---
# Owns the copies that a restore is compared with, and the way through mlx-lm's batch.


def measured(saved: SavedAgent, n_tokens: int, rounds: int, *, warm_up: int, others_every: int = 1) -> Json:
    """Restores of the first `n_tokens` tokens, and what is beside them.

    Args:
        others_every: in every such round the other ways are taken too: a fresh copy, extract, round trip; 0: never.

    Returns:
        Milliseconds as `percentiles`. `of_floor` and `copies` are the time of a restore over that of a copy in the same
        round: the fastest into memory in use, and one into fresh memory.
    """
    n_bytes = len(saved.contents.memory) * n_tokens // len(saved.ids)
    copies = Copies(saved.contents.memory[:n_bytes])
    exact = saved.is_whole(saved.caches(saved.restore(n_tokens)), n_tokens)
    others: dict[str, Callable[[], Any]] = {}
    if others_every:
        ways = BatchWays(saved, n_tokens)
        exact = exact and ways.are_exact()
        others = {"fresh_copy": copies.fresh, "extract": ways.extract, "round_trip": ways.round_trip}
    samples: dict[str, list[float]] = {}
    for done in range(-warm_up, rounds):
        into = samples if done >= 0 else {}
        restored_ms = _one_restore(saved, n_tokens, into)
        in_use = [timed(copy) for copy in (copies.in_use, copies.by_all)]
        _add(into, {"used_copy_ms": in_use[0], "threads_copy_ms": in_use[1], "of_floor": restored_ms / min(in_use)})
        if others and done % others_every == 0:
            took = {name: timed(action) for name, action in others.items()}
            _add(into, {**{f"{name}_ms": ms for name, ms in took.items()}, "copies": restored_ms / took["fresh_copy"]})
    copies.close()
    cell: Json = {"blocks": n_tokens // BLOCK_TOKENS, "layers": len(saved.model.spec.layers), "bytes": n_bytes,
                  "exact": exact}  # fmt: skip
    for name, values in samples.items():
        cell[name] = percentiles(values) if name.endswith("_ms") else spread(values)
    return cell


def from_memory(folder: Path, *, blocks: int, layers: int, rounds: int) -> Json:
    """An agent's next turn while its cache is in RAM: from its prompt to caches that the model can go on in. The turn
    before left its arrays there, with room for the next prompt.

    Returns:
        Milliseconds as `percentiles`: handed over, and copied because someone still reads the arrays.
    """
    from stoker_worker.engine.transfer import MlxRoom, slice_caches

    n_tokens, samples = blocks * BLOCK_TOKENS, dict[str, list[float]]()
    spec = smollm2_layers(layers)
    with closing(AgentCacheStore(folder, memory_max_bytes=1 << 34)) as store:
        saved = SavedAgent.save(store, spec, n_tokens)
        chain_of_all = BlockChain(saved.model.fingerprint, None, saved.ids)
        first = SequenceCache(n_tokens, saved.contents.layers).copied_into(MlxRoom(spec, n_tokens, BLOCK_TOKENS))
        made = saved.caches(first)
        del first
        for number, way in in_turn(["handed_over_ms", "copied_ms"], rounds, warm_up=3):
            cache = slice_caches(made, n_tokens, spec)
            view = cache.layers[0] if way == "copied_ms" else None
            store.ram_cache.put(saved.agent.agent_id, RamCacheEntry(saved.agent.number, chain_of_all, cache))
            del made, cache
            began = time.perf_counter()
            made = saved.caches(saved.restore(n_tokens))
            took = 1000 * (time.perf_counter() - began)
            del view
            if number >= 0:
                samples.setdefault(way, []).append(took)
        exact = saved.is_whole(made, n_tokens)
    shutil.rmtree(folder)
    return {"blocks": blocks, "layers": layers, "bytes": n_tokens * spec.bytes_per_token, "exact": exact,
            **{way: percentiles(values) for way, values in samples.items()}}  # fmt: skip


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


# --- the restores of five agents, beside each other and in turn, and what they do for five turns at once ---

AGENTS, ANSWER_TOKENS = 5, 16


def five_turns(bench: Bench, folder: Path, *, n_tokens: int, quick: bool) -> Json:
    """Five agents' turns through the engine, from their prompts to the last first token and to the last answer's end.

    As in a worker, one thread restores a turn after the other while the engine runs those that it has.
    """
    tokens = 3 if quick else ANSWER_TOKENS
    texts = {f"agent {n}": text_of(bench.encode, "English", n_tokens - n) for n in range(AGENTS)}
    taken: dict[str, list[Json]] = {"without": [], "restored": []}
    with closing(AgentCacheStore(folder)) as store, closing(bench.engine()) as engine:
        for number in range(1 if quick else 2):
            note(f"{AGENTS} turns without caches, {number + 1}")
            fields = {"max_tokens": tokens, "cache": "off" if number else "readwrite"}
            taken["without"].append(_turns(bench, store, engine, texts, fields))
            for _ in range(1 if quick else 3):
                fields = {"max_tokens": tokens, "cache": "read"}
                taken["restored"].append(_turns(bench, store, engine, texts, fields))
    found: Json = {"agents": AGENTS, "tokens": n_tokens, "answer_tokens": tokens}
    for name, ones in taken.items():
        found[name] = {key: spread([one[key] for one in ones]) for key in ("restored_s", "first_s", "total_s")}
    for key in ("first_s", "total_s"):
        without, restored = (found[name][key]["median"] for name in taken)
        found[f"{key.removesuffix('_s')}_speedup"] = round(without / restored, 1)
    found["same_tokens"] = all(one["ids"] == taken["without"][0]["ids"] for ones in taken.values() for one in ones)
    return found


def _turns(
    bench: Bench, store: AgentCacheStore, engine: Any, texts: Mapping[str, str], fields: Mapping[str, Any]
) -> Json:
    """Seconds until the last turn was restored, had its first token, and had ended."""
    running: dict[int, Prepared] = {}
    done: dict[int, CompletedGeneration] = {}
    first: dict[int, float] = {}

    def load(name: str) -> tuple[Prepared, float]:
        about = {"agent_id": name, "prompt": texts[name], **fields}
        turn = bench.prepare(store, about, beside_others=len(running) > len(done))
        return turn, time.perf_counter()

    begin = time.perf_counter()
    with ThreadPoolExecutor(1) as loader:
        waiting = deque(loader.submit(load, name) for name in texts)
        while waiting or len(done) < len(running):
            while waiting and (waiting[0].done() or len(done) == len(running)):
                turn, restored = waiting.popleft().result()
                running[engine.submit(turn.work)] = turn
            done.update({completion.uid: completion for completion in engine.step()})
            begun = {uid for uid, progress in engine.progress().items() if progress.tokens} | done.keys()
            first.update(dict.fromkeys(begun - first.keys(), time.perf_counter()))
    end = time.perf_counter()
    if fields["cache"] == "readwrite":
        for uid, turn in running.items():
            bench.save(store, turn, done[uid])
    elif fields["cache"] == "read" and any(turn.cached != len(turn.prompt.ids) - 1 for turn in running.values()):
        raise RuntimeError("not everything was restored")
    ids = {turn.request.agent_id: done[uid].generated_ids for uid, turn in running.items()}
    return {"restored_s": restored - begin, "first_s": max(first.values()) - begin, "total_s": end - begin, "ids": ids}


def _timed(took: list[float], call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    begin = time.perf_counter()
    made = call(*args, **options)
    took.append(time.perf_counter() - begin)
    return made


def _furthest(got: Sequence[LayerKV], wanted: Sequence[LayerKV], start: int) -> float:
    """The largest difference of two caches from token `start` on."""
    pairs = (sides for layers in zip(got, wanted, strict=True) for sides in zip(*layers, strict=True))
    return max(float(np.abs(left[:, start:] - right[:, start:]).max()) for left, right in pairs)


# --- one agent's turns through the engine ---


def round_trips(turns: Turns, *, blocks: int, rounds: int, tokens: int = 10) -> Json:
    """Restore, generate, extract and save one agent's turn again and again, as the seed's third benchmark does.

    Each turn is the first one, made anew: the same prompt, of one token more than `blocks`.
    """
    from stoker_worker.engine import batch_engine

    note(f"{rounds} round trips of {blocks} blocks with the model")
    n_tokens, bench, store = blocks * BLOCK_TOKENS, turns.bench, turns.stores[DISK]
    text = text_of(bench.encode, "English", n_tokens + 1)
    fields = {"agent_id": "round trips", "prompt": text, "max_tokens": tokens, "cache": "readwrite"}
    samples: dict[str, list[float]] = {name: [] for name in ("restore", "generate", "extract", "save", "whole")}
    first = turns.answer(store, fields)
    bench.save(store, first.prepared, first.completion)
    cold = [tuple(np.array(side) for side in pair) for pair in first.completion.cache.layers]
    alone = bench.uncached(first.prepared.prompt.ids, tokens)
    same_tokens, exact, furthest = list(first.completion.generated_ids[: len(alone)]) == alone, True, 0.0
    for _ in range(rounds):
        took: list[float] = []
        with patch.object(batch_engine, "cache_to_save", partial(_timed, took, batch_engine.cache_to_save)):
            one = turns.answer(store, fields)
        if one.prepared.cached != n_tokens:
            raise RuntimeError(f"{one.prepared.cached} of {n_tokens} tokens restored")
        extract_s, whole_s = sum(took), one.token_s[-1]
        save_s = bench.save(store, one.prepared, one.completion)
        parts = (one.restore_s, whole_s - one.restore_s - extract_s, extract_s, save_s, whole_s)
        for name, seconds in zip(samples, parts, strict=True):
            samples[name].append(1000 * seconds)
        warm = one.completion.cache.layers
        same_tokens = same_tokens and one.completion.generated_ids == first.completion.generated_ids
        exact = exact and same(warm, cold, n_tokens)
        furthest = max(furthest, _furthest(warm, cold, n_tokens))
    return {"blocks": blocks, "layers": len(cold), "answer_tokens": tokens,
            "ms": {name: percentiles(values) for name, values in samples.items()},
            "same_tokens": same_tokens, "exact": exact, "largest_difference": furthest}  # fmt: skip


def whole_answers(turns: Turns, lengths: Sequence[int], *, quick: bool) -> list[Json]:
    """A prompt's first token and its whole answer, cold and from its restored cache; the longest run cold once."""
    rows = []
    bench, tokens = turns.bench, 3 if quick else ANSWER_TOKENS
    for n in lengths:
        note(f"{n} tokens with and without cache")
        fields = {"agent_id": f"{n}", "prompt": text_of(bench.encode, "English", n), "max_tokens": tokens}
        if n == lengths[0]:
            turns.run(COLD, fields)  # a warm-up
        cold, warm = [turns.remember(fields)], []
        for repetition in range(1 if quick else 3):
            warm.append(turns.run(DISK, fields))
            if repetition < 2 and n <= 1024:
                cold.append(turns.run(COLD, fields))
        row: Json = {"tokens": n, "answer_tokens": tokens}
        row["mb"] = round((n - 1) * bench.model.spec.bytes_per_token / 1e6, 1)
        for name, ones in (("cold", cold), ("warm", warm)):
            row[f"{name}_s"] = spread([one.token_s[0] for one in ones])
            row[f"{name}_total_s"] = spread([one.token_s[-1] for one in ones])
        row["store_ms"] = spread([1000 * one.restore_s for one in warm])
        row["speedup"] = round(row["cold_s"]["median"] / row["warm_s"]["median"], 1)
        row["total_speedup"] = round(row["cold_total_s"]["median"] / row["warm_total_s"]["median"], 1)
        row["same_tokens"] = len({one.completion.generated_ids for one in (*cold, *warm)}) == 1
        rows.append(row)
    return rows

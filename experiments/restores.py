"""The restores of EXP-006: beside copies of the same bytes, from RAM, of five agents at once, and in round trips
through the engine with a real model. No token ends an answer early."""

import mmap
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from bench import Bench, Prepared
from common import Json, in_turn, note, percentiles, spread, timed
from prompts import text_of
from synthetic_cache import SavedAgent, same, smollm2_layers
from timed_turns import DISK, Turns

from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.lookup import n_readers
from stoker_worker.memory.ram_cache import RamCacheEntry
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import Array, CompletedGeneration, SequenceCache
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

# --- a restore of some blocks and layers, beside copies of the same bytes, in turn ---


def measured(saved: SavedAgent, n_tokens: int, rounds: int, *, warm_up: int, fresh_every: int = 1) -> Json:
    """Restores of the first `n_tokens` tokens, and copies of their bytes.

    Args:
        fresh_every: in every such round the bytes are copied into fresh memory too, which takes longest; 0: never.

    Returns:
        Milliseconds as `percentiles`. `of_floor` and `copies` are the time of a restore over that of a copy in the same
        round: the fastest into memory in use, and one into fresh memory.
    """
    n_bytes = len(saved.contents.memory) * n_tokens // len(saved.ids)
    copies, exact = Copies(saved.contents.memory[:n_bytes]), saved.is_whole(saved.restored(n_tokens), n_tokens)
    samples: dict[str, list[float]] = defaultdict(list)
    for done in range(-warm_up, rounds):
        begin = time.perf_counter()
        prefix = saved.restore(n_tokens)
        store_ms = 1000 * (time.perf_counter() - begin)
        made = saved.caches(prefix)
        restored_ms = 1000 * (time.perf_counter() - begin)
        del made, prefix
        one = {"reconstruct_ms": restored_ms, "store_ms": store_ms, "used_copy_ms": timed(copies.in_use),
               "threads_copy_ms": timed(copies.by_all)}  # fmt: skip
        one["of_floor"] = restored_ms / min(one["used_copy_ms"], one["threads_copy_ms"])
        if fresh_every and done % fresh_every == 0:
            one["fresh_copy_ms"] = timed(copies.fresh)
            one["copies"] = restored_ms / one["fresh_copy_ms"]
        for name, value in one.items() if done >= 0 else ():
            samples[name].append(value)
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
            made = saved.restored(n_tokens)
            took = 1000 * (time.perf_counter() - began)
            del view
            if number >= 0:
                samples.setdefault(way, []).append(took)
        exact = saved.is_whole(made, n_tokens)
    shutil.rmtree(folder)
    return {"blocks": blocks, "layers": layers, "bytes": n_tokens * spec.bytes_per_token, "exact": exact,
            **{way: percentiles(values) for way, values in samples.items()}}  # fmt: skip


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


# --- what restores do for five turns at once ---

AGENTS = 5


def five_turns(bench: Bench, folder: Path, *, n_tokens: int, rounds: int, max_tokens: int = 16) -> Json:
    """Five agents' turns through the engine, from their prompts to the last first token and to the last answer's end.

    As in a worker, one thread restores a turn after the other while the engine runs those that it has.
    """
    texts = {f"agent {n}": text_of(bench.encode, "English", n_tokens - n) for n in range(AGENTS)}
    taken: dict[str, list[Json]] = {"without": [], "restored": []}
    with closing(AgentCacheStore(folder)) as store, closing(bench.engine()) as engine:
        for number in range(rounds):
            note(f"{AGENTS} turns without caches and with, {number + 1} of {rounds}")
            for name, cache in (("without", "off" if number else "readwrite"), ("restored", "read")):
                fields = {"max_tokens": max_tokens, "cache": cache}
                taken[name].append(_turns(bench, store, engine, texts, fields))
    found: Json = {"agents": AGENTS, "tokens": n_tokens, "answer_tokens": max_tokens}
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


# --- one agent's turns through the engine ---


def round_trips(turns: Turns, *, blocks: int, rounds: int, tokens: int = 10) -> Json:
    """Restore, generate and save one agent's turn again and again, as the seed's third benchmark does.

    Each turn is the first one, made anew: the same prompt, of one token more than `blocks`.
    """
    note(f"{rounds} round trips of {blocks} blocks with the model")
    n_tokens, bench, store = blocks * BLOCK_TOKENS, turns.bench, turns.stores[DISK]
    text = text_of(bench.encode, "English", n_tokens + 1)
    fields = {"agent_id": "round trips", "prompt": text, "max_tokens": tokens, "cache": "readwrite"}
    samples: dict[str, list[float]] = {name: [] for name in ("restore", "generate", "save", "whole")}
    first = turns.answer(store, fields)
    bench.save(store, first.prepared, first.completion)
    cold = [tuple(np.array(side) for side in pair) for pair in first.completion.cache.layers]
    alone = bench.uncached(first.prepared.prompt.ids, tokens)
    same_tokens, exact = list(first.completion.generated_ids[: len(alone)]) == alone, True
    for _ in range(rounds):
        one = turns.answer(store, fields)
        if one.prepared.cached != n_tokens:
            raise RuntimeError(f"{one.prepared.cached} of {n_tokens} tokens restored")
        whole_s, save_s = one.token_s[-1], bench.save(store, one.prepared, one.completion)
        for name, seconds in zip(samples, (one.restore_s, whole_s - one.restore_s, save_s, whole_s), strict=True):
            samples[name].append(1000 * seconds)
        same_tokens = same_tokens and one.completion.generated_ids == first.completion.generated_ids
        exact = exact and same(one.completion.cache.layers, cold, n_tokens)
    return {"blocks": blocks, "layers": len(cold), "answer_tokens": tokens,
            "ms": {name: percentiles(values) for name, values in samples.items()},
            "same_tokens": same_tokens, "exact": exact}  # fmt: skip

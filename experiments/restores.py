"""The restores of EXP-006: beside copies of the same bytes, taken apart, in other layouts, of five agents at once, and
with a real model, as round trips through the engine and as whole answers with and without a restored cache.

A turn follows a job's way through the worker (`bench.py`); no token ends it early.
"""

import mmap
import resource
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from bench import Bench, Prepared
from common import Json, in_turn, note, percentiles, ratios, spread, timed
from prompts import text_of
from stopwatch import Stopwatch
from synthetic_cache import Contents, SavedAgent, as_numpy, same, saved_agent, smollm2_layers
from xxhash import xxh3_128

from stoker_worker.memory import blocks, lookup, store
from stoker_worker.memory.blocks import BlockChain, CachePiece, read_metadata
from stoker_worker.memory.lookup import n_readers
from stoker_worker.memory.ram_cache import RamCacheEntry
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import Array, CompletedGeneration, LayerKV, SequenceCache
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, LayerKind, LayerSpec, ModelCacheSpec

# --- a restore of some blocks and layers, beside copies of the same bytes, in turn ---
# Owns the copies that a restore is compared with, and the way through mlx-lm's batch.


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


# --- where does the time of one restore go? The product's own functions, each with a stopwatch ---
# The stages are timed in a restore by one thread, where their times add up. A restore by all threads, and one by one
# thread without stopwatches, take turns with it.

ROOM, READ, CHECKSUM = "make room in MLX", "read from the page cache into place", "checksum"


class _TimedDigest:
    def __init__(self, watch: Stopwatch, make: Callable[[bytes], Any], header: bytes) -> None:
        digest = make(header)
        self.update, self.hexdigest = watch.timing(CHECKSUM, digest.update), digest.hexdigest


def taken_apart(folder: Path, *, blocks: int, rounds: int) -> Json:
    """Medians of `rounds` restores of SmolLM2's 30 layers. Shares are of the timed restore."""
    n_tokens, samples = blocks * BLOCK_TOKENS, []
    with saved_agent(folder / "profile", smollm2_layers(30), n_tokens) as saved:
        note(f"taking {rounds} restores apart")
        for _ in range(rounds + 1):  # the first is a warm-up
            samples.append(_by_all_threads(saved, n_tokens) | _by_one_thread(saved, n_tokens))
    kept = samples[1:]
    parts = {name: spread([one[name] for one in kept]) for name in kept[0]}
    stages = [name for name in parts if not name.startswith("total")]
    whole, mb = sum(parts[name]["median"] for name in stages), n_tokens * saved.model.spec.bytes_per_token / 1e6
    rows = [{"stage": name, "ms": parts[name], "share": round(parts[name]["median"] / whole, 3)} for name in stages]
    return {
        "blocks": blocks,
        "layers": 30,
        "mb": round(mb, 1),
        "stages": sorted(rows, key=lambda row: -row["share"]),
        "totals_ms": {name.removeprefix("total, "): one for name, one in parts.items() if name not in stages},
        "gb_s": {name: round(mb / parts[name]["median"], 2) for name in (READ, CHECKSUM, ROOM)},
    }


def _by_all_threads(saved: SavedAgent, n_tokens: int) -> dict[str, float]:
    """Milliseconds, and those of the processor: its cores' together."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    made = saved.caches(saved.restore(n_tokens))
    took, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    del made
    in_system, in_program = after.ru_stime - before.ru_stime, after.ru_utime - before.ru_utime
    names = ("total, all threads", "total, processor in the system", "total, processor in the program")
    return {name: 1000 * seconds for name, seconds in zip(names, (took, in_system, in_program), strict=True)}


def _by_one_thread(saved: SavedAgent, n_tokens: int) -> dict[str, float]:
    watch = Stopwatch()
    with patch.object(store, "n_readers", lambda _: 1):
        begin = time.perf_counter()
        made = saved.caches(saved.restore(n_tokens))
        plain = time.perf_counter() - begin
        del made
        with _stopwatches(watch):
            model = replace(saved.model, room_type=watch.timing(ROOM, saved.model.room_type))
            timed = replace(saved, model=model)
            prefix = watch.timing("find the agent and its blocks", timed.restore)(n_tokens)
            watch.timing("hand over to the engine", timed.caches)(prefix)
    found = {"total, one thread": plain, "total, one thread with stopwatches": sum(watch.seconds.values())}
    return {name: 1000 * seconds for name, seconds in (found | watch.seconds).items()}


def _stopwatches(watch: Stopwatch) -> ExitStack:
    """The product's functions timed until the stack is closed."""
    with ExitStack() as patched:
        header = blocks.CachePiece.__dict__["header"]
        digest = partial(_TimedDigest, watch, blocks.xxh3_128)
        slicing = "choose the places of a file's parts"
        for owner, name, replacement in (
            (header, "func", watch.timing("write the header to expect", header.func)),
            (lookup._Target, "load", watch.timing(slicing, lookup._Target.load)),
            (blocks, "fill", watch.timing(READ, blocks.fill)),
            (blocks, "xxh3_128", digest),
            (blocks, "open", watch.timing("open the file", open)),
        ):
            patched.enter_context(patch.object(owner, name, replacement, create=name == "open"))
        return patched.pop_all()


# --- other layouts of a cache, and other ways to gather its blocks, beside the product's, in turn ---
# A layout only changes the order of a token's heads and elements in the files and in memory. So each is a cache
# specification of its own over the same bytes, and the product's own code saves and restores it. A gather reads each
# block into memory of its own with MLX's reader, verifies it, and joins the blocks in MLX.

LAYERS, HEADS, DIM = 30, 3, 64
PRODUCT = "as the product does it"
Pairs = list[tuple[Any, Any]]
"""Keys and values of each layer; in MLX (1, heads, tokens and room for more, dim)."""


@dataclass(frozen=True)
class Layout:
    """
    Attributes:
        spec: the layers, heads and dims that the files then have.
        merged: makes the arrays to save from those of the product's layout.
        split: makes each layer's keys and values from the restored arrays.
    """

    spec: ModelCacheSpec
    merged: Callable[[tuple[LayerKV, ...]], Pairs]
    split: Callable[[Pairs], Pairs]


def _spec(n_layers: int, heads: int, dim: int = DIM) -> ModelCacheSpec:
    return ModelCacheSpec((LayerSpec(LayerKind.FULL, heads, dim, dim),) * n_layers, "float32")


def _paired(arrays: Iterable[Any]) -> Pairs:
    one_by_one = iter(arrays)
    return list(zip(one_by_one, one_by_one, strict=True))


def _tokens_first(array: Any) -> Any:
    """(heads, tokens, dim) as (1, tokens, heads * dim)."""
    return np.ascontiguousarray(array.transpose(1, 0, 2)).reshape(1, array.shape[1], -1)


def _heads_first(array: Any) -> Any:
    """The opposite in MLX, as a view."""
    return array.reshape(1, array.shape[2], HEADS, DIM).transpose(0, 2, 1, 3)


LAYOUTS = {
    "K and V of a layer in one array": Layout(  # of two layers, because the product's files hold pairs of arrays
        _spec(LAYERS // 2, 2 * HEADS),
        lambda layers: _paired(np.concatenate(pair) for pair in layers),
        lambda pairs: [(one[:, :HEADS], one[:, HEADS:]) for one in chain.from_iterable(pairs)],
    ),
    "all layers in one array for K and one for V": Layout(
        _spec(1, LAYERS * HEADS),
        lambda layers: _paired(np.concatenate(side) for side in zip(*layers, strict=True)),
        lambda pairs: _paired(side[:, at : at + HEADS] for at in range(0, LAYERS * HEADS, HEADS) for side in pairs[0]),
    ),
    "token by token (token-major)": Layout(
        _spec(LAYERS, 1, HEADS * DIM),
        lambda layers: _paired(map(_tokens_first, chain.from_iterable(layers))),
        lambda pairs: _paired(map(_heads_first, chain.from_iterable(pairs))),
    ),
}


class Gather:
    """Blocks in memory of their own, joined with room for one more block, as the product's arrays have."""

    def __init__(self, saved: SavedAgent, *, compiled: bool = False) -> None:
        import mlx.core as mx

        chain_of = BlockChain(saved.model.fingerprint, None, saved.ids)
        found = [(chain_of.parent(n), chain_of.block(n)) for n in range(chain_of.n_blocks)]
        self._pieces = [CachePiece("block", chain_of.model, saved.model.spec, *one) for one in found]
        self._paths = chain_of.paths(saved.store.parts.blocks.path_of)
        self._threads = ThreadPoolExecutor(n_readers(False))
        layer = saved.model.spec.layers[0]
        self._room = mx.zeros((layer.n_kv_heads, BLOCK_TOKENS, layer.key_dim))
        self._joined = mx.compile(self._concatenated) if compiled else self._concatenated

    def pairs(self) -> Pairs:
        return _paired(array[None] for array in self._joined(self._blocks()))

    def _concatenated(self, blocks: list[list[Any]]) -> list[Any]:
        import mlx.core as mx

        return [mx.concatenate([*parts, self._room], axis=1) for parts in zip(*blocks, strict=True)]

    def _blocks(self) -> list[list[Any]]:
        """Keys and values of all layers, by block; evaluated and verified."""
        import mlx.core as mx

        found = [mx.load(str(path), format="safetensors") for path in self._paths]
        blocks = [
            [tensors[tensor.name] for tensor in piece.layout.tensors]
            for piece, tensors in zip(self._pieces, found, strict=True)
        ]
        mx.eval(blocks)
        list(self._threads.map(self._verify, self._pieces, self._paths, blocks))
        return blocks

    def _verify(self, piece: CachePiece, path: Path, block: list[Any]) -> None:
        digest = xxh3_128(piece.header)
        for array in block:
            digest.update(np.asarray(array))
        with open(path, "rb", buffering=0) as file:
            if read_metadata(file)["checksum"] != digest.hexdigest():
                raise RuntimeError("corrupt or foreign")


def against_other_ways(folder: Path, *, blocks: int, rounds: int) -> Json:
    """Each way in turn: from files in the page cache to arrays that have taken one more token.

    A way whose arrays are parts of a larger one pays for it with that token: MLX updates no array in place that
    another one shares.
    """
    n_tokens = blocks * BLOCK_TOKENS
    exact = {}
    with ExitStack() as opened:
        saved = opened.enter_context(saved_agent(folder / "product", smollm2_layers(LAYERS), n_tokens))
        ways: dict[str, Callable[[], Pairs]] = {
            PRODUCT: partial(_restored, saved),
            "with a pause before each array": partial(_with_each_pause, saved),
            "`mx.concatenate` for each layer": Gather(saved).pairs,
            "the same under `mx.compile`": Gather(saved, compiled=True).pairs,
        }
        for name, layout in LAYOUTS.items():
            contents = Contents(saved.contents.memory, tuple(layout.merged(saved.contents.layers)), ())
            other = opened.enter_context(saved_agent(folder / name, layout.spec, n_tokens, contents))
            ways[name] = partial(_split, layout, partial(_restored, other))
            if len(layout.spec.layers) == 1:
                ways["one `mx.concatenate` of all layers"] = partial(_split, layout, Gather(other).pairs)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        note(f"{len(ways)} ways of restoring {blocks} blocks")
        for number, name in in_turn(list(ways), rounds, warm_up=1):
            took, pairs = _until_a_token_more(ways[name], n_tokens)
            if number >= 0:
                samples[name].append(took)
            else:
                got = [tuple(as_numpy(side)[0] for side in pair) for pair in pairs]
                exact[name] = same(got, saved.contents.layers, n_tokens)
            del pairs
    base = [sum(took) for took in samples[PRODUCT]]
    rows = [
        {"name": name, "exact": exact[name], "restore_ms": spread([took[0] for took in found]),
         "token_ms": spread([took[1] for took in found]),
         "gain": ratios(base, [sum(took) for took in found])}
        for name, found in samples.items()
    ]  # fmt: skip
    mb = round(n_tokens * saved.model.spec.bytes_per_token / 1e6, 1)
    return {"blocks": blocks, "layers": LAYERS, "mb": mb, "rows": rows}


def _split(layout: Layout, pairs: Callable[[], Pairs]) -> Pairs:
    return layout.split(pairs())


def _restored(saved: SavedAgent) -> Pairs:
    return [(cache.keys, cache.values) for cache in saved.caches(saved.restore(len(saved.ids)))]


def _with_each_pause(saved: SavedAgent) -> Pairs:
    """As the product did until it was compared here."""
    from stoker_worker.engine import transfer

    with patch.object(transfer, "_PAUSE_BYTES", 0):
        return _restored(saved)


def _until_a_token_more(way: Callable[[], Pairs], n_tokens: int) -> tuple[tuple[float, float], Pairs]:
    """Milliseconds of the restore, evaluated, and of the next token's place in it; and the arrays."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    begin = time.perf_counter()
    pairs = way()
    mx.eval(pairs)
    restored = time.perf_counter()
    caches = []
    token = mx.zeros((1, HEADS, 1, DIM))
    for _ in range(len(pairs)):
        cache = KVCache()
        cache.keys, cache.values = pairs.pop(0)
        cache.offset = n_tokens
        cache.update_and_fetch(token, token)
        caches.append(cache)
    mx.eval([(cache.keys, cache.values) for cache in caches])
    end = time.perf_counter()
    took = (1000 * (restored - begin), 1000 * (end - restored))
    return took, [(cache.keys, cache.values) for cache in caches]


# --- the restores of five agents, beside each other and in turn, and what they do for five turns at once ---

AGENTS = 5


def five_restores(folder: Path, *, blocks: int, rounds: int) -> Json:
    """Five agents of SmolLM2's 30 layers: one alone, all in turn as a worker's loader does, all at once by threads."""
    spec, n_tokens = smollm2_layers(30), blocks * BLOCK_TOKENS
    samples: dict[str, list[float]] = {name: [] for name in ("alone", "each at once", "last in turn", "last at once")}
    with closing(AgentCacheStore(folder / "restores")) as store, ThreadPoolExecutor(AGENTS) as threads:
        agents = [SavedAgent.save(store, spec, n_tokens, seed=seed) for seed in range(AGENTS)]
        note(f"{AGENTS} restores of {blocks} blocks beside each other")
        for done in range(-2, rounds):
            taken: dict[str, list[float]] = {}
            begin = time.perf_counter()
            taken["alone"] = [_restored_ms(agents[done % AGENTS], n_tokens, begin)]
            for name, restores in (("in turn", map), ("at once", threads.map)):
                begin = time.perf_counter()
                ends = list(restores(partial(_restored_ms, n_tokens=n_tokens, begin=begin), agents))
                taken[f"last {name}"] = [max(ends)]
                taken[f"each {name}"] = ends
            if done >= 0:
                for name in samples:
                    samples[name] += taken[name]
    return {"agents": AGENTS, "blocks": blocks, "layers": 30,
            "mb": round(n_tokens * spec.bytes_per_token / 1e6, 1),
            "ms": {name: percentiles(values) for name, values in samples.items()}}  # fmt: skip


def _restored_ms(agent: SavedAgent, n_tokens: int, begin: float) -> float:
    """Milliseconds from `begin` until its cache is in the engine's memory, which is dropped then."""
    prefix = agent.restore(n_tokens)
    took = 1000 * (time.perf_counter() - begin)
    del prefix
    return took


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


ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Answered:
    """A turn and its seconds since the prompt came: until it was restored, until the first token, until the last."""

    turn: Prepared
    completion: CompletedGeneration
    restored_s: float
    first_s: float
    total_s: float


@dataclass(frozen=True)
class Serving:
    """Turns of one agent, one at a time. They are not saved yet."""

    bench: Bench
    store: AgentCacheStore
    engine: Any
    text: str
    max_tokens: int

    def answer(self, cache: str) -> Answered:
        """
        Raises:
            RuntimeError: the cache was to be read alone, and not all tokens but the last were restored.
        """
        begin = time.perf_counter()
        fields = {"agent_id": "agent", "prompt": self.text, "max_tokens": self.max_tokens, "cache": cache}
        turn = self.bench.prepare(self.store, fields)
        restored = time.perf_counter()
        uid, first, done = self.engine.submit(turn.work), 0.0, []
        while not done:
            done = self.engine.step()
            if not first and (done or self.engine.progress()[uid].tokens):
                first = time.perf_counter()
        end = time.perf_counter()
        if cache == "read" and turn.cached != len(turn.prompt.ids) - 1:
            raise RuntimeError(f"{turn.cached} of {len(turn.prompt.ids)} tokens restored")
        return Answered(turn, done[0], restored - begin, first - begin, end - begin)


def round_trips(bench: Bench, folder: Path, *, blocks: int, rounds: int, tokens: int = 10) -> Json:
    """Restore, generate, extract and save one agent's turn again and again, as the seed's third benchmark does.

    Each turn is the first one, made anew: the same prompt, of one token more than `blocks`.
    """
    from stoker_worker.engine import batch_engine

    note(f"{rounds} round trips of {blocks} blocks with the model")
    n_tokens = blocks * BLOCK_TOKENS
    text = text_of(bench.encode, "English", n_tokens + 1)
    samples: dict[str, list[float]] = {name: [] for name in ("restore", "generate", "extract", "save", "whole")}
    same_tokens = exact = same_new = True
    furthest = 0.0
    with closing(AgentCacheStore(folder)) as store, closing(bench.engine()) as engine:
        serving = Serving(bench, store, engine, text, tokens)
        first = serving.answer("readwrite")
        bench.save(store, first.turn, first.completion)
        cold = [tuple(np.array(side) for side in pair) for pair in first.completion.cache.layers]
        alone = bench.uncached(first.turn.prompt.ids, tokens)
        same_tokens = list(first.completion.generated_ids[: len(alone)]) == alone
        for _ in range(rounds):
            watch = Stopwatch()
            timing = watch.timing("extract", batch_engine.cache_to_save)
            with patch.object(batch_engine, "cache_to_save", timing):
                one = serving.answer("readwrite")
            if one.turn.cached != n_tokens:
                raise RuntimeError(f"{one.turn.cached} of {n_tokens} tokens restored")
            extract_s = watch.seconds["extract"]
            save_s = bench.save(store, one.turn, one.completion)
            generate_s = one.total_s - one.restored_s - extract_s
            parts = (one.restored_s, generate_s, extract_s, save_s, one.total_s)
            for name, seconds in zip(samples, parts, strict=True):
                samples[name].append(1000 * seconds)
            warm = one.completion.cache.layers
            same_tokens = same_tokens and one.completion.generated_ids == first.completion.generated_ids
            exact = exact and same(warm, cold, n_tokens)
            same_new = same_new and same(warm, cold, one.completion.cache.n_tokens)
            furthest = max(furthest, _furthest(warm, cold, n_tokens))
    return {"blocks": blocks, "layers": len(cold), "answer_tokens": tokens,
            "ms": {name: percentiles(values) for name, values in samples.items()},
            "same_tokens": same_tokens, "exact": exact, "answers_bytes_equal": same_new,
            "largest_difference": furthest}  # fmt: skip


def _furthest(got: Sequence[LayerKV], wanted: Sequence[LayerKV], start: int) -> float:
    """The largest difference of two caches from token `start` on."""
    pairs = (sides for layers in zip(got, wanted, strict=True) for sides in zip(*layers, strict=True))
    return max(float(np.abs(left[:, start:] - right[:, start:]).max()) for left, right in pairs)


def whole_answers(bench: Bench, folder: Path, lengths: Sequence[int], *, quick: bool) -> list[Json]:
    """A prompt's first token and its whole answer, cold and from its restored cache; the longest run cold once."""
    rows = []
    tokens = 3 if quick else ANSWER_TOKENS
    with closing(bench.engine()) as engine:
        for n in lengths:
            note(f"{n} tokens with and without cache")
            text = text_of(bench.encode, "English", n)
            with closing(AgentCacheStore(folder / f"{n}")) as store:
                serving = Serving(bench, store, engine, text, tokens)
                if n == lengths[0]:
                    serving.answer("off")  # a warm-up
                cold = [serving.answer("readwrite")]
                bench.save(store, cold[0].turn, cold[0].completion)
                warm = []
                for repetition in range(1 if quick else 3):
                    warm.append(serving.answer("read"))
                    if repetition < 2 and n <= 1024:
                        cold.append(serving.answer("off"))
            row: Json = {"tokens": n, "answer_tokens": tokens}
            row["mb"] = round((n - 1) * bench.model.spec.bytes_per_token / 1e6, 1)
            for name, ones in (("cold", cold), ("warm", warm)):
                row[f"{name}_s"] = spread([one.first_s for one in ones])
                row[f"{name}_total_s"] = spread([one.total_s for one in ones])
            row["store_ms"] = spread([1000 * one.restored_s for one in warm])
            row["speedup"] = round(row["cold_s"]["median"] / row["warm_s"]["median"], 1)
            row["total_speedup"] = round(row["cold_total_s"]["median"] / row["warm_total_s"]["median"], 1)
            row["same_tokens"] = len({one.completion.generated_ids for one in (*cold, *warm)}) == 1
            rows.append(row)
    return rows

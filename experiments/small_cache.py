"""How long does it take to save and reload the cache of a short turn, durably and not? Prints JSON; needs no model.

The report that this project began with (EXP-004, January 2026) has less than 10 ms for the cache of a prompt of five
tokens and ten generated ones, with Gemma 3's 48 layers. A cache of that size (8 layers of full attention and 40 with a
window of 1,024 tokens, 8 KV heads, head dim 256, bfloat16) is saved and restored by the product's own store, in turn:

* as the product does it, with every sync, and without any;
* by mlx-lm's `save_prompt_cache` and `load_prompt_cache`, as in that report: nothing is synced;
* the same bytes as one file with one sync, which is the least that the medium allows; and four bytes likewise.

Run: ``python experiments/small_cache.py > experiments/results/small_cache_results.json``.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import date
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from common import Json, in_turn, machine, ratios, spread
from synthetic_cache import turn_after

from stoker_worker.memory.blocks import empty_layers, empty_states
from stoker_worker.memory.files import Chunk, Disk
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import LoadedModel, SequenceCache, Snapshot
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec

HEADS, HEAD_DIM, WINDOW_TOKENS = 8, 256, 1024
FULL = LayerSpec(LayerKind.FULL, HEADS, HEAD_DIM, HEAD_DIM)
WINDOW = LayerSpec(LayerKind.WINDOW, HEADS, HEAD_DIM, HEAD_DIM, WINDOW_TOKENS)
SPEC = ModelCacheSpec((*5 * (WINDOW,), FULL) * 8, "bfloat16")
MODEL = LoadedModel("synthetic", "ab" * 32, "tok", 1 << 20, SPEC, tokenizer=None)  # type: ignore[arg-type]
N_PROMPT, N_TOKENS = 5, 15
T = TypeVar("T")


class NoSyncs(Disk):
    """Leaves it to the system when the files reach the disk. The database syncs all the same."""

    def write(self, path: Path, chunks: Iterable[Chunk]) -> None:
        with open(path, "xb") as file:
            file.writelines(chunks)

    def sync_folder(self, path: Path) -> None:
        pass

    flush = sync_folder


def cache() -> SequenceCache:
    """A turn's cache as the engine hands it over: with snapshots before the prompt's last token and at the end."""
    dice = np.random.default_rng(1)
    layers = empty_layers(SPEC, N_TOKENS)
    snapshots = [Snapshot(n, empty_states(SPEC, n)) for n in (N_PROMPT - 1, N_TOKENS)]
    for array in (x for pair in (*layers, *(state for one in snapshots for state in one.states)) for x in pair):
        array[...] = dice.integers(0, 1 << 15, array.shape)
    return SequenceCache(N_TOKENS, layers, tuple(snapshots))


class Samples:
    """Milliseconds by name."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}

    def timed(self, name: str, action: Callable[[], T]) -> T:
        begin = perf_counter()
        result = action()
        self.taken.setdefault(f"{name}_ms", []).append(1000 * (perf_counter() - begin))
        return result


def through_store(name: str, store: AgentCacheStore, cache: SequenceCache, number: int, samples: Samples) -> None:
    agent_id, ids = f"agent {number}", (number + 1, *range(1, N_TOKENS))
    turn = turn_after(store.open_agent(agent_id), MODEL, ids, cache)
    samples.timed(f"{name}_save", partial(store.save, turn))
    agent = store.open_agent(agent_id)
    restore = partial(store.restore, (*ids, 1), agent=agent, model=MODEL, salt=None)
    restored = samples.timed(f"{name}_reload", restore)
    assert (restored.source, restored.miss_reason) == ("disk", None)
    assert restored.prefix is not None
    pairs = zip(arrays_of(cache), arrays_of(restored.prefix), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    if name == "unsynced":
        os.sync()  # the next file's sync might write these bytes, too


def by_mlx_lm(folder: Path, number: int, samples: Samples) -> None:
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, RotatingKVCache, load_prompt_cache, save_prompt_cache

    caches: list[Any] = [KVCache() if layer is FULL else RotatingKVCache(WINDOW_TOKENS) for layer in SPEC.layers]
    for one in caches:
        one.update_and_fetch(*(mx.ones((1, HEADS, N_TOKENS, HEAD_DIM), mx.bfloat16) for _ in range(2)))
    mx.eval([one.state for one in caches])
    file = str(folder / f"{number}.safetensors")
    samples.timed("mlx_lm_save", partial(save_prompt_cache, file, caches))
    samples.timed("mlx_lm_reload", lambda: mx.eval([one.state for one in load_prompt_cache(file)]))
    os.sync()


def plainly(folder: Path, cache: SequenceCache, number: int, samples: Samples) -> None:
    def write(name: str, content: bytes) -> None:
        with open(folder / name, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    content = b"".join(array.tobytes() for array in arrays_of(cache))
    samples.timed("plain_save", partial(write, f"plain {number}", content))
    samples.timed("plain_reload", (folder / f"plain {number}").read_bytes)
    samples.timed("one_sync", partial(write, f"small {number}", b"sync"))


def arrays_of(cache: SequenceCache) -> list[Any]:
    """Of the cache after the turn: 48 layers of 15 tokens."""
    return [x for pair in (*cache.layers, *cache.snapshots[-1].states) for x in pair]


def measured(folder: Path, rounds: int) -> Json:
    kept, samples = cache(), Samples()
    with (
        closing(AgentCacheStore(folder / "durable")) as durable,
        closing(AgentCacheStore(folder / "unsynced", files=NoSyncs())) as unsynced,
    ):
        ways: list[Callable[[int, Samples], None]] = [
            partial(through_store, "durable", durable, kept),
            partial(through_store, "unsynced", unsynced, kept),
            partial(by_mlx_lm, folder),
            partial(plainly, folder, kept),
        ]
        for number, way in in_turn(ways, rounds, warm_up=1):
            way(number, samples if number >= 0 else Samples())
    return {
        "tokens": N_TOKENS,
        "megabytes": round(sum(array.nbytes for array in arrays_of(kept)) / 1e6, 1),
        **{name: spread(values) for name, values in samples.taken.items()},
        "durable_save_of_plain": ratios(samples.taken["durable_save_ms"], samples.taken["plain_save_ms"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds, facts = parser.parse_args().rounds, machine()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), rounds)
    print(json.dumps({"date": date.today().isoformat(), "machine": facts, **found}, indent=1))


if __name__ == "__main__":
    main()

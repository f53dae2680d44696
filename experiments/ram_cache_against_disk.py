"""What does restoring an agent cost, on the loader thread and on the engine thread? Prints JSON; needs no model.

32 blocks of 30 layers (3 KV heads, head dim 64, float32: SmolLM2's) are restored from the product's own store into the
engine's memory, in turn from files in the page cache and from RAM, and the engine takes them over. Measured beside
them: making that memory, the longest of its arrays alone (the interpreter's lock is held while one is made), reading
the files into NumPy arrays, and copying those to MLX, which the engine thread would have to do with them.
Run: ``python experiments/ram_cache_against_disk.py``.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from common import spread

from stoker_worker.engine.cache_transfer import prefix_to_caches
from stoker_worker.engine.prefix_room import MlxRoom
from stoker_worker.memory.cache_layout import empty_layers
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import CacheSlice, Delivery, LayerKV, LoadedModel, RestoredPrefix, Transcript, Turn
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, LayerKind, LayerSpec, ModelCacheSpec

SPEC = ModelCacheSpec((LayerSpec(LayerKind.FULL, 3, 64, 64),) * 30, "float32")
PLAIN = LoadedModel("synthetic", "ab" * 32, "tok", 1 << 20, SPEC, tokenizer=None)  # type: ignore[arg-type]
MODEL = replace(PLAIN, make_room=partial(MlxRoom, SPEC))
NETWORK = SimpleNamespace(layers=[None] * len(SPEC.layers))
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=32)
    options = parser.parse_args()
    n_tokens = options.blocks * BLOCK_TOKENS
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ids = tuple(np.random.default_rng(1).integers(2, 40_000, n_tokens).tolist())
        layers = empty_layers(SPEC, n_tokens)
        for pair in layers:
            for array in pair:
                np.random.default_rng(2).random(out=array, dtype=np.float32)
        store = AgentCacheStore(Path(folder), memory_max_bytes=4 * n_tokens * SPEC.bytes_per_token)
        for number in range(-2, options.rounds):
            one_round(store, ids, layers, samples if number >= 0 else {})
        store.close()
    found = {name: spread(values) for name, values in samples.items()}
    found["megabytes"] = round(n_tokens * SPEC.bytes_per_token / 1e6)
    print(json.dumps(found, indent=1))


def one_round(
    store: AgentCacheStore, ids: tuple[int, ...], layers: tuple[LayerKV, ...], samples: dict[str, list[float]]
) -> None:
    """Save a turn, and run each way once, in turn."""

    def restored(source: str, model: LoadedModel) -> RestoredPrefix:
        store_source = store.restore((*ids, 1), agent=store.open_agent("agent"), model=model, salt=None)
        assert store_source.source == source
        assert store_source.prefix is not None
        assert store_source.prefix.n_tokens == len(ids)
        return store_source.prefix

    save(store, ids, layers)
    prefix = timed("ram_ms", partial(restored, "memory", MODEL), samples)
    timed("ram_take_over_ms", partial(prefix_to_caches, NETWORK, prefix, SPEC), samples)
    del prefix
    store.ram_cache.drop("agent")
    prefix = timed("disk_ms", partial(restored, "disk", MODEL), samples)
    timed("disk_take_over_ms", partial(prefix_to_caches, NETWORK, prefix, SPEC), samples)
    del prefix
    timed("make_room_ms", partial(MlxRoom, SPEC, len(ids) + 1, 0), samples)
    samples.setdefault("longest_array_ms", []).append(longest_array_ms(len(ids)))
    prefix = timed("disk_to_numpy_ms", partial(restored, "disk", PLAIN), samples)
    timed("numpy_to_mlx_ms", lambda: [mx.array(x[None]) for pair in prefix.layers for x in pair], samples)


def timed(name: str, action: Callable[[], T], samples: dict[str, list[float]]) -> T:
    begin = time.perf_counter()
    result = action()
    samples.setdefault(name, []).append(1000 * (time.perf_counter() - begin))
    return result


def longest_array_ms(n_tokens: int) -> float:
    kept: list[Any] = []
    longest = 0.0
    for layer in SPEC.full_layers * 2:
        begin = time.perf_counter()
        kept.append(mx.array(np.empty((1, layer.n_kv_heads, n_tokens, layer.key_dim), np.float32)))
        longest = max(longest, time.perf_counter() - begin)
    return 1000 * longest


def save(store: AgentCacheStore, ids: tuple[int, ...], layers: tuple[LayerKV, ...]) -> None:
    base = store.open_agent("agent")
    start = len(ids) if base.number else 0
    transcript = Transcript(ids, PLAIN.tokenizer_fingerprint, None, "synthetic", "length")
    cache = CacheSlice(start, len(ids), layers)
    store.save(Turn(base, Delivery(f"job {base.number}", ""), transcript, PLAIN, None, cache, {}))


if __name__ == "__main__":
    main()

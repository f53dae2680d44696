"""Is restoring an agent from the RAM cache ever slower than from disk? Prints JSON; needs no model and no MLX.

32 blocks of 30 layers (3 KV heads, head dim 64, float32: SmolLM2's) are restored from the product's own store, in turn
from files in the page cache, from one segment in RAM (the turn was loaded before: nothing is copied) and from two (the
turn before was just saved: they are joined in one copy). A plain copy into memory already in use is measured beside
them. Run: ``python experiments/ram_cache_against_disk.py``.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import spread

from stoker_worker.memory.cache_layout import empty_layers
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import CacheSlice, Delivery, LayerKV, LoadedModel, Restored, Transcript, Turn
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, LayerKind, LayerSpec, ModelCacheSpec

SPEC = ModelCacheSpec((LayerSpec(LayerKind.FULL, 3, 64, 64),) * 30, "float32")
MODEL = LoadedModel("synthetic", "ab" * 32, "tok", 1 << 20, SPEC, tokenizer=None)  # type: ignore[arg-type]


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
        save(store, ids, 0, layers)
        for number in range(-2, options.rounds):
            one_round(store, ids, layers, samples if number >= 0 else {})
    found = {name: spread(values) for name, values in samples.items()}
    disk = found["disk_ms"]["median"]
    found["ram_one_segment_of_disk"] = round(found["ram_one_segment_ms"]["median"] / disk, 4)
    found["ram_two_segments_of_disk"] = round(found["ram_two_segments_ms"]["median"] / disk, 4)
    found["megabytes"] = round(n_tokens * SPEC.bytes_per_token / 1e6)
    print(json.dumps(found, indent=1))


def one_round(
    store: AgentCacheStore, ids: tuple[int, ...], layers: tuple[LayerKV, ...], samples: dict[str, list[float]]
) -> None:
    """Run each way once, in turn."""

    def restore(source: str) -> Callable[[], Restored]:
        def call() -> Restored:
            agent = store.open_agent("agent")
            restored = store.restore((*ids, 1), agent=agent, model=MODEL, salt=None)
            assert restored.source == source
            assert restored.prefix is not None
            assert restored.prefix.n_tokens == len(ids)
            return restored

        return call

    store.ram_cache.drop("agent")
    timed("disk_ms", restore("disk"), samples)
    timed("ram_one_segment_ms", restore("memory"), samples)
    start = len(ids) - BLOCK_TOKENS
    tail = tuple(
        (np.ascontiguousarray(keys[:, start:]), np.ascontiguousarray(values[:, start:])) for keys, values in layers
    )
    save(store, ids, start, tail)
    timed("ram_two_segments_ms", restore("memory"), samples)
    timed("plain_copy_ms", lambda: [array.copy() for pair in layers for array in pair], samples)


def timed(name: str, action: Callable[[], object], samples: dict[str, list[float]]) -> None:
    begin = time.perf_counter()
    kept = action()
    samples.setdefault(name, []).append(1000 * (time.perf_counter() - begin))
    del kept


def save(store: AgentCacheStore, ids: tuple[int, ...], start: int, layers: tuple[LayerKV, ...]) -> None:
    transcript = Transcript(ids, MODEL.tokenizer_fingerprint, None, "synthetic", "length")
    cache = CacheSlice(start, len(ids), layers)
    base = store.open_agent("agent")
    store.save(Turn(base, Delivery(f"job {base.number}", ""), transcript, MODEL, None, cache, {}))


if __name__ == "__main__":
    main()

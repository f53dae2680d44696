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
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from common import machine, spread

from stoker_worker.memory.cache_layout import empty_layers, empty_states
from stoker_worker.memory.files import Chunk, Disk
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import CacheSlice, Delivery, LoadedModel, Snapshot, Transcript, Turn
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


def cache() -> CacheSlice:
    """A turn's cache as the engine hands it over: with snapshots before the prompt's last token and at the end."""
    dice = np.random.default_rng(1)
    layers = empty_layers(SPEC, N_TOKENS)
    snapshots = [Snapshot(n, empty_states(SPEC, n)) for n in (N_PROMPT - 1, N_TOKENS)]
    for array in (x for pair in (*layers, *(state for one in snapshots for state in one.states)) for x in pair):
        array[...] = dice.integers(0, 1 << 15, array.shape)
    return CacheSlice(0, N_TOKENS, layers, tuple(snapshots))


@dataclass
class Measured:
    """A store beside mlx-lm and a plain file, in one folder."""

    folder: Path
    cache: CacheSlice
    samples: dict[str, list[float]]

    def __post_init__(self) -> None:
        self._numbers = count()
        self._stores = {
            "durable": AgentCacheStore(self.folder / "durable"),
            "unsynced": AgentCacheStore(self.folder / "unsynced", files=NoSyncs()),
        }
        self._arrays = [x for pair in self.cache.layers for x in pair]
        self._arrays += [x for state in self.cache.snapshots[-1].states for x in state]

    @property
    def n_bytes(self) -> int:
        """Of the cache after the turn: 48 layers of 15 tokens."""
        return sum(array.nbytes for array in self._arrays)

    def one_round(self) -> None:
        """Each way once, in another order than in the round before."""
        number = next(self._numbers)
        ways = [
            partial(self._turn, "durable", number),
            partial(self._turn, "unsynced", number),
            partial(self._mlx_lm, number),
            partial(self._plain, number),
        ]
        for place in range(len(ways)):
            ways[(number + place) % len(ways)]()

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def _turn(self, name: str, number: int) -> None:
        store = self._stores[name]
        ids = (number, *range(1, N_TOKENS))
        agent = store.open_agent(f"agent {number}")
        transcript = Transcript(ids, MODEL.tokenizer_fingerprint, None, "synthetic", "length")
        turn = Turn(agent, Delivery(f"job {number}", ""), transcript, MODEL, None, self.cache, {})
        self._timed(f"{name}_save_ms", partial(store.save, turn))
        agent = store.open_agent(f"agent {number}")
        restored = self._timed(
            f"{name}_reload_ms", partial(store.restore, (*ids, 1), agent=agent, model=MODEL, salt=None)
        )
        assert (restored.source, restored.miss_reason) == ("disk", None)
        assert restored.prefix is not None
        found = [x for pair in (*restored.prefix.layers, *restored.prefix.states) for x in pair]
        assert all(np.array_equal(a, b) for a, b in zip(self._arrays, found, strict=True))
        if name == "unsynced":
            os.sync()  # the next file's sync might write these bytes, too

    def _mlx_lm(self, number: int) -> None:
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache, RotatingKVCache, load_prompt_cache, save_prompt_cache

        caches: list[Any] = [
            KVCache() if layer is FULL else RotatingKVCache(max_size=WINDOW_TOKENS) for layer in SPEC.layers
        ]
        for one in caches:
            one.update_and_fetch(*(mx.ones((1, HEADS, N_TOKENS, HEAD_DIM), mx.bfloat16) for _ in range(2)))
        mx.eval([one.state for one in caches])
        file = str(self.folder / f"{number}.safetensors")
        self._timed("mlx_lm_save_ms", partial(save_prompt_cache, file, caches))
        self._timed("mlx_lm_reload_ms", lambda: mx.eval([one.state for one in load_prompt_cache(file)]))
        os.sync()

    def _plain(self, number: int) -> None:
        content = b"".join(array.tobytes() for array in self._arrays)
        self._timed("plain_save_ms", partial(self._write, f"plain {number}", content))
        self._timed("plain_reload_ms", (self.folder / f"plain {number}").read_bytes)
        self._timed("one_sync_ms", partial(self._write, f"small {number}", b"sync"))

    def _write(self, name: str, content: bytes) -> None:
        with open(self.folder / name, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def _timed(self, name: str, action: Callable[[], T]) -> T:
        begin = perf_counter()
        result = action()
        self.samples.setdefault(name, []).append(1000 * (perf_counter() - begin))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    facts, samples = machine(), {}
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(Path(folder), cache(), samples)
        for number in range(-1, rounds):
            if number == 0:
                samples.clear()  # the round before was to warm up
            measured.one_round()
        measured.close()
    of_plain = [a / b for a, b in zip(samples["durable_save_ms"], samples["plain_save_ms"], strict=True)]
    found = {name: spread(values) for name, values in samples.items()}
    print(
        json.dumps(
            {
                "date": date.today().isoformat(),
                "machine": facts,
                "tokens": N_TOKENS,
                "megabytes": round(measured.n_bytes / 1e6, 1),
                **found,
                "durable_save_of_plain": spread(of_plain),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()

"""EXP-006, cache reconstruction: how long do saved blocks take to become caches again, and what is the minimum?

Synthetic caches of 1 to 32 blocks and 12 to 48 layers go through the product's own store and back. Beside every cell,
in the same rounds, the same bytes are copied once, into fresh and into used memory: no restore can be faster than that.
Then come the padded layout, 200 reconstructions in a row, the same files by the `safetensors` library, and SmolLM2 with
and without its cache. Run: ``python experiments/exp_006_*.py``.
"""

import gc
import hashlib
import mmap
import os
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from bench import Bench, main
from common import Json, machine, note, spread
from exp_006_report import render
from library_files import against_library
from prompts import text_of

from stoker_worker.memory.cache_layout import empty_layers
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import (
    AgentVersion,
    CacheSlice,
    Delivery,
    LayerKV,
    LoadedModel,
    RestoredPrefix,
    Transcript,
    Turn,
)
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, LayerKind, LayerSpec, ModelCacheSpec

REPORT = "EXP-006-cache-reconstruction.md"
BLOCKS, LAYERS = (1, 2, 4, 8, 16, 32), (12, 24, 30, 48)
TARGETS_MS = {(1, 12): 0.1, (4, 24): 0.5, (8, 30): 1.0, (16, 30): 2.0, (32, 48): 5.0}
"""The seed's table: p95 by blocks and layers."""
PROJECT_RATIO = 1.5
"""The project's own target: restoring 32 blocks of 30 layers takes at most so many copies of the bytes."""
LINEAR_R2 = 0.95
GIVEN_GB_S = (100, 273, 400, 800)
"""Memory bandwidths as makers give them; for arithmetic only."""


@dataclass(frozen=True)
class Limits:
    """How long one cell is measured: a number of rounds, within a time limit."""

    most: int
    least: int
    warm_up: int
    seconds: float

    def more(self, done: int, since: float) -> bool:
        return done < self.least or (done < self.most and time.perf_counter() - since < self.seconds)


@dataclass
class Saved:
    """One agent's synthetic cache in a store, and the calls that read it back.

    Attributes:
        network: in the model's place; it only makes empty caches.
    """

    network: Any
    store: AgentCacheStore
    model: LoadedModel
    agent: AgentVersion
    ids: tuple[int, ...]
    layers: tuple[LayerKV, ...]

    def restore(self, n_tokens: int) -> RestoredPrefix:
        """The first `n_tokens` tokens from the store, verified. The prompt has one more, left to feed."""
        prompt = (*self.ids[:n_tokens], 1)
        restored = self.store.restore(prompt, agent=self.agent, model=self.model, salt=None)
        if restored.prefix is None or restored.prefix.n_tokens != n_tokens or restored.miss_reason is not None:
            raise RuntimeError(f"not restored whole: {restored.miss_reason}")
        return restored.prefix

    def caches(self, prefix: RestoredPrefix) -> list[Any]:
        from stoker_worker.engine.cache_transfer import prefix_to_caches

        return prefix_to_caches(self.network, prefix, self.model.spec)


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    limits = Limits(most=3, least=2, warm_up=1, seconds=0.2) if quick else Limits(100, 100, 10, 4.0)
    leak = leaks(
        bench, folder / "leak", rounds=20 if quick else 200
    )  # first, while the process holds little that could hide a leak
    cells = []
    for n_layers in (12, 24) if quick else LAYERS:
        saved = save(bench, folder / f"{n_layers}", n_layers, (2 if quick else max(BLOCKS)) * BLOCK_TOKENS)
        for n_blocks in BLOCKS:
            if n_blocks * BLOCK_TOKENS <= len(saved.ids):
                note(f"{n_blocks} blocks, {n_layers} layers")
                cells.append(one_cell(saved, n_blocks, limits))
        saved.store.close()
    note("the safetensors library")
    library = against_library(folder / "library", quick=quick)
    targets = [
        {**{k: cell[k] for k in ("blocks", "layers", "bytes")}, "target_ms": TARGETS_MS[cell["blocks"], cell["layers"]]}
        for cell in cells if (cell["blocks"], cell["layers"]) in TARGETS_MS
    ]  # fmt: skip
    fit = straight_line([cell["bytes"] for cell in cells], [cell["reconstruct_ms"]["p50"] for cell in cells])
    padded = against_padded(bench, folder / "padded", limits)
    lengths = (64,) if quick else (64, 128, 256, 512, 1024, 2048, 4096)
    direct = against_generation(bench, folder / "direct", lengths, quick=quick)
    by = {(cell["blocks"], cell["layers"]): cell for cell in cells}
    criteria = {
        "every_restored_byte_is_the_saved_one": all(cell["exact"] for cell in [*cells, *library["rows"]]),
        "p95_under_5_ms_at_32_blocks_48_layers": (32, 48) in by and by[32, 48]["reconstruct_ms"]["p95"] < 5.0,
        "latency_is_linear_in_bytes": fit["r2"] >= LINEAR_R2,
        "no_leak": leak["growth_mb"] < leak["cell_mb"],
        "at_most_1_5_copies_at_32_blocks_30_layers": (32, 30) in by and by[32, 30]["copies"]["median"] <= PROJECT_RATIO,
    }
    return {
        "machine": machine(bench.facts),
        "verdict": {"passed": all(criteria.values()), **criteria},
        "cells": cells,
        "targets": targets,
        "given_gb_s": GIVEN_GB_S,
        "fit": fit,
        "leak": leak,
        "padded": padded,
        "library": library,
        "direct": direct,
    }


def save(bench: Bench, folder: Path, n_layers: int, n_tokens: int) -> Saved:
    """A store with one agent of random K/V, in the head shape of the loaded model, with as many layers as asked."""
    from mlx_lm.models.cache import KVCache

    note(f"saving {n_tokens} tokens of {n_layers} layers")
    shape = bench.model.spec.layers[0]
    layer = LayerSpec(LayerKind.FULL, shape.n_kv_heads, shape.key_dim, shape.value_dim)
    spec = ModelCacheSpec((layer,) * n_layers, "float32")
    model = replace(bench.model, spec=spec, fingerprint=hashlib.sha256(spec.describe().encode()).hexdigest())
    random = np.random.default_rng(n_tokens * n_layers)
    layers = empty_layers(spec, n_tokens)
    for pair in layers:
        for array in pair:
            random.random(out=array, dtype=np.float32)
    ids = tuple(random.integers(2, 40_000, n_tokens).tolist())
    store = AgentCacheStore(folder)
    transcript = Transcript(ids, model.tokenizer_fingerprint, None, "synthetic", "length")
    store.save(
        Turn(
            base=store.open_agent("agent"),
            delivery=Delivery("job", "0"),
            transcript=transcript,
            model=model,
            cache_salt=None,
            cache=CacheSlice(0, n_tokens, layers),
            result={"version": 1},
        )
    )
    network = SimpleNamespace(make_cache=lambda: [KVCache() for _ in spec.layers])
    return Saved(network, store, model, store.open_agent("agent"), ids, layers)


def one_cell(saved: Saved, n_blocks: int, limits: Limits) -> Json:
    """Reconstruct, copy, extract and round trip, in turn."""
    from stoker_worker.engine.cache_transfer import slice_caches

    n_tokens, spec = n_blocks * BLOCK_TOKENS, saved.model.spec
    n_bytes = n_tokens * spec.bytes_per_token
    source = np.ones(n_bytes, np.uint8)
    used = np.ones(n_bytes, np.uint8)
    batch = joined([saved.caches(saved.restore(n_tokens - 1)) for _ in range(2)])

    def reconstruct() -> tuple[Any, float]:
        prefix = saved.restore(n_tokens)
        restored_at = time.perf_counter()
        return saved.caches(prefix), restored_at

    def extract() -> CacheSlice:
        return slice_caches([cache.extract(0) for cache in batch], 0, n_tokens, spec)

    def round_trip() -> CacheSlice:
        rows = [cache.extract(0) for cache in joined([reconstruct()[0]])]
        return slice_caches(rows, 0, n_tokens + 1, spec)

    exact = same(round_trip(), saved.layers, n_tokens) and same(extract(), saved.layers, n_tokens - 1)

    def one_round(samples: dict[str, list[float]]) -> None:
        faults = page_faults()
        begin = time.perf_counter()
        caches, restored_at = reconstruct()
        end = time.perf_counter()
        samples.setdefault("reconstruct_faults", []).append(page_faults() - faults)
        del caches
        parts = {"reconstruct": end - begin, "store": restored_at - begin, "caches": end - restored_at}
        for name, seconds in parts.items():
            samples.setdefault(f"{name}_ms", []).append(1000 * seconds)
        for name, action in (
            ("fresh_copy", lambda: fresh_copy(source)),
            ("used_copy", lambda: np.copyto(used, source)),
            ("extract", extract),
            ("round_trip", round_trip),
        ):
            samples.setdefault(f"{name}_ms", []).append(timed(action))

    warmed, start = 0, time.perf_counter()
    while warmed < limits.warm_up and time.perf_counter() - start < limits.seconds / 2:
        one_round({})
        warmed += 1
    samples: dict[str, list[float]] = {}
    done, start = 0, time.perf_counter()
    while limits.more(done, start):
        one_round(samples)
        done += 1
    faults = spread(samples.pop("reconstruct_faults"))
    copies, used_copies = (
        spread([took / copy for took, copy in zip(samples["reconstruct_ms"], samples[name], strict=True)])
        for name in ("fresh_copy_ms", "used_copy_ms")
    )
    cell: Json = {"blocks": n_blocks, "layers": len(spec.layers), "tokens": n_tokens, "bytes": n_bytes}
    cell |= {"exact": exact, "warm_up": warmed}
    cell |= {name: percentiles(values) for name, values in samples.items()}
    return {**cell, "copies": copies, "used_copies": used_copies, "page_faults": faults}


def fresh_copy(source: Any) -> Any:
    """A copy into pages newly allocated by the system: huge pages where available, as for NumPy's own large arrays."""
    pages = mmap.mmap(-1, source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    target = np.frombuffer(pages, source.dtype)
    np.copyto(target, source)
    return target


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def joined(rows: Sequence[Any]) -> list[Any]:
    """Sequences put into one batch that has taken one more token: `BatchGenerator`'s own caches after a step."""
    import mlx.core as mx
    from mlx_lm.models.cache import BatchKVCache

    batch = [BatchKVCache.merge(list(layer)) for layer in zip(*rows, strict=True)]
    for cache in batch:
        n_rows, heads, _, dim = cache.keys.shape
        token = mx.zeros((n_rows, heads, 1, dim), cache.keys.dtype)
        cache.update_and_fetch(token, token)
    mx.eval([(cache.keys, cache.values) for cache in batch])
    return batch


def same(got: CacheSlice, wanted: Sequence[LayerKV], n_tokens: int) -> bool:
    return all(
        np.array_equal(left[:, :n_tokens], right[:, :n_tokens])
        for pairs in zip(got.layers, wanted, strict=True)
        for left, right in zip(*pairs, strict=True)
    )


def timed(action: Callable[[], Any]) -> float:
    """Milliseconds of one call; its result is dropped afterwards."""
    start = time.perf_counter()
    made = action()
    took = 1000 * (time.perf_counter() - start)
    del made
    return took


def percentiles(samples: Sequence[float]) -> Json:
    p50, p95, p99 = np.percentile(samples, (50, 95, 99)).tolist()
    values = {"mean": float(np.mean(samples)), "p50": p50, "p95": p95, "p99": p99, "min": min(samples)}
    return {**{name: round(value, 3) for name, value in values.items()}, "n": len(samples)}


def straight_line(n_bytes: Sequence[int], latencies_ms: Sequence[float]) -> Json:
    """Least squares over all cells, and the exponent that a power law would have (1 is linear)."""
    mb = np.array(n_bytes) / 1e6
    took = np.array(latencies_ms)
    slope, at_zero = np.polyfit(mb, took, 1).tolist()
    off = float(np.sum((took - slope * mb - at_zero) ** 2) / np.sum((took - took.mean()) ** 2))
    exponent = float(np.polyfit(np.log(mb), np.log(took), 1)[0])
    return {"ms_per_mb": round(slope, 4), "at_zero_ms": round(at_zero, 3), "r2": round(1 - off, 4),
            "exponent": round(exponent, 3)}  # fmt: skip


def leaks(bench: Bench, folder: Path, rounds: int) -> Json:
    """Memory of the process while one cell is reconstructed again and again."""
    n_tokens, n_layers = 4 * BLOCK_TOKENS, 24
    saved = save(bench, folder, n_layers, n_tokens)
    note(f"{rounds} reconstructions in a row")
    resident = []
    for done in range(10 + rounds):
        if done >= 10 and (done - 10) % (rounds // 4) == 0:
            resident.append(resident_mb())
        saved.caches(saved.restore(n_tokens))
    resident.append(resident_mb())
    saved.store.close()
    return {"rounds": rounds, "blocks": 4, "layers": n_layers, "resident_mb": resident,
            "cell_mb": round(n_tokens * saved.model.spec.bytes_per_token / 1e6, 1),
            "growth_mb": round(resident[-1] - resident[0], 1)}  # fmt: skip


def resident_mb() -> float:
    gc.collect()
    listed = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True)
    return round(int(listed.stdout) * 1024 / 1e6, 1)


def against_padded(bench: Bench, folder: Path, limits: Limits) -> Json:
    """612 tokens as two blocks and a tail, and the same cache padded to 768 tokens, as three full blocks."""
    kept = {n: save(bench, folder / f"{n}", 30, n) for n in (612, 768)}
    note("612 tokens against 768")
    samples: dict[int, list[float]] = {612: [], 768: []}
    for done in range(limits.warm_up + limits.most):
        for n_tokens in (612, 768) if done % 2 else (768, 612):
            saved = kept[n_tokens]
            took = timed(lambda saved=saved, n=n_tokens: saved.caches(saved.restore(n)))  # type: ignore[misc]
            if done >= limits.warm_up:
                samples[n_tokens].append(took)
    for saved in kept.values():
        saved.store.close()
    ratios = [blocks / padded for blocks, padded in zip(samples[612], samples[768], strict=True)]
    return {"layers": 30, "blocks_ms": percentiles(samples[612]), "padded_ms": percentiles(samples[768]),
            "ratio": spread(ratios), "bytes_ratio": round(612 / 768, 3)}  # fmt: skip


def against_generation(bench: Bench, folder: Path, lengths: Sequence[int], *, quick: bool) -> list[Json]:
    """First token of a prompt, cold and from its restored cache; the longest are prefilled once."""
    store, engine, rows = AgentCacheStore(folder), bench.engine(), []

    def first_token_s(agent: str, text: str, cache: str) -> tuple[float, float, tuple[int, ...]]:
        begin = time.perf_counter()
        turn = bench.prepare(store, {"agent_id": agent, "prompt": text, "max_tokens": 1, "cache": cache})
        restored_s = time.perf_counter() - begin
        engine.submit(turn.work)
        done: list[Any] = []
        while engine.in_flight:
            done += engine.step()
        if cache == "readwrite":
            bench.save(store, turn, done[0])
        elif cache == "read" and turn.cached != len(turn.prompt.ids) - 1:
            raise RuntimeError(f"{turn.cached} of {len(turn.prompt.ids)} tokens restored")
        return restored_s + done[0].timing.prefill_s, restored_s, done[0].generated_ids

    first_token_s("warm-up", text_of(bench.encode, "French", 64), "off")
    for n in lengths:
        note(f"{n} tokens with and without cache")
        text = text_of(bench.encode, "English", n)
        cold = [first_token_s(f"{n}", text, "readwrite")]
        warm = []
        for repetition in range(1 if quick else 5):
            warm.append(first_token_s(f"{n}", text, "read"))
            if repetition < 2 and n <= 1024:
                cold.append(first_token_s(f"{n}", text, "off"))
        row: Json = {"tokens": n, "mb": round((n - 1) * bench.model.spec.bytes_per_token / 1e6, 1)}
        row["cold_s"], row["warm_s"] = spread([s for s, _, _ in cold]), spread([s for s, _, _ in warm])
        row["store_ms"] = spread([1000 * s for _, s, _ in warm])
        row["speedup"] = round(row["cold_s"]["median"] / row["warm_s"]["median"], 1)
        row["same_token"] = len({ids for _, _, ids in (*cold, *warm)}) == 1
        rows.append(row)
    engine.close()
    store.close()
    return rows


if __name__ == "__main__":
    main(__doc__ or "", "006", REPORT, run, render)

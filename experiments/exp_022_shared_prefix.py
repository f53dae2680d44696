"""EXP-022, a shared prefix: what do sequences that begin alike gain when their beginning is in memory once?

Sequences with one beginning decode together in the worker's engine: once with a copy of the beginning for each, once
with one for all. The contestants take turns. Run: ``python experiments/exp_022_shared_prefix.py``.
"""

import random
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench import Bench, main
from common import Json, note, ratios, spread, take_turns
from prompts import text_of
from report import Report, columns, short
from works import work

from stoker_worker.ports import GenerationWork, SequenceCache

OWN_TOKENS = (8, 32)
GENERATED = 12
LEAST_SPEED, MOST_MEMORY = 0.97, 0.5


@dataclass(frozen=True)
class Run:
    """
    Attributes:
        step_s: of each step in which all sequences decode.
        cache_bytes: of their caches in the last of these steps.
        peak: most bytes at any time, beyond those in use before.
    """

    step_s: list[float]
    cache_bytes: int
    peak: int
    tokens: list[tuple[int, ...]]


def only(contestant: str) -> Any:
    """Let every sequence have a copy of the beginning, or let them share it."""
    from stoker_worker.engine import scheduler

    least = 10**9 if contestant == NAMES[0] else scheduler.LEAST_SHARED
    return patch.object(scheduler, "LEAST_SHARED", least)


def run_once(bench: Bench, works: list[GenerationWork], contestant: str) -> Run:
    import mlx.core as mx

    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with only(contestant):
        engine = bench.endless().worker_engine(len(works), max_step_s=60.0)
        uids = [engine.submit(one) for one in works]
        done, step_s, cache_bytes = {}, [], 0
        while engine.in_flight:
            start = time.perf_counter()
            ended = engine.step()
            seconds = time.perf_counter() - start
            done |= {end.uid: end for end in ended}
            if not ended and all(progress.tokens > 1 for progress in engine.progress().values()):
                step_s.append(seconds)
                cache_bytes = int(engine._generator.nbytes)
        engine.close()
    peak = mx.get_peak_memory() - before
    return Run(step_s, cache_bytes, peak, [done[uid].generated_ids for uid in uids])


def works_of(bench: Bench, system: list[int], prefix: SequenceCache, n_rows: int) -> list[GenerationWork]:
    """Sequences that begin with `system`. The first has it restored; the others take it over from the first."""
    dice = random.Random(22)
    words = bench.encode(text_of(bench.encode, "English", 2000, seed=1))
    works = []
    for n in range(n_rows):
        start, n_own = dice.randrange(1000), dice.randint(*OWN_TOKENS)
        ids = (*system, *words[start : start + n_own])
        works.append(replace(work(ids, GENERATED, prefix if n == 0 else None), shares=("all",)))
    return works


def prefix_of(bench: Bench, system: list[int]) -> SequenceCache:
    """The cache of `system`, as a store would restore it."""
    (end,) = bench.answers([work(system, 1, is_saved=True)])
    assert end.cache is not None
    n = len(system)
    return SequenceCache(n, tuple((keys[:, :n].copy(), values[:, :n].copy()) for keys, values in end.cache.layers))


def measured(bench: Bench, works: list[GenerationWork], n_tokens: int, rounds: int) -> Json:
    note(f"{len(works)} rows, {n_tokens} tokens, {rounds} rounds")
    runs = take_turns({name: partial(run_once, bench, works, name) for name in NAMES}, rounds)
    step_s = {name: [statistics.median(run.step_s) for run in each] for name, each in runs.items()}
    copies, shared = runs.values()
    return {
        "tokens": n_tokens,
        "rows": len(works),
        "speed": ratios(*step_s.values()),
        "memory": round(shared[0].cache_bytes / copies[0].cache_bytes, 3),
        "same_rows": sum(len(set(row)) == 1 for row in zip(*(run.tokens for run in copies + shared), strict=True)),
        **{
            name: {
                "step_ms": spread([1000 * seconds for seconds in step_s[name]], digits=1),
                "cache_mb": round(each[0].cache_bytes / 1e6, 1),
                "peak_mb": spread([run.peak / 1e6 for run in each], digits=1),
            }
            for name, each in runs.items()
        },
    }


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    sizes, widths, rounds = ((256,), (3,), 1) if quick else ((256, 1024), (4, 16), 5)
    found = []
    for n_tokens in sizes:
        system = bench.encode(text_of(bench.encode, "English", n_tokens, seed=22))[:n_tokens]
        prefix = prefix_of(bench, system)
        for n_rows in widths:
            works = works_of(bench, system, prefix, n_rows)
            if not found:
                run_once(bench, works, NAMES[1])
            found.append(measured(bench, works, n_tokens, rounds))
    largest = [cell for cell in found if cell["rows"] == max(widths) and cell["tokens"] >= min(1024, max(sizes))]
    verdict = {
        "never_slower_by_more_than_3_percent": min(cell["speed"]["median"] for cell in found) >= LEAST_SPEED,
        "half_the_memory_of_1024_tokens_or_more": max(cell["memory"] for cell in largest) <= MOST_MEMORY,
        "all_tokens_equal": all(cell["same_rows"] == cell["rows"] for cell in found),
    }
    return {"verdict": verdict, "cells": found}


NAMES = ("a copy each", "shared")


def render(content: Json, results: Path) -> Report:
    cells = content["cells"]
    last, least = cells[-1], min(cells, key=lambda cell: cell["speed"]["median"])
    copies, shared = (f"{last[name]['cache_mb']:.0f}" for name in NAMES)
    same = all(cell["same_rows"] == cell["rows"] for cell in cells)
    summary = "\n".join((
        f"{last['rows']} sequences with {last['tokens']} common tokens take {shared} MB of cache instead of {copies}, "
        f"and decode {short(last['speed'])} times as fast.",
        f"The least speed is {short(least['speed'])}, of {least['rows']} sequences with {least['tokens']} tokens.",
        "Every sequence has the same tokens in all runs." if same else "NOT every sequence has the same tokens.",
    ))  # fmt: skip
    number = f"{shared} MB of cache instead of {copies}; {last['speed']['median']} times as fast"
    return Report("a prefix that several sequences share", number, {"summary": summary, "cells": columns(cells, CELLS)})


CELLS = {
    "common tokens": "{tokens}", "rows": "{rows}", "ms a step: copies": "{a copy each[step_ms][median]:.0f}",
    "ms: shared": "{shared[step_ms][median]:.0f}", "in speed": "{speed:.3g}",
    "cache, MB: copies": "{a copy each[cache_mb]:.0f}", "MB: shared": "{shared[cache_mb]:.0f}",
    "peak, MB: copies": "{a copy each[peak_mb][median]:.0f}", "peak: shared": "{shared[peak_mb][median]:.0f}",
    "same rows": "{same_rows} of {rows}",
}  # fmt: skip


if __name__ == "__main__":
    main(__doc__ or "", "022", run, render)

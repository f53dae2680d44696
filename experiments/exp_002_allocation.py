"""EXP-002, allocation: what does the block pool cost, does its size matter, and does anything leak?

It measures the scheduler around the pool (a sequence is admitted beside 15 others and removed; a step's bookkeeping of
16), 1,000 times each, on pools of 100 and of 10,000 blocks in turn. Then 1,000 jobs of random length go through the
engine with a tiny model. Run: ``python experiments/exp_002_*.py``.
"""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from command import main
from common import Json, in_turn, note, ratios
from random_models import RandomModel, random_ids
from report import Report, columns, say
from works import work

from stoker_worker.engine.kv_memory import BlockPool
from stoker_worker.ports.cache_spec import LayerKind, LayerSpec, ModelCacheSpec

SIZES = (100, 10_000)
TARGET_MS, RATIO = 1.0, 2.0
CYCLES, ROUNDS = 1000, 5
ROWS = 16
SPEC = ModelCacheSpec((LayerSpec(LayerKind.FULL, 8, 128, 128),) * 32, "bfloat16")
"""Of the size of Llama 3.1 8B's; nothing here depends on it but the numbers that are added."""


def scheduler_with(total: int, rows: int) -> tuple[Any, Any]:
    """A scheduler with that many sequences in the batch, and a generator that only counts."""
    from stoker_worker.engine.kv_memory import KVCost
    from stoker_worker.engine.scheduler import ConcurrentScheduler
    from stoker_worker.engine.step_limits import BatchWidth

    pool, kv_cost, width = BlockPool(total), KVCost(SPEC, 256, in_rows=True), BatchWidth(ROWS)
    scheduler = ConcurrentScheduler(pool=pool, kv_cost=kv_cost, width=width, max_prefilling=8, shares_beginnings=True)
    uids = iter(range(10**9))
    generator = SimpleNamespace(insert=lambda start: next(uids))
    for number in range(rows):
        scheduler.waiting.add(new_sequence(number))
        scheduler.let_in(generator)
        scheduler.decoding |= scheduler.prefilling
        scheduler.prefilling.clear()
    if len(scheduler.decoding) != rows:
        raise RuntimeError("not every sequence was admitted")
    return scheduler, generator


def new_sequence(uid: int) -> Any:
    from stoker_worker.engine.sampling import SequenceSampling
    from stoker_worker.engine.sequence import EndIds, Sequence

    one = work(range(200 + 7 * (uid % ROWS)), 256)
    sampling = SequenceSampling(one.request, n_prompt=len(one.prompt_ids), end_ids=frozenset())
    return Sequence(uid=uid, work=one, sampling=sampling, stops=None, end_ids=EndIds())


def join_cycle(total: int) -> Callable[[int], None]:
    """A sequence waits, its cost with 15 others is computed, it is admitted and removed: allocation in the engine."""
    scheduler, generator = scheduler_with(total, ROWS - 1)
    rows = [new_sequence(ROWS + number) for number in range(CYCLES)]

    def cycle(number: int) -> None:
        sequence = rows[number]
        sequence.generator_uid = None
        scheduler.waiting.add(sequence)
        scheduler.let_in(generator)
        if sequence.generator_uid is None:
            raise RuntimeError("the sequence was not admitted")
        scheduler.drop(sequence)

    return cycle


def step_cycle(total: int) -> Callable[[int], None]:
    """The checks of a step with 16 sequences: does the next step fit, and does each hold the blocks it needs?"""
    scheduler, generator = scheduler_with(total, ROWS)

    def cycle(number: int) -> None:
        if scheduler.victim() is not None:
            raise RuntimeError("the sequences do not fit")
        scheduler.let_in(generator)

    return cycle


def one_kind(make: Callable[[int], Callable[[int], None]], rounds: int) -> Json:
    """Time `rounds` x `CYCLES` cycles of each size, in turn, each by itself; ratios are of a round's medians."""
    taken: dict[int, list[list[float]]] = {size: [] for size in SIZES}
    for number, size in in_turn(SIZES, rounds, warm_up=1):
        cycle, samples = make(size), []
        for index in range(CYCLES):
            begin = time.perf_counter_ns()
            cycle(index)
            samples.append((time.perf_counter_ns() - begin) / 1e6)
        if number >= 0:
            taken[size].append(samples)
    small, large = ([float(np.median(samples)) for samples in taken[size]] for size in SIZES)
    sizes = {str(size): _percentiles(np.concatenate(taken[size])) for size in SIZES}
    return {"cycles": CYCLES * rounds, "sizes": sizes, "ratio": ratios(large, small)}


def _percentiles(samples: Any) -> Json:
    p50, p99 = np.percentile(samples, (50, 99)).tolist()
    values = {"mean": float(samples.mean()), "p50": p50, "p99": p99, "most": float(samples.max())}
    return {name: round(value, 5) for name, value in values.items()}


def leaks(jobs: int) -> Json:
    """Jobs of random length through the engine, with a pool small enough to preempt sequences."""
    note(f"{jobs} jobs")
    model, dice = RandomModel.make("tiny"), random.Random(2)
    engine = model.engine(max_batch=8, blocks=12, prefill_tokens=64)
    pool = engine._pool
    ended, most, left = 0, 0, jobs
    while left or engine.in_flight:
        while left and engine.in_flight < 16:
            engine.submit(work(random_ids(dice, dice.randrange(1, 400)), dice.randrange(1, 120), is_saved=True))
            left -= 1
        if dice.random() < 0.01:
            ended += engine.cancel(next(iter(engine.progress()))) is not None
        ended += len(engine.step())
        most = max(most, pool.used)
    found = {"jobs": jobs, "ended": ended, "total": pool.total, "most_used": most, "used_at_the_end": pool.used,
             "free_at_the_end": pool.free, "cache_bytes_at_the_end": engine._generator.nbytes,
             "rows_at_the_end": engine.in_flight}  # fmt: skip
    engine.close()
    return found


def run(folder: Path, *, quick: bool) -> Json:
    kinds = {}
    for name, make in (("join", join_cycle), ("step", step_cycle)):
        note(name)
        kinds[name] = one_kind(make, 1 if quick else ROUNDS)
    leak = leaks(40 if quick else 1000)
    measured = [size for kind in kinds.values() for size in kind["sizes"].values()]
    verdict = {
        "mean_p50_and_p99_under_1_ms": all(size[k] < TARGET_MS for size in measured for k in ("mean", "p50", "p99")),
        "at_most_twice_as_long_at_10000_blocks": all(kind["ratio"]["median"] <= RATIO for kind in kinds.values()),
        "nothing_leaked": _nothing_leaked(leak),
    }
    return {"verdict": verdict, "kinds": kinds, "leak": leak}


def _nothing_leaked(leak: Json) -> bool:
    held = leak["used_at_the_end"] or leak["cache_bytes_at_the_end"] or leak["rows_at_the_end"]
    return not held and leak["ended"] == leak["jobs"] and leak["free_at_the_end"] == leak["total"]


def short_form(bench: object, folder: Path) -> Iterator[Json]:
    """Admissions, and 40 jobs."""
    found = one_kind(join_cycle, 1)
    yield {"what": "a sequence is admitted and removed with 10,000 blocks / with 100, in time", "ratio": found["ratio"],
           "asked": f"at most {RATIO:g}",
           "found": say(found["sizes"]["10000"], "p99 {p99:.3f} ms")}  # fmt: skip
    leak = leaks(40)
    yield {"what": "blocks, bytes and sequences after 40 jobs are none", "equal": _nothing_leaked(leak)}


NAMES = {
    "pool": "pool alone: take two blocks, one more, give back",
    "join": "a sequence admitted beside 15 others, and removed",
    "step": "a step's bookkeeping for 16 sequences",
}


CYCLES_SHOWN = {
    "what": "{name}", "blocks": "{size}", "cycles": "{cycles}", "mean, ms": "{mean:.4f}", "p50": "{p50:.4f}",
    "p99": "{p99:.4f}", "most": "{most:.4f}", "10,000 : 100 (medians of a round)": "{ratio:.2f}",
}  # fmt: skip
LEAK = (
    "{ended} of {jobs} jobs ended. Of {total} blocks at most {most_used} were held at once; at the end "
    "{used_at_the_end} were held, {cache_bytes_at_the_end} bytes were in the generator's caches, and "
    "{rows_at_the_end} sequences were in the engine."
)


def render(content: Json, results: Path) -> Report:
    kinds, leak = content["kinds"], content["leak"]
    cycles = [{**kind, **taken, "name": NAMES[name], "size": size, "ratio": kind["ratio"] if size == "10000" else None}
              for name, kind in kinds.items() for size, taken in kind["sizes"].items()]  # fmt: skip
    summary = (
        f"The slowest kind takes {max(one['p99'] for one in cycles):.3f} ms at the 99th percentile, and at most "
        f"{max(kind['ratio']['median'] for kind in kinds.values()):.2f} times as long with 10,000 blocks as with 100. "
        f"After {leak['ended']} jobs {leak['used_at_the_end']} blocks are held."
    )
    number = f"p99 {kinds['join']['sizes']['10000']['p99']:.3f} ms with 10,000 blocks"
    parts = {"summary": summary, "cycles": columns(cycles, CYCLES_SHOWN), "leak": say(leak, LEAK)}
    return Report("allocation", number, parts)


if __name__ == "__main__":
    main(__doc__ or "", "002", run, render)

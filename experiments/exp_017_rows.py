"""EXP-017, rows: what does a batch of unequal sequences gain when each costs its own length only?

The same rows go through mlx-lm's `BatchGenerator`, which keeps a batch as one rectangle, and through the product's
`RowsGenerator`. They take turns, in an order that changes every round. Then a long restored row joins seven decoding
ones, through the whole engine. Run: ``python experiments/exp_017_rows.py``.
"""

import os
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench import Bench, Endless, main
from common import Json, machine, note, spread
from exp_017_report import render
from prompts import text_of
from rows_bench import CONTESTANTS, Contexts, Job, Load, run_once, same_tokens, worker_chunk
from rows_parts import PARTS, Parts

from stoker_shared import build_request
from stoker_worker.ports import GenerationWork, RestoredPrefix
from stoker_worker.ports.serving_mode import Batching, ServingMode

REPORT = "EXP-017-rows.md"
KINDS = ("English", "German", "French", "Spanish", "Python", "Portuguese")
SIZES = (1, 2, 4, 8, 32)
ROUNDS = {"mixed": 1, "mixed_restored": 3, "restored": 5, "short": 5, "steady": 5, **{f"batch_{n}": 5 for n in SIZES}}
IN_PARTS = ("mixed_restored", "restored", "short")
MIXED, RESTORED, SHORT = 2.5, 1.4, 1.1
EQUAL, LEAST = 1.0, 0.97
MOST_LONGEST, MOST_JOIN, MOST_MEMORY = 1.5, 1.3, 1.15


# --- the loads ---


def loads(bench: Bench, *, quick: bool) -> list[Load]:
    dice = random.Random(17)

    def ids(n_tokens: int, seed: int) -> tuple[int, ...]:
        return tuple(bench.encode(text_of(bench.encode, KINDS[seed % len(KINDS)], n_tokens, seed=seed)))

    def short(n_rows: int, least: int, most: int) -> list[Job]:
        return [Job((), ids(dice.randint(20, 60), n), dice.randint(least, most)) for n in range(n_rows)]

    long, n_long, medium, n_medium, said = (300, 1, 40, 3, 4) if quick else (3000, 2, 200, 14, 32)
    mixed = [*(ids(long, n) for n in range(n_long)), *(ids(medium, n) for n in range(n_medium))]
    in_mixed = f"{n_long} x {long} + {n_medium} x {medium} tokens, {said} generated"
    rows, places, context = (5, 3, 300) if quick else (40, 16, 1024)
    few, some, many = (2, 4, 6) if quick else (8, 32, 64)
    contexts = [ids(context, seed) for seed in range(2)]
    restored = [Job(contexts[n % 2], ids(32, n), dice.randint(few, some)) for n in range(rows)]
    steady, sizes, each = (3, (1, 2), 3) if quick else (16, SIZES, 24)
    return [
        Load("mixed", f"{in_mixed}, fresh", len(mixed), MIXED, [Job((), one, said) for one in mixed]),
        Load("mixed_restored", f"{in_mixed}, restored", len(mixed), MIXED,
             [Job(one[:-1], one[-1:], said) for one in mixed]),
        Load("restored", f"{rows} rows of {context} restored and 32 new tokens, {few} to {some} generated, "
             f"{places} places", places, RESTORED, restored),
        Load("short", f"{rows} rows of 20 to 60 tokens, {few} to {many} generated, {places} places", places, SHORT,
             short(rows, few, many)),
        Load("steady", f"{steady} rows of {many} tokens", steady, EQUAL, short(steady, many, many)),
        *(Load(f"batch_{n}", f"{n} rows of {each} tokens", n, EQUAL, short(n, each, each)) for n in sizes),
    ]  # fmt: skip


def measured(bench: Bench, contexts: Contexts, load: Load, rounds: int) -> Json:
    """Let the contestants take turns; ratios are taken within a round."""
    for number in range(rounds):
        for contestant in CONTESTANTS[:: 1 if number % 2 == 0 else -1]:
            done = run_once(bench, contexts, load, contestant)
            load.runs.setdefault(contestant.name, []).append(done)
            note(f"{load.name}, round {number + 1} of {rounds}: {contestant.name} {done.seconds:.1f} s")
    mlx_lm, rows = load.runs.values()
    bytes_of_rows = sum(job.n_tokens for job in load.jobs) * bench.model.spec.bytes_per_token
    return {
        "key": load.key,
        "name": load.name,
        "places": load.places,
        "n_rows": len(load.jobs),
        "generated": sum(job.max_tokens for job in load.jobs),
        "target": load.target,
        "ratio": spread([a.seconds / b.seconds for a, b in zip(mlx_lm, rows, strict=True)]),
        "same_rows": same_tokens([*mlx_lm, *rows]),
        "mb_of_rows": round(bytes_of_rows / 1e6),
        **{
            name: {
                "s": spread([run.seconds for run in runs]),
                "steps": len(runs[0].memory),
                "peak_mb": spread([run.peak / 1e6 for run in runs], digits=1),
                "peak_to_rows": round(statistics.median(run.peak for run in runs) / bytes_of_rows, 3),
            }
            for name, runs in load.runs.items()
        },
    }


def memory_over_time(load: Load) -> Json:
    """MB after some of the steps of each contestant's last round."""
    found = {}
    for name, runs in load.runs.items():
        memory = runs[-1].memory
        kept = memory[:: max(1, len(memory) // 150)]
        found[name] = {"s": [round(s, 2) for s, _ in kept], "mb": [round(n / 1e6, 1) for _, n in kept]}
    return {"load": load.name, **found}


def parts(bench: Bench, contexts: Contexts, load: Load) -> Json:
    """Seconds of each part of a run, in which every part is waited for."""
    found: Json = {"load": load.name}
    for contestant in CONTESTANTS:
        watch = Parts()
        done = run_once(bench, contexts, load, contestant, watch)
        note(f"parts of {load.name}: {contestant.name} {done.seconds:.1f} s")
        seconds = {name: round(watch.seconds[name], 3) for name in PARTS}
        found[contestant.name] = {"steps": len(done.memory), "s": round(done.seconds, 3), "parts": seconds}
    return found


# --- a long restored row joins, through the engine ---


def joining(bench: Bench, batching: Batching, *, rows: int, n_tokens: int, repeats: int) -> Json:
    """Times of steps to a quiet one, from a long row's submission to its first token."""
    from stoker_worker.engine.assembly import assemble

    model = replace(bench.model, tokenizer=Endless(bench.model.tokenizer), mode=ServingMode(batching))
    engine = assemble(bench.network, model, max_bytes=8 << 30, max_batch=16, prefill_tokens=worker_chunk(bench),
                      max_step_s=0.5)  # fmt: skip
    for n in range(rows):
        engine.submit(_work(tuple(bench.encode(f"Count on from {n}:")), 4000))
    while min(progress.tokens for progress in engine.progress().values()) < 4:
        engine.step()
    found: Json = {"quiet_ms": [], "longest": [], "join": [], "steps": [], "beside": []}
    for number in range(repeats):
        for _ in range(2):
            engine.step()
        quiet = statistics.median(_timed(engine.step) for _ in range(8))
        work = _restored(bench, n_tokens)
        taken, entered = [], 0
        begin = time.perf_counter()
        uid = engine.submit(work)  # the decoding rows wait meanwhile
        del work
        taken.append(time.perf_counter() - begin + _timed(engine.step))
        while engine.progress()[uid].tokens == 0:
            entered += engine.progress()[uid].stage == "waiting"
            taken.append(_timed(engine.step))
        beside = statistics.median(_timed(engine.step) for _ in range(3))
        engine.cancel(uid)
        ratios = [seconds / quiet for seconds in taken]
        note(f"{batching}, {n_tokens} tokens join, {number + 1} of {repeats}: {[round(x, 2) for x in ratios]}")
        found["quiet_ms"].append(1000 * quiet)
        found["longest"].append(max(ratios))
        found["join"].append(max(ratios[entered : entered + 2]))  # the pass of a step is waited for in the next one
        found["beside"].append(beside / quiet)
        found["steps"].append(ratios)
    engine.close()
    steps = [[round(x, 3) for x in ratios] for ratios in found.pop("steps")]
    return {"tokens": n_tokens, "mb": round(n_tokens * bench.model.spec.bytes_per_token / 1e6), "beside_rows": rows,
            **{name: spread(values) for name, values in found.items()}, "steps": steps}  # fmt: skip


def _restored(bench: Bench, n_tokens: int) -> GenerationWork:
    """A row with `n_tokens` restored tokens, in the memory that the loader reads them into, and a prompt of one more.
    Its contents make no difference here."""
    from stoker_worker.engine.prefix_room import MlxRoom

    rng = np.random.default_rng(17)
    room = MlxRoom(bench.model.spec, n_tokens + 1, 8)
    for keys, values in room.layers():
        for array in (keys, values):
            array[:, :n_tokens] = rng.standard_normal((array.shape[0], n_tokens, array.shape[2]), np.float32)
    del keys, values, array
    ids = tuple(int(x) for x in rng.integers(1000, 9000, n_tokens + 1))
    return _work(ids, 8, RestoredPrefix(n_tokens, (), room=room))


def _work(ids: tuple[int, ...], max_tokens: int, prefix: RestoredPrefix | None = None) -> GenerationWork:
    request = build_request({"agent_id": "x", "prompt": "x", "max_tokens": max_tokens})
    return GenerationWork(request, ids, prefix, None)


def _timed(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# --- all of it ---


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    facts = machine(bench.facts)
    contexts = Contexts(bench)
    found, split, memory = [], [], {}
    for load in loads(bench, quick=quick):
        if not found:
            warm_up(bench, contexts)
        found.append(measured(bench, contexts, load, 1 if quick else ROUNDS[load.key]))
        if load.key in IN_PARTS:
            split.append(parts(bench, contexts, load))
        if load.key == "short":
            memory = memory_over_time(load)
    sizes = {"rows": 2, "n_tokens": 600, "repeats": 1} if quick else {"rows": 7, "n_tokens": 8192, "repeats": 5}
    joins = {str(batching): joining(bench, batching, **sizes) for batching in (Batching.ROWS, Batching.BATCHED)}
    return {
        "machine": facts,
        "verdict": verdict(found, joins[str(Batching.ROWS)]),
        "loads": found,
        "joins": joins,
        "parts": split,
        "memory": memory,
        "least_ratio": min((load["ratio"]["median"] for load in found), default=None),
        "load_average_at_end": round(os.getloadavg()[0], 1),
    }


def warm_up(bench: Bench, contexts: Contexts) -> None:
    job = Job((), tuple(bench.encode("One and two")), 2)
    for contestant in CONTESTANTS:
        run_once(bench, contexts, Load("warm", "warm", 2, 0, [job, job]), contestant)


def verdict(found: list[Json], join: Json) -> Json:
    by_key = {load["key"]: load for load in found}
    ratio = {key: load["ratio"]["median"] for key, load in by_key.items()}
    same_length = [value for key, value in ratio.items() if key == "steady" or key.startswith("batch_")]
    mixed = [by_key["mixed"], by_key["mixed_restored"]]
    criteria = {
        "unequal_rows_2_5_times_as_fast": min(ratio["mixed"], ratio["mixed_restored"]) >= MIXED,
        "restored_rows_come_and_go_1_4_times_as_fast": ratio["restored"] >= RESTORED,
        "short_rows_come_and_go_1_1_times_as_fast": ratio["short"] >= SHORT,
        "rows_of_similar_length_as_fast": statistics.median(same_length) >= EQUAL,
        "none_of_them_under_0_97": min(same_length) >= LEAST,
        "longest_step_at_most_1_5_quiet_ones": join["longest"]["median"] <= MOST_LONGEST,
        "a_join_takes_at_most_1_3_quiet_steps": join["join"]["median"] <= MOST_JOIN,
        "peak_memory_at_most_1_15_times_the_rows": max(load["rows"]["peak_to_rows"] for load in mixed) <= MOST_MEMORY,
        "all_tokens_equal": all(load["same_rows"] == load["n_rows"] for load in found),
    }
    return {"passed": all(criteria.values()), **criteria}


if __name__ == "__main__":
    main(__doc__ or "", "017", REPORT, run, render)

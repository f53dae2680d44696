"""EXP-017, rows: what does a batch of unequal sequences gain when each costs its own length only?

The same rows go through mlx-lm's `BatchGenerator`, which keeps a batch as one rectangle, and through the product's
`RowsGenerator`. They take turns, in an order that changes every round. Then a long restored row joins seven decoding
ones, through the whole engine. Run: ``python experiments/exp_017_rows.py``.
"""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from bench import Bench, main
from common import Json, note, ratios, spread, take_turns, timed
from prompts import SIX_KINDS, text_of
from report import Report, columns, listed, say, short
from rows_bench import CONTESTANTS, Contexts, Job, Load, run_once, same_tokens
from works import let_decode, work

from stoker_worker.ports import GenerationWork, SequenceCache
from stoker_worker.ports.model import Batching, ServingMode

MIXED, RESTORED, COMING, EQUAL = 2.5, 1.4, 1.1, 1.0
"""Times mlx-lm's speed."""


def loads(bench: Bench, *, quick: bool) -> list[Load]:
    """Unequal rows, fresh and restored; restored rows and short ones that come and go; rows of similar length."""
    long, medium, said = ((1, 300), (3, 40), 4) if quick else ((2, 3000), (14, 200), 32)  # rows, and tokens of each
    rows, places, context = (5, 3, 300) if quick else (24, 12, 512)
    few, some, most = (2, 4, 6) if quick else (8, 16, 32)  # tokens generated; short rows generate up to `most`
    n_steady, equal, each = (3, (1, 2), 3) if quick else (16, (1, 4), 16)
    dice = random.Random(17)

    def ids(n_tokens: int, seed: int) -> tuple[int, ...]:
        return tuple(bench.encode(text_of(bench.encode, SIX_KINDS[seed % len(SIX_KINDS)], n_tokens, seed=seed)))

    def short(n_rows: int, least: int, most: int) -> list[Job]:
        return [Job((), ids(dice.randint(20, 60), n), dice.randint(least, most)) for n in range(n_rows)]

    unequal = [ids(n_tokens, n) for count, n_tokens in (long, medium) for n in range(count)]
    named = "{} x {} + {} x {} tokens, {} generated".format(*long, *medium, said)
    contexts = [ids(context, seed) for seed in range(2)]
    restored = [Job(contexts[n % 2], ids(32, n), dice.randint(few, some)) for n in range(rows)]
    return [
        Load("mixed", f"{named}, fresh", len(unequal), MIXED, [Job((), one, said) for one in unequal]),
        Load("mixed_restored", f"{named}, restored", len(unequal), MIXED,
             [Job(one[:-1], one[-1:], said) for one in unequal]),
        Load("restored", f"{rows} rows of {context} restored and 32 new tokens, {few} to {some} generated, "
             f"{places} places", places, RESTORED, restored),
        Load("short", f"{rows} rows of 20 to 60 tokens, {few} to {most} generated, {places} places", places, COMING,
             short(rows, few, most)),
        Load("steady", f"{n_steady} rows of {most} tokens", n_steady, EQUAL, short(n_steady, most, most)),
        *(Load(f"batch_{n}", f"{n} rows of {each} tokens", n, EQUAL, short(n, each, each))
          for n in equal),
    ]  # fmt: skip


ROUNDS = {"mixed": 1, "mixed_restored": 3, "restored": 3, "short": 3, "steady": 3}
"""Of loads whose rounds take longer than 20 s on two cores; the others have five."""
LEAST = 0.97
MOST_LONGEST, MOST_JOIN, MOST_MEMORY = 1.5, 1.3, 1.15


def measured(bench: Bench, contexts: Contexts, load: Load, rounds: int) -> Json:
    """Let the contestants take turns; ratios are taken within a round."""
    note(f"{load.name}, {rounds} rounds")
    taken = take_turns({one.name: partial(run_once, bench, contexts, load, one) for one in CONTESTANTS}, rounds)
    mlx_lm, rows = taken.values()
    bytes_of_rows = sum(job.n_tokens for job in load.jobs) * bench.model.spec.bytes_per_token
    return {
        "key": load.key,
        "name": load.name,
        "n_rows": len(load.jobs),
        "target": load.target,
        "ratio": ratios([run.seconds for run in mlx_lm], [run.seconds for run in rows]),
        "same_rows": same_tokens([*mlx_lm, *rows]),
        "mb_of_rows": round(bytes_of_rows / 1e6),
        **{
            name: {
                "s": spread([run.seconds for run in runs]),
                "steps": runs[0].steps,
                "peak_mb": spread([run.peak / 1e6 for run in runs], digits=1),
                "peak_to_rows": round(statistics.median(run.peak for run in runs) / bytes_of_rows, 3),
            }
            for name, runs in taken.items()
        },
    }


def joining(bench: Bench, *, rows: int, n_tokens: int, repeats: int) -> Json:
    """Times of steps to a quiet one, from a long row's submission to its first token."""
    bench = replace(bench, model=replace(bench.model, mode=ServingMode(Batching.ROWS))).endless()
    engine = bench.worker_engine(16, max_step_s=0.5)
    for n in range(rows):
        engine.submit(work(bench.encode(f"Count on from {n}:"), 4000))
    let_decode(engine, 4)
    found: dict[str, list[float]] = defaultdict(list)
    steps = []
    for number in range(repeats):
        for _ in range(2):
            engine.step()
        quiet = statistics.median(timed(engine.step) for _ in range(8))
        asked, entered = _restored(bench, n_tokens), 0
        begin = time.perf_counter()
        uid = engine.submit(asked)  # the decoding rows wait meanwhile
        del asked
        taken = [1000 * (time.perf_counter() - begin) + timed(engine.step)]
        while engine.progress()[uid].tokens == 0:
            entered += engine.progress()[uid].stage == "waiting"
            taken.append(timed(engine.step))
        beside = statistics.median(timed(engine.step) for _ in range(3))
        engine.cancel(uid)
        of_quiet = [ms / quiet for ms in taken]
        note(f"{n_tokens} tokens join, {number + 1} of {repeats}: {[round(x, 2) for x in of_quiet]}")
        found["quiet_ms"].append(quiet)
        found["longest"].append(max(of_quiet))
        found["join"].append(max(of_quiet[entered : entered + 2]))  # the pass of a step is waited for in the next one
        found["beside"].append(beside / quiet)
        steps.append([round(x, 3) for x in of_quiet])
    engine.close()
    return {"tokens": n_tokens, "mb": round(n_tokens * bench.model.spec.bytes_per_token / 1e6), "beside_rows": rows,
            **{name: spread(values) for name, values in found.items()}, "steps": steps}  # fmt: skip


def _restored(bench: Bench, n_tokens: int) -> GenerationWork:
    """A row with `n_tokens` restored tokens, in the memory that the loader reads them into, and a prompt of one more.
    Its contents make no difference here."""
    from stoker_worker.engine.transfer import MlxRoom

    rng = np.random.default_rng(17)
    room = MlxRoom(bench.model.spec, n_tokens + 1, 8)
    for keys, values in room.layers():
        for array in (keys, values):
            array[:, :n_tokens] = rng.standard_normal((array.shape[0], n_tokens, array.shape[2]), np.float32)
    del keys, values, array
    return work(rng.integers(1000, 9000, n_tokens + 1).tolist(), 8, SequenceCache(n_tokens, (), room=room))


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    contexts = Contexts(bench)
    found = []
    warm_up(bench, contexts)
    for load in loads(bench, quick=quick):
        found.append(measured(bench, contexts, load, 1 if quick else ROUNDS.get(load.key, 5)))
    sizes = {"rows": 2, "n_tokens": 600, "repeats": 1} if quick else {"rows": 7, "n_tokens": 8192, "repeats": 5}
    joins = {str(Batching.ROWS): joining(bench, **sizes)}
    return {"verdict": verdict(found, joins[str(Batching.ROWS)]), "loads": found, "joins": joins}


def short_form(bench: Bench, folder: Path) -> Iterator[Json]:
    """The loads that tell most."""
    contexts = Contexts(bench)
    warm_up(bench, contexts)
    for load in loads(bench, quick=False):
        if load.key in {"mixed_restored", "short"}:
            found = measured(bench, contexts, load, 3)
            yield {
                "what": f"rows / mlx-lm's rectangle, in speed: {load.name}", "ratio": found["ratio"],
                "asked": f"at least {load.target}", "first": found["rows"]["s"], "second": found["mlx-lm"]["s"],
                "unit": "s", "equal": found["same_rows"] == found["n_rows"],
            }  # fmt: skip


def warm_up(bench: Bench, contexts: Contexts) -> None:
    job = Job((), tuple(bench.encode("One and two")), 2)
    for contestant in CONTESTANTS:
        run_once(bench, contexts, Load("warm", "warm", 2, 0, [job, job]), contestant)


def verdict(found: list[Json], join: Json) -> Json:
    by_key = {load["key"]: load for load in found}
    ratio = {key: load["ratio"]["median"] for key, load in by_key.items()}
    same_length = [value for key, value in ratio.items() if key == "steady" or key.startswith("batch_")]
    mixed = [by_key["mixed"], by_key["mixed_restored"]]
    return {
        "unequal_rows_2_5_times_as_fast": min(ratio["mixed"], ratio["mixed_restored"]) >= MIXED,
        "restored_rows_come_and_go_1_4_times_as_fast": ratio["restored"] >= RESTORED,
        "short_rows_come_and_go_1_1_times_as_fast": ratio["short"] >= COMING,
        "rows_of_similar_length_as_fast": statistics.median(same_length) >= EQUAL,
        "none_of_them_under_0_97": min(same_length) >= LEAST,
        "longest_step_at_most_1_5_quiet_ones": join["longest"]["median"] <= MOST_LONGEST,
        "a_join_takes_at_most_1_3_quiet_steps": join["join"]["median"] <= MOST_JOIN,
        "peak_memory_at_most_1_15_times_the_rows": max(load["rows"]["peak_to_rows"] for load in mixed) <= MOST_MEMORY,
        "all_tokens_equal": all(load["same_rows"] == load["n_rows"] for load in found),
    }


def render(content: Json, results: Path) -> Report:
    loads, join = content["loads"], content["joins"]["in rows"]
    join["own"] = join["longest"]["median"] / join["beside"]["median"]
    number = (
        f"with restored caches {loads[1]['ratio']['median']} times mlx-lm's speed; the longest step "
        f"{join['longest']['median']} quiet ones"
    )
    return Report("rows against one rectangle", number, {
        "summary": _summary(loads, join), "ratios": columns(loads, RATIOS),
        "memory": columns(loads, MEMORY), "joins": listed(join, ("a row joins", ""), JOINS),
    })  # fmt: skip


def _summary(loads: list[Json], join: Json) -> str:
    met = [load for load in loads if load["ratio"]["median"] >= load["target"]]
    least = min(loads, key=lambda load: load["ratio"]["median"] / load["target"])
    same = all(load["same_rows"] == load["n_rows"] for load in loads)
    return "\n".join((
        f"Rows reach the speed asked for in {len(met)} of {len(loads)} loads. The furthest from it is "
        f"{least['name']}: {short(least['ratio'])} times mlx-lm's speed (asked: {least['target']}).",
        say(join, "While {tokens} restored tokens ({mb} MB) join {beside_rows} decoding rows, the longest step takes "
            "{longest:.3g} quiet ones (asked: at most 1.5), the step in which they join {join:.3g} (asked: at most "
            "1.3)."),
        f"{'Every' if same else 'NOT every'} row has the same tokens in all runs.",
    ))  # fmt: skip


RATIOS = {
    "load": "{name}", "mlx-lm, s": "{mlx-lm[s][median]:.3g}", "rows, s": "{rows[s][median]:.3g}",
    "rows / mlx-lm, in speed": "{ratio:.3g}", "rounds": "{ratio[n]}", "asked": "{target}",
    "steps: mlx-lm, rows": "{mlx-lm[steps]}, {rows[steps]}", "same rows": "{same_rows} of {n_rows}",
}  # fmt: skip
MEMORY = {
    "load": "{name}", "all rows, MB": "{mb_of_rows}", "peak, MB: mlx-lm": "{mlx-lm[peak_mb][median]:.0f}",
    "peak, MB: rows": "{rows[peak_mb][median]:.0f}", "of all rows: mlx-lm": "{mlx-lm[peak_to_rows]}",
    "of all rows: rows": "{rows[peak_to_rows]}",
}  # fmt: skip


JOINS = {
    "quiet step, ms": "{quiet_ms:.3g}",
    "longest step until its first token, in quiet ones": "{longest:.3g}",
    "the step in which it joins": "{join:.3g}",
    "a step once it decodes": "{beside:.3g}",
    "the longest, in steps once it decodes (of the medians)": "{own:.3g}",
}


if __name__ == "__main__":
    main(__doc__ or "", "017", run, render)

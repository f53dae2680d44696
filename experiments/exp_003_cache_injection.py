"""EXP-003, cache injection: does a restored cache, injected into a new batch, give exactly the uncached output?

Every prompt is asked, its cache saved, and the store closed and opened again. Then the same prompt is asked once more,
and the conversation is continued, both from the restored cache in one continuous batch of eight. Each of the three
outputs is compared, token for token, with mlx-lm's own single, uncached run. Run: ``python experiments/exp_003_*.py``.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import Bench, main
from common import Json, difference, in_turn, note, spread
from prompts import DELTAS, other_prompts, seed_prompts, text_of
from report import Report, columns, say
from works import finished

from stoker_worker.memory.store import AgentCacheStore


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    prompts = seed_prompts() | other_prompts(bench.encode)
    if quick:
        prompts = {name: prompts[name] for name in ("seed 1", "Python 243")}
    rows = exactness(bench, folder / "exactness", prompts, max_tokens=4 if quick else 12)
    lengths = (16, 64) if quick else (64, 256, 1024)
    timing = loading_times(bench, folder / "timing", lengths, rounds=1 if quick else 5)
    verdict = {
        "first_run_equals_reference": all(row["first_differs_at"] is None for row in rows),
        "same_prompt_from_cache_equals_reference": all(row["again_differs_at"] is None for row in rows),
        "continued_from_cache_equals_reference": all(row["continued_differs_at"] is None for row in rows),
        "everything_saved_was_restored": all(row["again_ok"] and row["continued_ok"] for row in rows),
        "loading_under_500_ms": all(row["loading_ms"]["max"] < LOADING_LIMIT_MS for row in timing),
    }
    return {"verdict": verdict, "rows": rows, "timing": timing}


def short_form(bench: Bench, folder: Path) -> Iterator[Json]:
    """Seven prompts, three runs each."""
    for row in exactness(bench, folder, seed_prompts(), max_tokens=12):
        runs = ("first", "again", "continued")
        yield {"what": f"{row['name']}: without a cache, from its cache, and continued from it",
               "equal": all(row[f"{run}_ok"] and row[f"{run}_differs_at"] is None for run in runs)}  # fmt: skip


def exactness(bench: Bench, folder: Path, prompts: dict[str, str], max_tokens: int) -> list[Json]:
    """Three runs of each prompt through the product, each against its reference."""
    asked = [{"agent_id": name, "prompt": text, "max_tokens": max_tokens} for name, text in prompts.items()]
    note(f"{len(prompts)} prompts, three runs each")
    store = AgentCacheStore(folder)
    first = bench.serve(store, asked)
    store.close()
    store = AgentCacheStore(folder)
    again = bench.serve(store, [{**fields, "cache": "read"} for fields in asked])
    deltas = [{"prompt": DELTAS[n % len(DELTAS)], "context": "append"} for n in range(len(asked))]
    continued = bench.serve(store, [{**fields, **delta} for fields, delta in zip(asked, deltas, strict=True)])
    store.close()
    rows = []
    note("references")
    for prompt in prompts:
        row: Json = {"name": prompt}
        for name, runs in (("first", first), ("again", again), ("continued", continued)):
            turn, completion = runs[prompt]
            there = {"first": 0, "again": len(turn.prompt.ids) - 1}.get(name, row.get("saved"))
            row |= {f"{name}_prompt": len(turn.prompt.ids), f"{name}_cached": turn.cached}
            row[f"{name}_ok"] = turn.cached == there and turn.restored.miss_reason is None
            wanted = bench.uncached(turn.prompt.ids, max_tokens)
            row[f"{name}_differs_at"] = difference(completion.generated_ids, wanted)
            row[f"{name}_generated"] = len(completion.generated_ids)
            if name == "first":
                row |= {"saved": len(turn.prompt.ids) + completion.kept, "ended_by": completion.ended_by}
        rows.append(row)
    return rows


def loading_times(bench: Bench, folder: Path, lengths: Sequence[int], rounds: int) -> list[Json]:
    """Time to the first token of one prompt: without a cache, and from the store."""
    from stoker_worker.engine.transfer import prefix_to_caches

    store, engine, rows = AgentCacheStore(folder), bench.engine(), []
    for n in lengths:
        note(f"loading times of {n} tokens")
        fields = {"agent_id": f"{n}", "prompt": text_of(bench.encode, "English", n), "max_tokens": 1}
        bench.serve(store, [fields])
        samples: dict[str, list[float]] = {}
        tokens = set()
        for _, how in in_turn(("cold", "warm"), rounds):
            start = time.perf_counter()
            turn = bench.prepare(store, {**fields, "cache": "off" if how == "cold" else "read"})
            restored = time.perf_counter()
            if turn.work.prefix is not None:
                prefix_to_caches(bench.network, turn.work.prefix, bench.model.spec)
                samples.setdefault("loading_ms", []).append(1000 * (time.perf_counter() - start))
            engine.submit(turn.work)
            (completion,) = finished(engine)
            tokens.add(completion.generated_ids)
            samples.setdefault(f"{how}_first_token_s", []).append(completion.timing.prefill_s + restored - start)
        assert len(tokens) == 1, f"first tokens differ: {tokens}"
        row: Json = {name: spread(values) for name, values in samples.items()}
        row |= {"prompt_tokens": n, "mb": round((n - 1) * bench.model.spec.bytes_per_token / 1e6, 1)}
        row["speedup"] = round(row["cold_first_token_s"]["median"] / row["warm_first_token_s"]["median"], 1)
        rows.append(row)
    engine.close()
    store.close()
    return rows


LOADING_LIMIT_MS = 500.0
"""The plan's limit for loading a cache; a criterion."""


def render(content: Json, results: Path) -> Report:
    rows, timing = content["rows"], content["timing"]
    number = say(timing[-1], "first token of {prompt_tokens} known tokens: {speedup} times as fast as without cache")
    runs = ("first", "again", "continued")
    shown = [{**r, **{run: "equal" if r[f"{run}_differs_at"] is None else "DIFFERS" for run in runs}} for r in rows]
    parts = {
        "summary": _summary(rows, timing),
        "exactness": columns(shown, EXACTNESS),
        "loading": columns(timing, LOADING),
    }
    return Report("cache injection", number, parts)


def _summary(rows: list[Json], timing: list[Json]) -> str:
    lengths = [r["first_prompt"] for r in rows]
    return "\n".join((
        f"{len(rows)} prompts of {min(lengths)} to {max(lengths)} tokens; "
        f"{sum(r['first_differs_at'] is None for r in rows)} first runs, "
        f"{sum(r['again_differs_at'] is None for r in rows)} repeats from the restored cache and "
        f"{sum(r['continued_differs_at'] is None for r in rows)} continuations from it "
        "gave exactly the reference's tokens.",
        f"The longest loading was {max(r['loading_ms']['max'] for r in timing):.0f} ms (limit: "
        f"{LOADING_LIMIT_MS:.0f} ms).",
    ))  # fmt: skip


EXACTNESS = {
    "prompt": "{name}", "tokens": "{first_prompt}", "generated": "{first_generated}", "ended by": "{ended_by}",
    "first run": "{first}", "cached": "{again_cached}", "same prompt again": "{again}",
    "cached, continued": "{continued_cached} of {continued_prompt}", "continued": "{continued}",
}  # fmt: skip
LOADING = {
    "tokens": "{prompt_tokens}", "MB": "{mb}", "loading, ms": "{loading_ms:.3g}",
    "cold, s": "{cold_first_token_s:.3g}", "from cache, s": "{warm_first_token_s:.3g}", "ratio": "{speedup}x",
}  # fmt: skip


if __name__ == "__main__":
    main(__doc__ or "", "003", run, render)

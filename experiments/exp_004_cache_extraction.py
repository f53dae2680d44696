"""EXP-004, per-sequence cache extraction: is each sequence's cache handed over when it ends, and is it right?

In batches of unequal sequences, each cache is handed over in the step in which its sequence ends, and saved while the
others continue. Then the store is closed and opened again, and all sequences are continued in a new batch from their
restored caches. Every output is compared, token for token, with mlx-lm's own single, uncached run. Run: ``python
experiments/exp_004_*.py``.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import seed_claims
from bench import Bench, Prepared, main
from common import Json, difference, note
from exp_004_report import render
from hand_over_bench import busy_batch, hand_over_costs
from prompts import DELTAS, text_of

from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import CacheSlice, CompletedGeneration

CHAT = "chat, ended by EOS"


def batches(bench: Bench) -> dict[str, list[Json]]:
    """The sequences of each batch, as fields of a request; `max_tokens` makes them end at different steps."""
    report = ("The capital of France is", 10), ("Machine learning is", 7), ("Python programming language", 13)
    plan = ("Hello world", 9), ("The quick brown fox", 14), ("Once upon a time", 6)
    texts = (("English", 5, 22), ("French", 16, 5), ("Python", 243, 12), ("German", 245, 4), ("English", 500, 12),
             ("Python", 600, 8))  # fmt: skip
    capital = bench.model.tokenizer.decode(bench.uncached(bench.encode(report[0][0]), 24))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    return {
        "seed report": [{"agent_id": text, "prompt": text, "max_tokens": n} for text, n in report],
        "seed plan": [{"agent_id": text, "prompt": text, "max_tokens": n} for text, n in plan],
        "eight": [
            {"agent_id": CHAT, "messages": question, "max_tokens": 40},
            {"agent_id": "stop string", "prompt": report[0][0], "max_tokens": 24, "stop": [capital[9:14]]},
            *(
                {"agent_id": f"{kind} {n}", "prompt": text_of(bench.encode, kind, n), "max_tokens": m}
                for kind, n, m in texts
            ),
        ],
    }


def one_batch(bench: Bench, folder: Path, asked: Sequence[Json]) -> list[Json]:
    """Run a batch and continue every sequence after reopening the store; one line for each, in order of ending."""
    note(f"a batch of {len(asked)}")
    store, engine = AgentCacheStore(folder), bench.engine()
    running = {engine.submit(turn.work): turn for turn in [bench.prepare(store, fields) for fields in asked]}
    first_step: dict[int, int] = {}
    rows: dict[str, Json] = {}
    handed: list[tuple[Prepared, CompletedGeneration, str]] = []
    step = 0
    while engine.in_flight:
        before, step = engine.progress(), step + 1
        completions = engine.step()
        after = engine.progress()
        decoding = [uid for uid in after if before[uid].tokens]
        for uid in [uid for uid, row in after.items() if row.tokens] + [completion.uid for completion in completions]:
            first_step.setdefault(uid, step)
        for completion in completions:
            turn, cache = running[completion.uid], completion.cache
            assert cache is not None
            handed.append((turn, completion, _digest(cache)))
            rows[turn.request.agent_id] = {
                "name": turn.request.agent_id,
                "prompt_tokens": len(turn.prompt.ids),
                "generated": len(completion.generated_ids),
                "ended_by": completion.ended_by,
                "first_step": first_step[completion.uid],
                "end_step": step,
                "a_token_in_every_step": step - first_step[completion.uid] + 1 == len(completion.generated_ids),
                "rows_going_on": len(after),
                "others_advanced": all(after[uid].tokens == before[uid].tokens + 1 for uid in decoding),
                "cache_tokens": cache.stop,
                "cache_tokens_right": cache.start == 0 and cache.stop == len(turn.prompt.ids) + completion.kept,
                "saved_ms": round(1000 * bench.save(store, turn, completion), 1),
            }
    engine.close()
    for turn, completion, digest in handed:
        row = rows[turn.request.agent_id]
        row["unchanged_at_the_end"] = _digest(completion.cache) == digest
        wanted = bench.uncached(turn.prompt.ids, turn.request.max_tokens)
        wanted = wanted[: row["generated"]] if completion.ended_by == "stop" else wanted
        row["differs_at"] = difference(completion.generated_ids, wanted)
    store.close()
    store = AgentCacheStore(folder)
    for name, (turn, completion) in bench.serve(
        store, [_continued(fields, n) for n, fields in enumerate(asked)]
    ).items():
        wanted = bench.uncached(turn.prompt.ids, turn.request.max_tokens)
        rows[name] |= {
            "continued_prompt": len(turn.prompt.ids),
            "continued_cached": turn.cached,
            "continued_ok": turn.cached == rows[name]["cache_tokens"] and turn.restored.miss_reason is None,
            "continued_differs_at": difference(completion.generated_ids, wanted),
        }
    store.close()
    return list(rows.values())


def _continued(fields: Json, n: int) -> Json:
    asked = {"agent_id": fields["agent_id"], "context": "append", "max_tokens": 8}
    if "messages" in fields:
        return {**asked, "messages": [{"role": "user", "content": "And of Italy?"}]}
    return {**asked, "prompt": DELTAS[n % len(DELTAS)]}


def _digest(cache: CacheSlice | None) -> str:
    digest = hashlib.blake2b()
    for pair in cache.layers if cache else ():
        for array in pair:
            digest.update(array.tobytes())
    return digest.hexdigest()


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    chosen = {name: asked for name, asked in batches(bench).items() if not quick or name == "seed report"}
    found = {name: one_batch(bench, folder / name, asked) for name, asked in chosen.items()}
    of_costs: tuple[Sequence[int], int, int] = ((32,), 1, 3) if quick else ((100, 300, 600, 1100), 2, 8)
    costs = hand_over_costs(bench, folder / "costs", *of_costs)
    busy = busy_batch(bench, folder / "busy", *((32, 6, 8) if quick else (1000, 24, 64)))
    rows = [row for batch in found.values() for row in batch]
    verdict = {
        "every_row_equals_its_solo_run": all(row["differs_at"] is None for row in rows),
        "cache_handed_over_in_the_step_the_row_ends": all(
            r["a_token_in_every_step"] and r["cache_tokens_right"] for r in rows
        ),
        "rows_end_at_different_steps": all(len({r["end_step"] for r in batch}) > 1 for batch in found.values()),
        "others_go_on_undisturbed": all(row["others_advanced"] for row in rows),
        "handed_over_bytes_never_change": all(row["unchanged_at_the_end"] for row in rows),
        "all_restored_after_reopening": all(row["continued_ok"] for row in rows),
        "continued_equals_uncached": all(row["continued_differs_at"] is None for row in rows),
        "handing_over_under_5_percent_of_decode_time": busy["share"] < 0.05,
    }
    claims = seed_claims.check(bench)
    return {"verdict": verdict, "batches": found, "costs": costs, "busy": busy, "seed_claims": claims}


if __name__ == "__main__":
    main(__doc__ or "", "004", run, render)

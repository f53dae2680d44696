"""EXP-004, per-sequence cache extraction: is each sequence's cache handed over when it ends, and is it right?

In batches of unequal sequences, each cache is handed over in the step in which its sequence ends, and saved while the
others continue. Then the store is closed and opened again, and all sequences are continued in a new batch from their
restored caches. Every output is compared, token for token, with mlx-lm's own single, uncached run. Run: ``python
experiments/exp_004_*.py``.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench import MAX_BATCH, Bench, Prepared, main
from common import Json, difference, note
from prompts import DELTAS, text_of
from report import Report, columns, say

from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import CompletedGeneration, SequenceCache


def timing(times: list[tuple[float, float]]) -> Callable[..., SequenceCache]:
    """`slice_caches`, recording the seconds it waited for the model's stream, and the seconds it then took."""
    import mlx.core as mx
    from mlx_lm.generate import generation_stream

    from stoker_worker.engine.transfer import slice_caches  # before it is replaced

    def timed(*piece_of: Any) -> SequenceCache:
        begin = time.perf_counter()
        mx.synchronize(generation_stream)
        waited = time.perf_counter()
        piece = slice_caches(*piece_of)
        times.append((waited - begin, time.perf_counter() - waited))
        return piece

    return timed


def busy_batch(bench: Bench, folder: Path, history: int, turns: int, answer: int) -> Json:
    """Second turns of agents with `history` tokens, eight in the batch for as long as there are more: the share of the
    hand-over in the time in which all sequences decode."""
    from stoker_worker.engine import transfer

    note(f"a busy batch: {turns} turns")
    store, engine = AgentCacheStore(folder), bench.engine()
    fields = {"agent_id": "a", "prompt": text_of(bench.encode, "English", history)}
    bench.serve(store, [{**fields, "max_tokens": 1}])
    waiting = [
        bench.prepare(store, {**fields, "max_tokens": answer * 3 // 4 + turn * answer // 2 // turns})
        for turn in range(turns)
    ]
    times: list[tuple[float, float]] = []
    decoding, tokens, in_flight = 0.0, 0, 0
    with patch.object(transfer, "slice_caches", timing(times)):
        while waiting or engine.in_flight:
            while waiting and engine.in_flight < MAX_BATCH:
                engine.submit(waiting.pop(0).work)
            ready = set(engine.progress())
            begin, n_handed = time.perf_counter(), len(times)
            completions = engine.step()
            seconds = time.perf_counter() - begin
            tokens += sum(len(completion.generated_ids) for completion in completions)
            started = {uid for uid, row in engine.progress().items() if row.tokens} | {x.uid for x in completions}
            if ready <= started:  # every sequence had its token: none was joining
                decoding += seconds - sum(copy for _, copy in times[n_handed:])
                in_flight = max(in_flight, len(ready))
    engine.close()
    store.close()
    copied, waited = (1000 * sum(part) for part in zip(*((copy, wait) for wait, copy in times), strict=True))
    return {"history": history, "turns": turns, "in_the_batch": in_flight, "tokens": tokens,
            "decode_ms": round(1000 * decoding), "copy_ms": round(copied, 1), "wait_ms": round(waited, 1),
            "share": round(copied / (1000 * decoding), 4)}  # fmt: skip


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
                "cache_tokens": cache.n_tokens,
                "cache_tokens_right": cache.n_tokens == len(turn.prompt.ids) + completion.kept,
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
    again = [_continued(fields, n) for n, fields in enumerate(asked)]
    for name, (turn, completion) in bench.serve(store, again).items():
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


def _digest(cache: SequenceCache | None) -> str:
    digest = hashlib.blake2b()
    for pair in cache.layers if cache else ():
        for array in pair:
            digest.update(array.tobytes())
    return digest.hexdigest()


MOST_SHARE = 0.05
CRITERIA: dict[str, Callable[[Json], bool]] = {
    "every_row_equals_its_solo_run": lambda row: row["differs_at"] is None,
    "cache_handed_over_in_the_step_the_row_ends": lambda row: (
        row["a_token_in_every_step"] and row["cache_tokens_right"]
    ),
    "others_go_on_undisturbed": lambda row: row["others_advanced"],
    "handed_over_bytes_never_change": lambda row: row["unchanged_at_the_end"],
    "all_restored_after_reopening": lambda row: row["continued_ok"],
    "continued_equals_uncached": lambda row: row["continued_differs_at"] is None,
}
"""Of each sequence."""


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    chosen = {name: asked for name, asked in batches(bench).items() if not quick or name == "seed report"}
    found = {name: one_batch(bench, folder / name, asked) for name, asked in chosen.items()}
    busy = busy_batch(bench, folder / "busy", *((32, 6, 8) if quick else (1000, 24, 64)))
    rows = [row for batch in found.values() for row in batch]
    verdict = {
        **{name: all(map(holds, rows)) for name, holds in CRITERIA.items()},
        "rows_end_at_different_steps": all(len({r["end_step"] for r in batch}) > 1 for batch in found.values()),
        "handing_over_under_5_percent_of_decode_time": busy["share"] < MOST_SHARE,
    }
    return {"verdict": verdict, "batches": found, "busy": busy}


def short_form(bench: Bench, folder: Path) -> Iterator[Json]:
    """A batch of three, and one that is kept full."""
    rows = one_batch(bench, folder / "batch", batches(bench)["seed report"])
    yield {"what": "three sequences, each handed over at its end and continued after the store was opened again",
           "equal": all(holds(row) for holds in CRITERIA.values() for row in rows)}  # fmt: skip
    busy = busy_batch(bench, folder / "busy", 256, 16, 16)
    yield {"what": "handing over / decoding in a batch that is kept full, in time", "found": f"{busy['share']:.2%}",
           "asked": f"under {MOST_SHARE:.0%}"}  # fmt: skip


def render(content: Json, results: Path) -> Report:
    batches, busy = content["batches"], content["busy"]
    rows = [
        {**r, "batch": name, "as_alone": r["differs_at"] is None, "as_uncached": r["continued_differs_at"] is None}
        for name, batch in batches.items() for r in batch
    ]  # fmt: skip
    number = f"handing over takes {100 * busy['share']:.2g} % of a busy batch's decoding"
    parts = {"summary": _summary(rows, len(batches), busy), "rows": columns(rows, ROWS)}
    return Report("per-sequence cache extraction", number, parts)


def _summary(rows: list[Json], n_batches: int, busy: Json) -> str:
    equal, continued = (sum(row[key] for row in rows) for key in ("as_alone", "as_uncached"))
    return "\n".join((
        f"{len(rows)} sequences in {n_batches} batches: {equal} gave exactly the tokens they give alone, "
        f"{sum(r['rows_going_on'] > 0 for r in rows)} were handed over and saved while others continued, "
        f"{sum(r['continued_ok'] for r in rows)} were complete in the reopened store, and {continued} continued "
        "exactly like an uncached run.",
        say(busy | {"each": busy["tokens"] // busy["turns"], "decode_s": busy["decode_ms"] / 1000},
            "In a batch of {in_the_batch} that was kept full, {turns} turns of agents with {history} tokens, {each} "
            "tokens each: handing over took {copy_ms:.0f} ms beside {decode_s:.3g} s of decoding, {share:.2%} of it."),
    ))  # fmt: skip


ROWS = {
    "batch": "{batch}", "sequence": "{name}", "prompt": "{prompt_tokens}", "tokens": "{generated}",
    "ended by": "{ended_by}", "steps": "{first_step} to {end_step}", "still running": "{rows_going_on}",
    "save, ms": "{saved_ms}", "equals solo run": "{as_alone}",
    "cached after reopening": "{continued_cached} of {continued_prompt}", "continued equals uncached": "{as_uncached}",
}  # fmt: skip


if __name__ == "__main__":
    main(__doc__ or "", "004", run, render)

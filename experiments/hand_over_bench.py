"""The cost of handing over a sequence's cache, by length, and in a batch that is kept full. For EXP-004.

MLX is imported after the BLAS library is loaded.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench import MAX_BATCH, Bench
from common import Json, in_turn, note, spread
from prompts import text_of

from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import CompletedGeneration, GenerationWork, SequenceCache


def hand_over_costs(bench: Bench, folder: Path, lengths: Sequence[int], rounds: int, rows: int) -> list[Json]:
    """`rows` sequences of one length, all from cache; each ends at a different step. Lengths take turns.

    The model's forward pass of the next step is running when a sequence is handed over. The next step would spend the
    measured `wait` anyway; `copy` is the cost of the hand-over: mlx-lm's lazy copy of the sequence, and the cut.
    """
    store = AgentCacheStore(folder)
    asked = {n: {"agent_id": f"{n}", "prompt": text_of(bench.encode, "English", n), "max_tokens": 1} for n in lengths}
    bench.serve(store, list(asked.values()))
    samples: dict[int, dict[str, list[float]]] = {n: defaultdict(list) for n in lengths}
    for number, n in in_turn(lengths, rounds):
        note(f"cost of handing over {n} tokens, round {number + 1} of {rounds}")
        turns = [bench.prepare(store, {**asked[n], "max_tokens": 3 + 2 * row}) for row in range(rows)]
        ended = _hand_over(bench, [turn.work for turn in turns], samples[n])
        for completion in ended[::3]:
            # A new agent with its own salt: none of its blocks is in the store, so all are written.
            name = f"{n} {number} {completion.uid}"
            fresh = bench.prepare(store, {**asked[n], "agent_id": name, "cache_salt": name})
            samples[n]["save_ms"].append(1000 * bench.save(store, fresh, completion))
    store.close()
    return [{"tokens": n, "kind": "whole", **{k: spread(v) for k, v in s.items()}} for n, s in samples.items()]


def _hand_over(
    bench: Bench, works: Sequence[GenerationWork], sample: dict[str, list[float]]
) -> list[CompletedGeneration]:
    """One batch until all have ended; the costs of each hand-over beside the step before it."""
    from stoker_worker.engine import transfer

    engine, quiet = bench.engine(), 0.0
    times: list[tuple[float, float]] = []
    ended: list[CompletedGeneration] = []
    for one in works:
        engine.submit(one)
    with patch.object(transfer, "slice_caches", timing(times)):
        while engine.in_flight:
            begin = time.perf_counter()
            completions = engine.step()
            seconds = time.perf_counter() - begin
            for completion, (wait, copy) in zip(completions, times, strict=True):
                sample["copy_ms"].append(1000 * copy)
                sample["wait_ms"].append(1000 * wait)
                sample["quiet_step_ms"].append(1000 * quiet)
                sample["share_of_step"].append(copy / quiet)
                sample["mb"].append(_bytes(completion.cache) / 1e6)
            ended += completions
            times.clear()
            quiet = seconds
    engine.close()
    return ended


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


def _bytes(cache: SequenceCache | None) -> int:
    return sum(array.nbytes for pair in cache.layers for array in pair) if cache else 0

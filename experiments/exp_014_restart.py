"""EXP-014: does a restart cost agents time, and does restoring a long memory slow other sequences?

A: eight agents take turn after turn, through Redis and a worker process. Before some turns the worker is stopped or
killed, and started again: it reads its agents' caches into RAM while its model loads. Before the others it keeps
running.
B: sequences decode while another agent's 32 blocks are read and verified, for a restore or ahead of one, and join.
"""

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from bench import Bench, main
from common import Json, machine, note, spread
from exp_014_report import render
from prompts import text_of
from worker_process import WorkerProcess

from stoker import Producer
from stoker_shared import GenerationRequest, build_request
from stoker_worker.embedded_redis.server import EmbeddedServer
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import AgentVersion, CacheSlice, Delivery, GenerationWork, Restored, Transcript, Turn

REPORT = "EXP-014-restart.md"
AGENTS = 8
MOST_RATIO = 1.15
MOST_STEP = 2.0


# --- A: rounds, after restarts and from a worker that stays ---

RESTARTS = {"SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}
STAYS = "none"


def rounds(bench: Bench, folder: Path, *, n_tokens: int, max_tokens: int, cycles: int) -> Json:
    prompts = {f"agent {n}": text_of(bench.encode, "English", n_tokens - n) for n in range(AGENTS)}
    stored = dict.fromkeys(prompts, 0)  # tokens of each agent's transcript
    taken: dict[str, list[Json]] = {STAYS: [], **{name: [] for name in RESTARTS}}
    order = list(taken)
    starts: list[float] = []
    loads: list[float] = []
    with EmbeddedServer(folder / "redis") as server, Producer(server.url) as producer:
        options = [*_OPTIONS, "--redis", server.url, "--store", str(folder / "store"), "--model", bench.source]
        worker = WorkerProcess([sys.executable, "-m", "stoker_worker", "run", *options], folder)
        note(f"{AGENTS} agents of {n_tokens} tokens, the first turn")
        _turn(producer, prompts, max_tokens, stored)
        for n in range(cycles + 1):  # the first of each is a warm-up
            for kind in order if n % 2 else reversed(order):
                note(f"round {n + 1} of {cycles + 1}: before it {kind}")
                if kind != STAYS:
                    starts.append(worker.restart(RESTARTS[kind]))
                taken[kind].append(_turn(producer, dict.fromkeys(prompts, f" And then, {n}:"), max_tokens, stored))
                loads.append(os.getloadavg()[0])
        worker.stop(signal.SIGTERM)
    kept = {kind: ones[1:] for kind, ones in taken.items()}
    seconds = {kind: [one["s"] for one in ones] for kind, ones in kept.items()}
    sources = {kind: Counter(source for one in ones for source in one["sources"]) for kind, ones in kept.items()}
    return {
        "agents": AGENTS,
        "tokens_at_first": n_tokens,
        "tokens_at_last": max(stored.values()),
        "max_tokens": max_tokens,
        "round_s": {kind: spread(found) for kind, found in seconds.items()},
        "ratio": {  # of each round to the one of the same cycle whose worker stayed
            kind: spread([a / b for a, b in zip(seconds[kind], seconds[STAYS], strict=True)], digits=2)
            for kind in RESTARTS
        },
        "start_s": spread(starts),
        "load_average": spread(loads, digits=1),
        "sources": {kind: dict(found) for kind, found in sources.items()},
        "stored_tokens_prefilled_again": max(one["again"] for ones in taken.values() for one in ones),
    }


_OPTIONS = ["--max-batch", str(AGENTS), "--dtype", "float32"]


def _turn(producer: Producer, prompts: dict[str, str], max_tokens: int, stored: dict[str, int]) -> Json:
    """One turn of every agent; `s` is from the first submission to the last result."""
    begin = time.perf_counter()
    tickets = [
        producer.submit(agent_id=name, prompt=text, context="append", max_tokens=max_tokens, stop=["<|im_end|>"])
        for name, text in prompts.items()
    ]
    results = [ticket.result(timeout_s=900) for ticket in tickets]
    seconds = time.perf_counter() - begin
    again = [stored[result.agent_id] - result.usage.cached_tokens for result in results]
    for result in results:
        stored[result.agent_id] = result.usage.prompt_tokens + result.usage.completion_tokens
    return {"s": seconds, "sources": [result.cache.source for result in results], "again": max(again)}


# --- B: steps of decoding sequences while a long memory is restored ---


def steps(bench: Bench, folder: Path, *, blocks: int, rows: int, repeats: int) -> Json:
    """Seconds from step to step, by the work beside them."""
    from stoker_worker.engine.assembly import assemble  # imports MLX
    from stoker_worker.engine.prefix_room import MlxRoom

    model = replace(bench.model, make_room=partial(MlxRoom, bench.model.spec))
    taken: dict[str, list[float]] = {"quiet": [], "reading": [], "reading ahead": [], "joining": []}
    reads: list[float] = []
    with closing(AgentCacheStore(folder, memory_max_bytes=2 << 30)) as store:
        prompt, agent = _save_long_agent(bench, store, blocks)
        tokens = 1024 if bench.on_gpu else 256
        engine = assemble(
            bench.network, bench.model, max_bytes=8 << 30, max_batch=16, prefill_tokens=tokens, max_step_s=0.5
        )
        for n in range(rows):
            engine.submit(_work(tuple(bench.encode(f"Count on from {n}:")), 4000, save=False))
        for _ in range(30):
            engine.step()
        for n in range(repeats):
            note(f"restore {n + 1} of {repeats}")
            taken["quiet"] += [_timed(engine.step) for _ in range(12)]
            store.ram_cache.drop("long")
            reader = _Reader(
                lambda: store.restore(prompt, agent=agent, model=model, salt=None, max_tokens=4, beside_others=True)
            )
            while reader.is_alive():
                taken["reading"].append(_timed(engine.step))
            assert reader.restored is not None
            assert reader.restored.prefix is not None
            reads.append(reader.seconds)
            work = GenerationWork(_request(4), prompt, reader.restored.prefix, None)
            reader.restored = None
            uid = engine.submit(work)
            del work
            while True:
                taken["joining"].append(_timed(engine.step))
                if engine.progress()[uid].tokens > 0:
                    break
            engine.cancel(uid)
            for _ in range(3):
                engine.step()
            store.ram_cache.drop("long")
            store.read_ahead(["long"])
            while "long" not in store.ram_cache:
                taken["reading ahead"].append(_timed(engine.step))
            store.read_ahead([])
        engine.close()
    quiet = float(np.median(taken["quiet"]))
    return {
        "blocks": blocks,
        "mb": round(256 * blocks * bench.model.spec.bytes_per_token / 1e6),
        "rows": rows,
        "read_s": spread(reads),
        "step_ms": {name: spread([1000 * s for s in found], digits=1) for name, found in taken.items() if found},
        "longest_over_quiet": {name: round(max(found) / quiet, 2) for name, found in taken.items() if found},
        "p95_over_quiet": {
            name: round(float(np.quantile(found, 0.95)) / quiet, 2) for name, found in taken.items() if found
        },
    }


class _Reader(threading.Thread):
    """Restores on another thread, as the loader does."""

    def __init__(self, restore: Callable[[], Restored]) -> None:
        super().__init__()
        self._restore = restore
        self.restored: Restored | None = None
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        begin = time.perf_counter()
        self.restored = self._restore()
        self.seconds = time.perf_counter() - begin


def _save_long_agent(bench: Bench, store: AgentCacheStore, blocks: int) -> tuple[tuple[int, ...], AgentVersion]:
    """An agent with `blocks` full blocks of random cache: its contents make no difference here."""
    rng, n_tokens = np.random.default_rng(1), 256 * blocks
    ids = tuple(int(x) for x in rng.integers(1000, 9000, n_tokens))
    layers = tuple(
        (rng.standard_normal((x.n_kv_heads, n_tokens, x.key_dim), np.float32),
         rng.standard_normal((x.n_kv_heads, n_tokens, x.value_dim), np.float32))
        for x in bench.model.spec.full_layers
    )  # fmt: skip
    transcript = Transcript(ids, bench.model.tokenizer_fingerprint, None, "", "length")
    cache = CacheSlice(0, n_tokens, layers)
    store.save(Turn(store.open_agent("long"), Delivery("j", "0"), transcript, bench.model, None, cache, {"version": 1}))
    return (*ids, 5), store.open_agent("long")


def _work(ids: tuple[int, ...], max_tokens: int, *, save: bool) -> GenerationWork:
    return GenerationWork(_request(max_tokens), ids, None, 0 if save else None)


def _request(max_tokens: int) -> GenerationRequest:
    return build_request({"agent_id": "x", "prompt": "x", "max_tokens": max_tokens})


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    if quick:
        step = steps(bench, folder / "steps", blocks=2, rows=2, repeats=1)
        found = rounds(bench, folder, n_tokens=120, max_tokens=4, cycles=1)
    else:
        step = steps(bench, folder / "steps", blocks=32, rows=7, repeats=8)
        found = rounds(bench, folder, n_tokens=1000, max_tokens=32, cycles=6)
    checks = {
        "a_round_after_a_restart_takes_at_most_1.15_times_one_from_ram": max(
            x["median"] for x in found["ratio"].values()
        )
        <= MOST_RATIO,
        "no_stored_token_is_prefilled_again_but_the_last": found["stored_tokens_prefilled_again"] <= 1,
        "no_step_takes_twice_its_time_while_a_memory_is_read": step["longest_over_quiet"]["reading"] <= MOST_STEP,
    }
    verdict = {"passed": all(checks.values()), **checks}
    return {"machine": machine(bench.facts), "verdict": verdict, "rounds": found, "steps": step}


if __name__ == "__main__":
    main(__doc__ or "", "014", REPORT, run, render)

"""EXP-014: does a restart cost agents time, and does restoring a long memory slow other sequences?

A: eight agents take turn after turn, through Redis and a worker process. Before some turns the worker is stopped or
killed, and started again: it reads its agents' caches into RAM while its model loads. Before the others it keeps
running.
B: sequences decode while another agent's 32 blocks are read and verified, for a restore or ahead of one.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
from bench import Bench, main
from common import Json, in_turn, note, ratios, spread, timed
from prompts import text_of
from report import Report, columns, say, span
from synthetic_cache import Contents, random_tokens, save_turn
from worker_process import WorkerProcess
from works import work

from stoker import Producer
from stoker_worker.embedded_redis import EmbeddedServer
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import Restored, SequenceCache
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

AGENTS = 8
MOST_RATIO = 1.15
MOST_STEP = 2.0


RESTARTS = {"SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}
STAYS = "none"


def rounds(bench: Bench, folder: Path, *, n_tokens: int, max_tokens: int, cycles: int) -> Json:
    prompts = {f"agent {n}": text_of(bench.encode, "English", n_tokens - n) for n in range(AGENTS)}
    stored = dict.fromkeys(prompts, 0)  # tokens of each agent's transcript
    taken: dict[str, list[Json]] = {STAYS: [], **{name: [] for name in RESTARTS}}
    starts, loads = [], []
    options = ("--max-batch", str(AGENTS), "--dtype", bench.dtype, "--model", bench.source)
    with (
        EmbeddedServer(folder / "redis") as server,
        Producer(server.url) as producer,
        WorkerProcess(server.url, folder / "store", *options) as worker,
    ):
        note(f"{AGENTS} agents of {n_tokens} tokens, the first turn")
        again = [_turn(producer, prompts, max_tokens, stored)["again"]]
        for number, kind in in_turn(list(taken), cycles, warm_up=1):
            note(f"round {number + 1} of {cycles}: before it {kind}")
            if kind != STAYS:
                starts.append(worker.restart(RESTARTS[kind]))
            found = _turn(producer, dict.fromkeys(prompts, f" And then, {number}:"), max_tokens, stored)
            again.append(found["again"])
            loads.append(os.getloadavg()[0])
            if number >= 0:
                taken[kind].append(found)
    seconds = {kind: [one["s"] for one in ones] for kind, ones in taken.items()}
    sources = {kind: Counter(source for one in ones for source in one["sources"]) for kind, ones in taken.items()}
    return {
        "agents": AGENTS,
        "tokens_at_first": n_tokens,
        "tokens_at_last": max(stored.values()),
        "max_tokens": max_tokens,
        "round_s": {kind: spread(found) for kind, found in seconds.items()},
        "ratio": {kind: ratios(seconds[kind], seconds[STAYS], digits=2) for kind in RESTARTS},
        "start_s": spread(starts),
        "load_average": spread(loads, digits=1),
        "sources": {kind: dict(found) for kind, found in sources.items()},
        "stored_tokens_prefilled_again": max(again),
    }


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


def steps(bench: Bench, folder: Path, *, blocks: int, rows: int, repeats: int) -> Json:
    """Milliseconds from step to step, by the work beside them."""
    taken: dict[str, list[float]] = {"quiet": [], "reading": [], "reading ahead": []}
    reads: list[float] = []
    ids, n_tokens = random_tokens(BLOCK_TOKENS * blocks), BLOCK_TOKENS * blocks
    cache = SequenceCache(n_tokens, Contents.random(bench.model.spec, n_tokens).layers)
    with closing(AgentCacheStore(folder, memory_max_bytes=2 << 30)) as store:
        agent = save_turn(store, bench.model, "long", ids, cache)
        engine, restoring = bench.worker_engine(16, max_step_s=0.5), bench.with_room()
        for n in range(rows):
            engine.submit(work(bench.encode(f"Count on from {n}:"), 4000))
        for _ in range(30):
            engine.step()
        for n in range(repeats):
            note(f"restore {n + 1} of {repeats}")
            taken["quiet"] += [timed(engine.step) for _ in range(12)]
            store.ram_cache.drop("long")
            reader = _Reader(
                lambda: store.restore(
                    (*ids, 5), agent=agent, model=restoring.model, salt=None, max_tokens=4, beside_others=True
                )
            )
            while reader.is_alive():
                taken["reading"].append(timed(engine.step))
            assert reader.restored is not None
            assert reader.restored.prefix is not None
            reads.append(reader.seconds)
            reader.restored = None
            store.ram_cache.drop("long")
            store.read_ahead(["long"])
            while "long" not in store.ram_cache:
                taken["reading ahead"].append(timed(engine.step))
            store.read_ahead([])
        engine.close()
    quiet = float(np.median(taken["quiet"]))
    seen = {name: found for name, found in taken.items() if found}
    return {
        "blocks": blocks,
        "mb": round(n_tokens * bench.model.spec.bytes_per_token / 1e6),
        "rows": rows,
        "read_s": spread(reads),
        "step_ms": {name: spread(found, digits=1) for name, found in seen.items()},
        "longest_over_quiet": {name: round(max(found) / quiet, 2) for name, found in seen.items()},
        "p95_over_quiet": {name: round(float(np.quantile(found, 0.95)) / quiet, 2) for name, found in seen.items()},
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


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    of_steps = {"blocks": 2, "rows": 2, "repeats": 1} if quick else {"blocks": 32, "rows": 7, "repeats": 5}
    n_tokens, max_tokens, cycles = (120, 4, 1) if quick else (1000, 32, 5)
    step = steps(bench, folder / "steps", **of_steps)
    found = rounds(bench, folder, n_tokens=n_tokens, max_tokens=max_tokens, cycles=cycles)
    slowest = max(ratio["median"] for ratio in found["ratio"].values())
    verdict = {
        "a_round_after_a_restart_takes_at_most_1.15_times_one_from_ram": slowest <= MOST_RATIO,
        "no_stored_token_is_prefilled_again_but_the_last": found["stored_tokens_prefilled_again"] <= 1,
        "no_step_takes_twice_its_time_while_a_memory_is_read": step["longest_over_quiet"]["reading"] <= MOST_STEP,
    }
    return {"verdict": verdict, "rounds": found, "steps": step}


def short_form(bench: Bench, folder: Path) -> Iterator[Json]:
    """Two rounds of each kind."""
    found = rounds(bench, folder, n_tokens=200, max_tokens=8, cycles=2)
    for kind, ratio in found["ratio"].items():
        yield {"what": f"a round of {AGENTS} agents after a {kind} and a restart / without one, in time",
               "ratio": ratio, "asked": f"at most {MOST_RATIO}", "first": found["round_s"][kind],
               "second": found["round_s"][STAYS], "unit": "s",
               "equal": found["stored_tokens_prefilled_again"] <= 1}  # fmt: skip


_ROUNDS = {"none": "stays", "SIGTERM": "stopped and restarted", "SIGKILL": "killed and restarted"}


def render(content: Json, results: Path) -> Report:
    found, steps = content["rounds"], content["steps"]
    kinds = {"term": found["ratio"]["SIGTERM"], "kill": found["ratio"]["SIGKILL"]}
    number = f"a round after a restart: {found['ratio']['SIGTERM']['median']} times a round without one"
    rounds = [
        {"kind": _ROUNDS[kind], "round": span(found["round_s"][kind], " s"), "ratio": found["ratio"].get(kind),
         "sources": ", ".join(f"{n} {source}" for source, n in sources.items())}
        for kind, sources in found["sources"].items()
    ]  # fmt: skip
    longest = [{"name": name, "ms": span(taken, " ms"), "n": taken["n"],
                **{part: steps[part][name] for part in ("p95_over_quiet", "longest_over_quiet")}}
               for name, taken in steps["step_ms"].items()]  # fmt: skip
    return Report("a restart, and a long memory coming back", number, {
        "summary": say({**content, **kinds}, SUMMARY),
        "rounds": columns(rounds, ROUNDS_SHOWN) + say({**found, "started": span(found["start_s"], " s")}, STARTS),
        "steps": columns(longest, STEPS),
    })  # fmt: skip


SUMMARY = (
    "A round of {rounds[agents]} agents, {rounds[tokens_at_first]} to {rounds[tokens_at_last]} tokens each, took "
    "{term[median]} times as long after a stop and a restart as without (median of {term[n]} pairs, {term[min]} to "
    "{term[max]}; target: at most 1.15), and {kill[median]} times after a `kill -9` ({kill[min]} to {kill[max]}). Of "
    "the stored tokens at most {rounds[stored_tokens_prefilled_again]} was prefilled again. While {steps[mb]} MB were "
    "read and verified ({steps[read_s][median]} s), {steps[rows]} other sequences decoded; their longest step took "
    "{steps[longest_over_quiet][reading]} times a quiet one for a restore (target: at most 2), and "
    "{steps[longest_over_quiet][reading ahead]} times for a cache that was read ahead."
)


ROUNDS_SHOWN = {
    "the worker": "{kind}", "a round: median (least to most)": "{round}",
    "times the round without a restart": "{ratio}", "sources of the caches": "{sources}",
}  # fmt: skip
STARTS = (
    "\n\nStart of the worker until it is ready: {started}. Stored tokens that were prefilled again, at most: "
    "{stored_tokens_prefilled_again}. Load average of the machine after each round: {load_average}."
)
STEPS = {
    "meanwhile": "{name}", "step, median (least to most)": "{ms}", "steps": "{n}",
    "95th percentile / quiet": "{p95_over_quiet}", "longest / quiet": "{longest_over_quiet}",
}  # fmt: skip


if __name__ == "__main__":
    main(__doc__ or "", "014", run, render)

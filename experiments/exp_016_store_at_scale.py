"""EXP-016: a store of many agents and an agent of 10,000 turns: files, memory, start, listing, jobs per second.
Scripted engine, real server; no model and no MLX."""

import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from command import server_main
from common import HERE, Json, in_turn, note, spread, take_turns, timed
from queue_bench import jobs_per_s
from redis import Redis
from report import Report, columns, listed, percent, say
from store_bench import scripted_model, sizes, submit, take_turn, wait_for
from worker_process import SCRIPTED, WorkerProcess

from stoker import Producer
from stoker_worker.memory.store import AgentCacheStore


def rate(url: str, store: Path, jobs: int) -> float:
    """Jobs per second from the first job's start to the last one's end, by a worker that ends with them."""
    with Redis.from_url(url) as connection, Producer(connection) as producer:
        connection.flushdb()
        ids = submit(producer, range(jobs))
        with WorkerProcess(url, store, *SCRIPTED, "--burst") as worker:
            worker.wait()
        return jobs_per_s(connection, ids)


def directly(folder: Path, samples_at: list[int]) -> Json:
    """One-turn agents through the store alone, in a process of its own."""
    command = [sys.executable, str(HERE / "store_bench.py"), str(folder), json.dumps(samples_at)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        samples = []
        for line in process.stdout:
            samples.append(json.loads(line))
            note(line.strip())
    if process.returncode:
        raise RuntimeError("filling the store failed")
    growth = round(samples[-1]["rss_mb"] - samples[0]["rss_mb"], 1)
    return {"samples": samples, "open_s": spread([_opening_s(folder) for _ in range(5)]), "ls_s": listing(folder),
            "rss_growth_mb": growth}  # fmt: skip


def _opening_s(folder: Path) -> float:
    begin = time.perf_counter()
    store = AgentCacheStore(folder)
    took = time.perf_counter() - begin
    store.close()
    return took


def listing(folder: Path, rounds: int = 5) -> Json:
    """Seconds of `memory ls`, the whole command."""
    command = [sys.executable, "-m", "stoker_worker", "memory", "ls", "--store", str(folder)]
    ways = {"used": command, "size": [*command, "--sort", "size"]}
    run = partial(subprocess.run, capture_output=True, check=True)
    taken = take_turns({name: partial(timed, partial(run, way)) for name, way in ways.items()}, rounds)
    return {name: spread([ms / 1000 for ms in values]) for name, values in taken.items()}


def restarts(url: str, large: Path, empty: Path, rounds: int) -> Json:
    """From the start of a worker's process to the first result, on a large store and on an empty one, in turn."""
    stores, taken = {"large": large, "empty": empty}, {"large": [], "empty": []}
    with Redis.from_url(url) as connection, Producer(connection) as producer:
        for number, name in in_turn(list(stores), rounds):
            connection.flushdb()
            submit(producer, range(10_000_000 + number, 10_000_001 + number))
            begin = time.perf_counter()
            with WorkerProcess(url, stores[name], *SCRIPTED, is_awaited=False):
                wait_for(connection, 1)
                taken[name].append(time.perf_counter() - begin)
    found = {f"{name}_s": spread(values) for name, values in taken.items()}
    return {**found, "stores_part_s": round(statistics.median(taken["large"]) - statistics.median(taken["empty"]), 3)}


def long_conversation(folder: Path, turns: int, rounds: int) -> Json:
    """Opening one agent after 10 turns and after many, and one with as long a transcript in 10 turns."""
    model, store = scripted_model(), AgentCacheStore(folder)
    prompt, points = "go on\n", []
    wanted = [n for n in (10, 100, 300, 1000, 3000) if n < turns]
    for number in range(1, turns + 1):
        take_turn(store, model, "long", prompt, with_cache=False)
        if number in (*wanted, turns):
            open_ms = opening_ms(store, "long", rounds)
            points.append({"turns": number, "tokens": len(prompt) * number, "open_ms": open_ms})
            note(f"{number} turns: {points[-1]}")
    take_turn(store, model, "as long", prompt * (turns - 9), with_cache=False)
    for _ in range(9):
        take_turn(store, model, "as long", prompt, with_cache=False)
    alike = opening_ms(store, "as long", rounds)
    store.close()
    last = points[-1]["open_ms"]["median"]
    return {
        "points": points, "ten_turns_as_long_ms": alike, "database_bytes": sizes(folder)["database_bytes"],
        "over_ten_turns_as_long": round(last / alike["median"], 2),
    }  # fmt: skip


def opening_ms(store: AgentCacheStore, name: str, rounds: int) -> Json:
    return spread([timed(partial(store.open_agent, name)) for _ in range(rounds)], digits=2)


def run(url: str, folder: Path, *, quick: bool) -> Json:
    rate_jobs, turns = (100, 300) if quick else (800, 10_000)
    samples_at = [100, 300, 1000] if quick else [3000, 20_000, 50_000]
    rounds = 1 if quick else 5
    note(f"jobs per second, {rounds} rounds")
    rates = [rate(url, folder / f"rate {number}", rate_jobs) for number in range(rounds)]
    through = {"rate_jobs": rate_jobs, "with_memory_per_s": spread(rates, digits=0)}
    direct = directly(folder / "direct", samples_at)
    restart = restarts(url, folder / "direct", folder / "empty", rounds)
    long = long_conversation(folder / "long", turns, 20)
    last = direct["samples"][-1]
    verdict = {
        "at_least_200_jobs_per_s_with_memory": through["with_memory_per_s"]["median"] >= 200,
        "memory_grows_by_at_most_50_mb": direct["rss_growth_mb"] <= 50,
        "the_store_adds_at_most_1_s_to_a_start": restart["stores_part_s"] <= 1.0,
        "ls_takes_under_1_s": max(direct["ls_s"]["used"]["median"], direct["ls_s"]["size"]["median"]) < 1.0,
        "the_usage_is_within_1_percent_of_du": abs(last["total_bytes"] / last["du_bytes"] - 1) <= 0.01,
        "ten_thousand_turns_open_within_2_times_ten_as_long": long["over_ten_turns_as_long"] <= 2.0,
    }
    return {"verdict": verdict, "worker": through, "direct": direct, "restart": restart,
            "long": long}  # fmt: skip


SUMMARY = (
    "{worker[with_memory_per_s]:.0f} jobs/s with memory, {worker[rate_jobs]} jobs in each round. {last[agents]:,} "
    "agents cost {direct[rss_growth_mb]:+.0f} MB of memory and {restart[stores_part_s]:+.2f} s of a start; {turns:,} "
    "turns open in {long[over_ten_turns_as_long]} times the time of 10 as long."
)
NUMBER = (
    "from {first[agents]:,} to {last[agents]:,} agents: {direct[rss_growth_mb]:+.0f} MB; "
    "{worker[with_memory_per_s][median]:.0f} jobs per second (asked: 200)"
)
DIRECT = {
    "agents": "{agents:,}", "after s": "{s:,.0f}", "RSS MB": "{rss_mb}", "files": "{files:,}",
    "database MB": "{database_mb:,.0f}", "du MB": "{du_mb:,.1f}", "usage over du": "{over_du}",
}  # fmt: skip
RESTART = {
    "start of the worker's process to the first result": "{large_s:.2f}",
    "the same on an empty store": "{empty_s:.2f}",
    "the difference of the medians": "{stores_part_s:+.3f}",
    "opening the store, in one process": "{open_s:.3f}",
    "`memory ls`, last used first": "{ls_s[used]:.2f}",
    "`memory ls --sort size`": "{ls_s[size]:.2f}",
}
LONG = {"turns": "{turns:,}", "tokens": "{tokens:,}", "opening, ms": "{open_ms:.2f}"}


def render(content: Json, results: Path) -> Report:
    samples, long = content["direct"]["samples"], content["long"]
    known = {**content, "first": samples[0], "last": samples[-1], "turns": long["points"][-1]["turns"]}
    sizes = [
        {**one, "database_mb": one["database_bytes"] / 1e6, "du_mb": one["du_bytes"] / 1e6,
         "over_du": percent(one["total_bytes"] / one["du_bytes"])}
        for one in samples
    ]  # fmt: skip
    alike = {**long["points"][-1], "turns": 10, "open_ms": long["ten_turns_as_long_ms"]}
    of_start = (f"with {samples[-1]['agents']:,} agents", "s")
    return Report("a store at scale", say(known, NUMBER), {
        "summary": say(known, SUMMARY),
        "direct": columns(sizes, DIRECT),
        "restart": listed({**content["direct"], **content["restart"]}, of_start, RESTART),
        "long": columns([*long["points"], alike], LONG),
    })  # fmt: skip


if __name__ == "__main__":
    server_main(__doc__ or "", "016", run, render)

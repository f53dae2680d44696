"""EXP-016: a store of 300,000 agents and an agent of 10,000 turns: files, memory, start, listing, jobs per second.
Scripted engine, real server; no model and no MLX."""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import Json, arguments, cpu_name, finish, note, os_name, spread
from exp_016_report import render
from redis import Redis
from store_bench import (
    HERE,
    environment,
    rss_mb,
    scripted_model,
    sizes,
    submit,
    take_turn,
    wait_for,
    worker,
)

from stoker import Producer
from stoker_worker.embedded_redis.server import EmbeddedServer
from stoker_worker.memory.store import AgentCacheStore

REPORT = "EXP-016-store-at-scale.md"
AT_REST_S = 3.0


def through_the_worker(url: str, folder: Path, few: int, many: int, *, rate_jobs: int, rounds: int) -> Json:
    """One-turn agents through a real worker: its rate with and without memory, files and memory at rest."""
    pairs: list[tuple[float, float]] = []
    for n in range(rounds):
        note(f"jobs per second, round {n + 1} of {rounds}")
        with_memory = rate(url, folder / f"rate {n}", rate_jobs)
        without = rate(url, folder / f"none {n}", rate_jobs, cache="off", context="full")
        pairs.append((with_memory, without))
    note(f"{many} agents through the worker")
    store = folder / "worker"
    with Redis.from_url(url) as connection, Producer(connection) as producer:
        connection.flushdb()
        with worker(url, store) as process:
            submit(producer, range(few))
            wait_for(connection, few)
            time.sleep(AT_REST_S)
            at_few = rss_mb(process.pid)
            begin = time.perf_counter()
            submit(producer, range(few, many))
            wait_for(connection, many)
            took = time.perf_counter() - begin
            time.sleep(AT_REST_S)
            at_many = rss_mb(process.pid)
    return {
        "agents": [few, many], "rss_mb": [at_few, at_many], "jobs_per_s_of_all": round((many - few) / took, 1),
        "rate_jobs": rate_jobs, "with_memory_per_s": spread([a for a, _ in pairs], digits=0),
        "without_memory_per_s": spread([b for _, b in pairs], digits=0), **sizes(store), "ls_s": listing(store),
    }  # fmt: skip


def rate(url: str, store: Path, jobs: int, **fields: Any) -> float:
    """Jobs per second from the first job's start to the last one's end, by a worker that ends with them."""
    with Redis.from_url(url) as connection, Producer(connection) as producer:
        connection.flushdb()
        submit(producer, range(jobs), **fields)
        with worker(url, store, "--burst") as process:
            process.wait()
        ends = [at for _, at in connection.zrange("rq:finished:generate", 0, -1, withscores=True)]
        if len(ends) != jobs:
            raise RuntimeError("not all jobs have finished")
        from rq.job import Job
        from rq.serializers import JSONSerializer

        ids = [job_id.decode() for job_id in connection.zrange("rq:finished:generate", 0, -1)]
        found = [job for job in Job.fetch_many(ids, connection, JSONSerializer) if job is not None]
        first, last = min(job.started_at for job in found), max(job.ended_at for job in found)  # type: ignore[type-var]
    return jobs / (last - first).total_seconds()  # type: ignore[operator]


def directly(folder: Path, count: int, samples_at: list[int]) -> Json:
    """One-turn agents through the store alone, in a process of its own."""
    command = [sys.executable, str(HERE / "store_bench.py"), str(folder), str(count), json.dumps(samples_at)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        samples = []
        for line in process.stdout:
            samples.append(json.loads(line))
            note(line.strip())
    if process.returncode:
        raise RuntimeError("filling the store failed")
    return {"samples": samples, "open_s": spread([opening(folder) for _ in range(5)]), "ls_s": listing(folder)}


def opening(folder: Path) -> float:
    begin = time.perf_counter()
    store = AgentCacheStore(folder)
    took = time.perf_counter() - begin
    store.close()
    return took


def listing(folder: Path, rounds: int = 5) -> Json:
    """`memory ls`, the whole command, and a `python` that only imports the command's group."""
    code = "from stoker_worker.cli.main import main; main()"
    command = [sys.executable, "-c", code, "memory", "ls", "--store", str(folder)]
    taken: dict[str, list[float]] = {"used": [], "size": [], "help": []}
    for _ in range(rounds):
        for name, options in (("used", []), ("size", ["--sort", "size"]), ("help", ["--help"])):
            begin = time.perf_counter()
            subprocess.run([*command, *options], capture_output=True, check=True, env=environment())
            taken[name].append(time.perf_counter() - begin)
    return {name: spread(values) for name, values in taken.items()}


def restarts(url: str, large: Path, empty: Path, rounds: int) -> Json:
    """From the start of a worker's process to the first result, on a large store and on an empty one, in turn."""
    taken: dict[str, list[float]] = {"large": [], "empty": []}
    with Redis.from_url(url) as connection, Producer(connection) as producer:
        for n in range(rounds):
            for name, store in (("large", large), ("empty", empty)):
                connection.flushdb()
                submit(producer, range(10_000_000 + n, 10_000_001 + n))
                begin = time.perf_counter()
                with worker(url, store):
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
    ten, last = points[0]["open_ms"]["median"], points[-1]["open_ms"]["median"]
    return {
        "points": points, "ten_turns_as_long_ms": alike, "database_bytes": sizes(folder)["database_bytes"],
        "over_ten_turns": round(last / ten, 2), "over_ten_turns_as_long": round(last / alike["median"], 2),
    }  # fmt: skip


def opening_ms(store: AgentCacheStore, name: str, rounds: int) -> Json:
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        store.open_agent(name)
        taken.append(1000 * (time.perf_counter() - begin))
    return spread(taken, digits=2)


def run(folder: Path, *, quick: bool) -> Json:
    load = os.getloadavg()[0]
    few, many, most, turns = (100, 300, 1000, 300) if quick else (3000, 20_000, 300_000, 10_000)
    rounds = 1 if quick else 5
    samples_at = sorted({few, many, *(most * share // 6 for share in range(1, 7))})
    with EmbeddedServer(folder / "redis") as server:
        with Redis.from_url(server.url) as connection:
            facts = connection.info("server")
            program = f"{facts.get('server_name', 'redis')} {facts['redis_version']}"
        through = through_the_worker(server.url, folder, few, many, rate_jobs=few, rounds=rounds)
        direct = directly(folder / "direct", most, samples_at)
        restart = restarts(server.url, folder / "direct", folder / "empty", rounds)
    long = long_conversation(folder / "long", turns, 20)
    last = direct["samples"][-1]
    direct["rss_growth_mb"] = round(last["rss_mb"] - direct["samples"][0]["rss_mb"], 1)
    through["rss_growth_mb"] = round(through["rss_mb"][1] - through["rss_mb"][0], 1)
    checks = {
        "at_least_200_jobs_per_s_with_memory": through["with_memory_per_s"]["median"] >= 200,
        "memory_grows_by_at_most_50_mb": max(direct["rss_growth_mb"], through["rss_growth_mb"]) <= 50,
        "the_store_adds_at_most_1_s_to_a_start": restart["stores_part_s"] <= 1.0,
        "ls_takes_under_1_s": max(direct["ls_s"]["used"]["median"], direct["ls_s"]["size"]["median"]) < 1.0,
        "the_usage_is_within_1_percent_of_du": abs(last["total_bytes"] / last["du_bytes"] - 1) <= 0.01,
        "ten_thousand_turns_open_within_2_times_ten_as_long": long["over_ten_turns_as_long"] <= 2.0,
    }
    machine = {
        "cpu": cpu_name(), "cores": os.cpu_count(), "os": os_name(), "python": platform.python_version(),
        "sqlite": __import__("sqlite3").sqlite_version, "rq": version("rq"), "redis_py": version("redis"),
        "server": program, "load_average_at_start": round(load, 1),
    }  # fmt: skip
    return {"machine": machine, "worker": through, "direct": direct, "restart": restart, "long": long,
            "verdict": {"passed": all(checks.values()), **checks}}  # fmt: skip


def main() -> None:
    args = arguments(__doc__ or "", model=False)

    def measure() -> Json:
        with tempfile.TemporaryDirectory() as folder:
            return run(Path(folder), quick=args.quick)

    finish(args, "016", REPORT, measure, render)


if __name__ == "__main__":
    main()

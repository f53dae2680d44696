"""EXP-013: the costs of the queue: a claim at 20,000 waiting jobs, jobs per second beside RQ's own worker, and how much
finished jobs delay the engine's steps. Scripted engine, real server; no model and no MLX."""

import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import Json, arguments, cpu_name, finish, note, os_name, spread
from exp_013_report import render
from queue_bench import Feeder, TimedProvider, our_worker, ours, stock
from redis import Redis

from stoker import Producer
from stoker_worker.embedded_redis.server import EmbeddedServer
from stoker_worker.ports import Busy
from stoker_worker.queue.connect import open_queue
from stoker_worker.settings import read_settings

REPORT = "EXP-013-queue-costs.md"
STEPS_PER_S = 1000
JOBS_PER_S = 100
BUSY = Busy(writing=frozenset({"busy"}))


def behind_a_busy_agent(url: str, waiting: int, rounds: int) -> Json:
    """Claims of other agents' jobs, each behind `waiting` jobs of one busy agent."""
    with Redis.from_url(url) as connection, Producer(connection) as producer:
        connection.flushdb()
        producer.submit_many([{"agent_id": "busy", "prompt": "x" * 500}] * waiting)
        with open_queue(read_settings({"redis_url": url, "lease_ttl_s": 600}), url) as opened:
            queue = opened.rq_queue
            producer.submit(agent_id="first", prompt="x")
            looks, begin = [], time.perf_counter()
            while not queue._in_flight:
                looks.append(timed(lambda: queue.claim(1, BUSY)))
            first = {"looks": len(looks), "worst_ms": round(max(looks), 1), "s": time.perf_counter() - begin}
            claims, idle = [], []
            for n in range(rounds):
                idle.append(timed(lambda: queue.claim(1, BUSY)))
                producer.submit(agent_id=f"late {n}", prompt="x")
                claims.append(timed(lambda: queue.claim(1, BUSY)))
            true = len(queue._in_flight) == rounds + 1 and connection.llen("rq:queue:generate") == waiting
    return {"waiting": waiting, "first": first, "claim_ms": percentiles(claims), "idle_ms": percentiles(idle),
            "length_true": true}  # fmt: skip


def with_an_agent_each(url: str, waiting: int, rounds: int) -> Json:
    """Claims from `waiting` jobs of as many agents."""
    with Redis.from_url(url) as connection, Producer(connection) as producer:
        connection.flushdb()
        producer.submit_many([{"agent_id": f"agent {n}", "prompt": "x" * 500} for n in range(waiting)])
        with open_queue(read_settings({"redis_url": url, "lease_ttl_s": 600}), url) as opened:
            queue = opened.rq_queue
            first = {"looks": 1, "worst_ms": round(timed(lambda: queue.claim(1, Busy())), 1), "s": 0.0}
            claims = [timed(lambda: queue.claim(1, Busy())) for _ in range(rounds)]
            true = connection.llen("rq:queue:generate") == waiting - len(queue._in_flight) == waiting - rounds - 1
    return {"waiting": waiting, "first": first, "claim_ms": percentiles(claims), "idle_ms": None, "length_true": true}


def rates(url: str, folder: Path, jobs: int, rounds: int) -> Json:
    """The rate of jobs that do nothing, in turn under RQ's SimpleWorker and under ours."""
    pairs: list[tuple[float, float]] = []
    with Redis.from_url(url) as connection:
        connection.flushdb()
    for n in range(rounds + 1):
        note(f"round {n} of {rounds}: {jobs} jobs under each worker")
        runs: list[Callable[[], float]] = [lambda: ours(url, folder, jobs), lambda: stock(url, jobs)]
        found = [run() for run in (runs if n % 2 else runs[::-1])]
        pairs.append((found[0], found[1]) if n % 2 else (found[1], found[0]))
    kept = pairs[1:]  # the first round warms up
    return {"jobs": jobs, "ours_per_s": spread([a for a, _ in kept], digits=0),
            "stock_per_s": spread([b for _, b in kept], digits=0),
            "ratio": spread([a / b for a, b in kept], digits=2)}  # fmt: skip


def steps(url: str, folder: Path, seconds: float, rounds: int) -> Json:
    """The time from step to step with one sequence that never ends, without and with other jobs that come and go."""
    provider, feeder = TimedProvider(max_batch=32, steps_per_s=STEPS_PER_S), Feeder(url)
    taken: dict[str, list[float]] = {"idle": [], "busy": []}
    marks: list[tuple[str, float, float]] = []
    with Producer(url) as producer, Redis.from_url(url) as connection:
        connection.flushdb()
        with our_worker(url, folder, provider, burst=False):
            producer.submit(agent_id="long", prompt="x", max_tokens=1_000_000, cache="off")
            time.sleep(1.0)
            for n in range(rounds):
                note(f"steps, round {n + 1} of {rounds}")
                begin = time.perf_counter()
                time.sleep(seconds)
                marks.append(("idle", begin, time.perf_counter()))
                begin = time.perf_counter()
                feeder.feed(int(seconds * JOBS_PER_S), JOBS_PER_S)
                marks.append(("busy", begin, time.perf_counter()))
                time.sleep(0.5)
            finished = connection.zcard("rq:finished:generate")
    feeder.close()
    assert provider.engine is not None
    for name, begin, end in marks:
        ends = [at for at in provider.engine.ends if begin <= at < end]
        taken[name] += [1000 * (after - before) for before, after in pairwise(ends)]
    busy_s = sum(end - begin for name, begin, end in marks if name == "busy")
    idle, busy = percentiles(taken["idle"]), percentiles(taken["busy"])
    return {"idle_ms": idle, "busy_ms": busy, "jobs_per_s": round(finished / busy_s, 1),
            "p99_delay_ms": round(busy["p99"] - idle["p99"], 2)}  # fmt: skip


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - begin)


def percentiles(samples: Sequence[float]) -> Json:
    ordered = sorted(samples)
    at = {name: ordered[min(len(ordered) - 1, int(q * len(ordered)))] for name, q in (("p50", 0.5), ("p95", 0.95))}
    at |= {"p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], "max": ordered[-1]}
    return {name: round(value, 2) for name, value in at.items()} | {"n": len(ordered)}


def run(folder: Path, *, quick: bool) -> Json:
    logging.disable(logging.WARNING)
    waiting, rounds = (2000, 20) if quick else (20_000, 200)
    with EmbeddedServer(folder / "redis") as server:
        with Redis.from_url(server.url) as connection:
            facts = connection.info("server")
            program = f"{facts.get('server_name', 'redis')} {facts['redis_version']}"
        load = os.getloadavg()[0]
        claims = {"one busy agent's": behind_a_busy_agent(server.url, waiting, rounds)}
        claims["an agent each"] = with_an_agent_each(server.url, waiting, rounds)
        rate = rates(server.url, folder / "store", *((100, 1) if quick else (1000, 5)))
        step = steps(server.url, folder / "steps", *((1.0, 1) if quick else (4.0, 5)))
    checks = {
        "a_claim_takes_under_5_ms": all(case["claim_ms"]["p95"] < 5 for case in claims.values()),
        "the_queues_length_stays_true": all(case["length_true"] for case in claims.values()),
        "half_as_many_jobs_again_as_simple_worker": rate["ratio"]["median"] >= 1.5,
        "steps_delayed_at_most_5_ms_at_p99": step["p99_delay_ms"] <= 5 and step["jobs_per_s"] >= 0.9 * JOBS_PER_S,
    }
    machine = {
        "cpu": cpu_name(), "cores": os.cpu_count(), "os": os_name(), "python": platform.python_version(),
        "rq": version("rq"), "redis_py": version("redis"), "server": program, "load_average_at_start": round(load, 1),
    }  # fmt: skip
    return {"machine": machine, "claims": claims, "rates": rate, "steps": step,
            "verdict": {"passed": all(checks.values()), **checks}}  # fmt: skip


def main() -> None:
    args = arguments(__doc__ or "")

    def measure() -> Json:
        with tempfile.TemporaryDirectory() as folder:
            return run(Path(folder), quick=args.quick)

    finish(args, "013", REPORT, measure, render)


if __name__ == "__main__":
    main()

"""EXP-013: the costs of the queue: a claim at 20,000 waiting jobs, jobs per second beside RQ's own worker, and how much
finished jobs delay the engine's steps. Scripted engine, real server; no model and no MLX."""

import logging
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

from command import server_main
from common import Json, note, percentiles, ratios, spread, take_turns, timed
from queue_bench import Feeder, TimedProvider, our_worker, ours, stock
from redis import Redis
from report import Report, columns, say

from stoker import Producer
from stoker_worker.embedded_redis import EmbeddedServer
from stoker_worker.ports import Busy
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

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
            while not queue._in_flight:
                queue.claim(1, BUSY)
            claims = []
            for n in range(rounds):
                producer.submit(agent_id=f"late {n}", prompt="x")
                claims.append(timed(lambda: queue.claim(1, BUSY)))
            true = len(queue._in_flight) == rounds + 1 and connection.llen("rq:queue:generate") == waiting
    return {"waiting": waiting, "claim_ms": percentiles(claims), "length_true": true}


def with_an_agent_each(url: str, waiting: int, rounds: int) -> Json:
    """Claims from `waiting` jobs of as many agents."""
    with Redis.from_url(url) as connection, Producer(connection) as producer:
        connection.flushdb()
        producer.submit_many([{"agent_id": f"agent {n}", "prompt": "x" * 500} for n in range(waiting)])
        with open_queue(read_settings({"redis_url": url, "lease_ttl_s": 600}), url) as opened:
            queue = opened.rq_queue
            queue.claim(1, Busy())
            claims = [timed(lambda: queue.claim(1, Busy())) for _ in range(rounds)]
            true = connection.llen("rq:queue:generate") == waiting - len(queue._in_flight) == waiting - rounds - 1
    return {"waiting": waiting, "claim_ms": percentiles(claims), "length_true": true}


def rates(url: str, folder: Path, jobs: int, rounds: int) -> Json:
    """The rate of jobs that do nothing, in turn under RQ's SimpleWorker and under ours."""
    note(f"{jobs} jobs under each worker, {rounds} rounds")
    with Redis.from_url(url) as connection:
        connection.flushdb()
    both = {"ours": partial(ours, url, folder, jobs), "stock": partial(stock, url, jobs)}
    taken = take_turns(both, rounds, warm_up=1)
    return {"jobs": jobs, **{f"{name}_per_s": spread(found, digits=0) for name, found in taken.items()},
            "ratio": ratios(taken["ours"], taken["stock"], digits=2)}  # fmt: skip


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


def run(url: str, folder: Path, *, quick: bool) -> Json:
    waiting, rounds = (2000, 20) if quick else (20_000, 200)
    claims = {"one busy agent's": behind_a_busy_agent(url, waiting, rounds)}
    claims["an agent each"] = with_an_agent_each(url, waiting, rounds)
    rate = rates(url, folder / "store", *((100, 1) if quick else (1000, 5)))
    step = steps(url, folder / "steps", *((1.0, 1) if quick else (4.0, 5)))
    verdict = {
        "a_claim_takes_under_5_ms": all(case["claim_ms"]["p95"] < 5 for case in claims.values()),
        "the_queues_length_stays_true": all(case["length_true"] for case in claims.values()),
        "half_as_many_jobs_again_as_simple_worker": rate["ratio"]["median"] >= 1.5,
        "steps_delayed_at_most_5_ms_at_p99": step["p99_delay_ms"] <= 5 and step["jobs_per_s"] >= 0.9 * JOBS_PER_S,
    }
    return {"verdict": verdict, "claims": claims, "rates": rate, "steps": step}


def short_form(bench: object, folder: Path) -> list[Json]:
    """The rate beside RQ's own worker."""
    logging.disable(logging.WARNING)
    with EmbeddedServer(folder / "redis") as server:
        rate = rates(server.url, folder / "store", 500, 5)
    return [{"what": "jobs per second / RQ's SimpleWorker", "ratio": rate["ratio"], "asked": "at least 1.5"}]


def render(content: Json, results: Path) -> Report:
    claims, rate, step = content["claims"], content["rates"], content["steps"]
    p50, p95 = (max(case["claim_ms"][q] for case in claims.values()) for q in ("p50", "p95"))
    summary = (
        f"A claim takes {p50:.1f} ms at p50 and {p95:.1f} ms at p95. Jobs run at {rate['ratio']['median']} times the "
        f"rate of RQ's SimpleWorker. Beside jobs that come and go, a step is {step['p99_delay_ms']:.1f} ms later at "
        "p99."
    )
    number = say(
        {**rate, **claims["one busy agent's"]},
        "a claim {claim_ms[p50]} ms; {ratio[median]} times the jobs per second of RQ's SimpleWorker (asked: 1.5)",
    )
    shown = [{**row, "name": name} for name, row in claims.items()]
    steps = [{"name": "idle", **step["idle_ms"]}, {"name": f"{step['jobs_per_s']} jobs/s", **step["busy_ms"]}]
    parts = {"claims": columns(shown, CLAIMS), "rates": columns([rate], RATES), "steps": columns(steps, STEPS)}
    return Report("queue costs", number, {"summary": summary, **parts})


CLAIMS = {
    "jobs of": "{name}", "waiting": "{waiting}", "claim p50 ms": "{claim_ms[p50]}", "p95": "{claim_ms[p95]}",
    "max": "{claim_ms[max]}", "n": "{claim_ms[n]}", "length true": "{length_true}",
}  # fmt: skip
RATES = {"jobs": "{jobs}", "stoker, jobs/s": "{ours_per_s:g}", "SimpleWorker, jobs/s": "{stock_per_s:g}",
         "ratio": "{ratio:g}", "rounds": "{ratio[n]}"}  # fmt: skip


STEPS = {"": "{name}", "p50 ms": "{p50}", "p95": "{p95}", "p99": "{p99}", "max": "{max}", "steps": "{n}"}


if __name__ == "__main__":
    server_main(__doc__ or "", "013", run, render)

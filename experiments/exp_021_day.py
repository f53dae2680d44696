"""EXP-021, a day in small: does a worker that serves 300 agents for 2,000 jobs grow, slow down or lose anything?

Jobs go through Redis to a worker process with the real model. Agents come, return soon or much later, and stay away;
lengths have long tails. The RAM cache is smaller than the agents. A quarter into it, the worker is killed.
"""

import bisect
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from bench import Bench, main
from common import HERE, Json, machine, note
from exp_021_report import render
from prompts import text_of
from redis import Redis
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer
from worker_process import WorkerProcess

from stoker import Producer
from stoker.ticket import Ticket
from stoker_shared import GenerationResult
from stoker_worker.embedded_redis.server import EmbeddedServer

REPORT = "EXP-021-day.md"
KINDS = ("English", "German", "French", "Spanish", "Python", "Portuguese")
LIFE_BEFORE_KILL = 0.25
"""Share of the jobs that end before the worker is killed."""
WARM_UP = 0.25
"""Share of the second life's jobs before its memory and speed count."""
MOST_MB = 50.0
MOST_SLOWER = 0.1
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Size:
    """
    Attributes:
        longest: most tokens of an agent's first prompt.
        ahead: jobs that wait or run at any time.
        slices: parts of the day that are compared.
    """

    jobs: int
    agents: int
    longest: int
    answer: tuple[int, int]
    ahead: int
    slices: int
    ram_bytes: int


FULL = Size(2000, 300, 1000, (4, 24), 100, 40, 512 << 20)
QUICK = Size(32, 6, 60, (2, 4), 12, 8, 4 << 20)


# --- the load ---


def day(bench: Bench, size: Size) -> list[dict[str, Any]]:
    """The requests of all jobs, in the order of their submission."""
    dice = random.Random(21)
    turns: list[int] = []  # of each agent
    recent: list[int] = []
    requests = []
    for number in range(size.jobs):
        agent = _agent(dice, number, turns, recent, size)
        n_tokens = (
            _long_tailed(dice, 80, 1.1, 20, size.longest) if not turns[agent] else _long_tailed(dice, 12, 0.8, 4, 150)
        )
        text = text_of(bench.encode, dice.choice(KINDS), n_tokens, seed=number)
        least, most = size.answer
        answer = min(most, least + int(dice.expovariate(1 / 6)))
        name = f"agent {agent}"
        prompt = f"{name}, note {turns[agent]}: {text}\n"  # no two agents begin alike
        requests.append({"agent_id": name, "prompt": prompt, "context": "append", "max_tokens": answer})
        turns[agent] += 1
    return requests


def _agent(dice: random.Random, number: int, turns: list[int], recent: list[int], size: Size) -> int:
    """A new agent at even intervals; else mostly one of the last forty, now and then any that was ever there."""
    if len(turns) <= number * size.agents // size.jobs:
        agent = len(turns)
        turns.append(0)
    else:
        agent = dice.choice(recent[-40:]) if dice.random() < 0.7 else dice.randrange(len(turns))
    if agent in recent:
        recent.remove(agent)
    recent.append(agent)
    return agent


def _long_tailed(dice: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    return min(most, least + int(dice.lognormvariate(math.log(median), sigma)))


# --- the run ---


@dataclass
class Served:
    """
    Attributes:
        ends: Unix time of each job's end, in the order of `tickets`.
        killed_at, ready_at: Unix times of the kill, and of the second life's being ready.
        store: the store's bytes, by Unix time.
    """

    tickets: list[Ticket] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    began_at: float = 0.0
    killed_at: float = 0.0
    ready_at: float = 0.0
    store: list[tuple[float, int]] = field(default_factory=list)


def serve(url: str, worker: WorkerProcess, store: Path, requests: Sequence[dict[str, Any]], size: Size) -> Served:
    """Keep `size.ahead` jobs waiting or running until all have ended."""
    served = Served(began_at=time.time())
    ended, last_end = 0, time.monotonic()
    with Redis.from_url(url) as connection, Producer(url) as producer:
        while ended < len(requests):
            if len(served.tickets) < len(requests) and len(served.tickets) - ended <= size.ahead // 2:
                first = len(served.tickets)
                served.tickets += producer.submit_many(requests[first : first + size.ahead // 2])
            before = ended
            ended = connection.zcard("rq:finished:generate") + connection.zcard("rq:failed:generate")
            if ended > before:
                last_end = time.monotonic()
            elif time.monotonic() - last_end > PATIENCE_S:
                raise RuntimeError(f"no job has ended for {PATIENCE_S} s:\n{worker.log.read_text()[-4000:]}")
            step = max(1, size.jobs // size.slices)
            if before // step < ended // step or not served.store:
                served.store.append((time.time(), allocated_bytes(store)))
                note(f"{ended} of {size.jobs} jobs")
            if not served.killed_at and ended >= LIFE_BEFORE_KILL * size.jobs:
                note("kill -9")
                served.killed_at = time.time()
                worker.restart(signal.SIGKILL)
                served.ready_at = time.time()
            time.sleep(0.1)
        served.results = producer.results(served.tickets, timeout_s=60, return_errors=True)
        jobs = RqJob.fetch_many([ticket.job_id for ticket in served.tickets], connection, JSONSerializer)
        served.ends = [job.ended_at.timestamp() for job in jobs if job is not None and job.ended_at is not None]
    return served


def allocated_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


# --- what it shows ---


def unanswered(results: Sequence[Any]) -> int:
    return sum(
        not isinstance(one, GenerationResult) or not one.usage.completion_tokens or not one.cache.saved
        for one in results
    )


def out_of_order(results: Sequence[GenerationResult], ends: Sequence[float]) -> int:
    """Turns that do not continue the one submitted before them; results are in the order of submission."""
    wrong = 0
    last: dict[str, tuple[GenerationResult, float]] = {}
    for result, end in zip(results, ends, strict=True):
        assert result.agent_id is not None
        before, before_end = last.get(result.agent_id, (None, 0.0))
        n_before = before.usage.prompt_tokens + before.usage.completion_tokens if before else 0
        version = (before.cache.agent_version or 0) + 1 if before else 1
        wrong += result.cache.agent_version != version or result.usage.prompt_tokens <= n_before or end < before_end
        last[result.agent_id] = (result, end)
    return wrong


def prefilled_again(results: Sequence[GenerationResult]) -> int:
    """Most tokens of an agent's saved conversation that a turn had to prefill."""
    saved: dict[str, int] = {}
    most = 0
    for result in results:
        assert result.agent_id is not None
        most = max(most, saved.get(result.agent_id, 0) - result.usage.cached_tokens)
        saved[result.agent_id] = result.usage.prompt_tokens + result.usage.completion_tokens
    return most


def slices(served: Served, samples: Sequence[Json], size: Size) -> list[Json]:
    """Equal numbers of jobs, in the order of their ends, with the work they made and the memory meanwhile."""
    order = sorted(range(len(served.ends)), key=served.ends.__getitem__)
    step = max(1, size.jobs // size.slices)
    cut = [order[first : first + step] for first in range(0, len(order), step)]
    began, found = served.began_at, []
    for number, members in enumerate(cut):
        ended = served.ends[members[-1]]
        usages = [served.results[n].usage for n in members]
        cpu_s = _nearest(samples, ended)["cpu"] - _nearest(samples, began)["cpu"]
        inside = [one for one in samples if began < one["at"] <= ended] or [_nearest(samples, ended)]
        found.append({
            "jobs": min((number + 1) * step, size.jobs),
            "s": round(ended - began, 3),
            "cpu_s": round(cpu_s, 2),
            "life": 1 if ended < served.killed_at else 2,
            "has_restart": (began < served.ready_at and ended > served.killed_at) or cpu_s < 0,
            "prefilled": sum(usage.prompt_tokens - usage.cached_tokens for usage in usages),
            "generated": sum(usage.completion_tokens for usage in usages),
            "attended": sum(usage.completion_tokens * usage.prompt_tokens for usage in usages),
            "cached": sum(usage.cached_tokens for usage in usages),
            "rss_mb": _mb(statistics.median(one["rss"] for one in inside)),
            "active_mb": _mb(statistics.median(one["active"] for one in inside)),
            "kept_mb": _mb(statistics.median(one["kept"] for one in inside)),
            "peak_mb": _mb(max(one["peak"] for one in inside)),
            "store_mb": _mb(served.store[max(0, bisect.bisect(served.store, (ended, 1 << 62)) - 1)][1]),
            "sources": dict(Counter(served.results[n].cache.source for n in members)),
        })  # fmt: skip
        began = ended
    add_predictions(found)
    return found


def add_predictions(found: list[Json]) -> None:
    """The time that the work of each slice should have taken, and how the real one compares."""
    for name, ratio in (("s", "of_predicted"), ("cpu_s", "cpu_of_predicted")):
        prices = _prices([one for one in found if not one["has_restart"]], name)
        for one in found:
            one[f"predicted_{name}"] = predicted = round(max(0.01, float(np.dot(_work(one), prices))), 3)
            one[ratio] = round(one[name] / predicted, 3)


def _nearest(samples: Sequence[Json], at: float) -> Json:
    return min(samples, key=lambda one: abs(one["at"] - at))


def _mb(n_bytes: float) -> float:
    return round(n_bytes / 1e6, 1)


def _work(one: Json) -> list[float]:
    return [one["prefilled"], one["generated"], one["attended"]]


def _prices(found: Sequence[Json], name: str) -> Any:
    """Seconds (`name`) per prefilled, generated and attended token, none of them negative: least squares."""
    work, seconds = np.array([_work(one) for one in found], float), np.array([one[name] for one in found])
    best, error = np.zeros(3), math.inf
    for n in (1, 2, 3):
        for columns in combinations(range(3), n):
            some, *_ = np.linalg.lstsq(work[:, columns], seconds, rcond=None)
            prices = np.zeros(3)
            prices[list(columns)] = some
            wrong = float(np.sum((work @ prices - seconds) ** 2))
            if (some >= 0).all() and wrong < error:
                best, error = prices, wrong
    return best


def slope(found: Sequence[Json], name: str) -> float:
    """Change per 1,000 jobs: the median of the slopes between all pairs of slices."""
    slopes = [(b[name] - a[name]) / (b["jobs"] - a["jobs"]) for a, b in combinations(found, 2)]
    return round(1000 * statistics.median(slopes), 3)


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    size = QUICK if quick else FULL
    facts = machine(bench.facts)
    requests = day(bench, size)
    store, samples = folder / "store", folder / "samples"
    with EmbeddedServer(folder / "redis") as server:
        options = ["--redis", server.url, "--store", str(store), "--model", bench.source, "--dtype", bench.dtype]
        options += ["--memory-max-bytes", str(size.ram_bytes)]
        command = [sys.executable, str(HERE / "watched_worker.py"), str(samples), "run", *options]
        worker = WorkerProcess(command, folder)
        try:
            served = serve(server.url, worker, store, requests, size)
        finally:
            worker.stop(signal.SIGTERM)
    missing = unanswered(served.results)
    if missing:
        raise RuntimeError(f"{missing} jobs have no answer: {[one for one in served.results if unanswered([one])][:3]}")
    seen = [json.loads(line) for line in samples.read_text().splitlines()]
    found = slices(served, seen, size)
    steady = [one for one in found if one["life"] == 2 and not one["has_restart"]]
    steady = steady[int(WARM_UP * len(steady)) : -1]  # in the last one, the queue runs out
    growth = {name: slope(steady, f"{name}_mb") for name in ("rss", "active", "peak", "kept")}
    slower = slope(steady, "of_predicted")
    sources = sum((Counter(one["sources"]) for one in found), Counter())
    again = prefilled_again(served.results)
    attempts = Counter(result.attempt for result in served.results)
    checks = {
        "every_job_has_its_answer": missing == 0,
        "each_agents_turns_are_in_order": out_of_order(served.results, served.ends) == 0,
        "no_stored_token_is_prefilled_again_but_the_last": again <= 1,
        "memory_grows_by_at_most_50_mb_per_1000_jobs": max(growth["rss"], growth["active"]) <= MOST_MB,
        "speed_changes_by_at_most_10_percent_per_1000_jobs": abs(slower) <= MOST_SLOWER,
    }
    lengths = [result.usage.prompt_tokens for result in served.results]
    return {
        "machine": facts,
        "verdict": {"passed": all(checks.values()), **checks},
        "jobs": size.jobs,
        "agents": size.agents,
        "ram_cache_mb": _mb(size.ram_bytes),
        "width": worker.log.read_text().rpartition("ready: model")[2].splitlines()[0].rpartition(", ")[2],
        "took_s": round(max(served.ends) - served.began_at),
        "prompt_tokens": dict(
            zip(("median", "p95", "most"), np.quantile(lengths, [0.5, 0.95, 1]).tolist(), strict=True)
        ),
        "restart_s": round(served.ready_at - served.killed_at, 2),
        "run_again": sum(n for attempt, n in attempts.items() if attempt > 1),
        "sources": dict(sources),
        "cached_share": round(sum(one["cached"] for one in found) / sum(lengths), 3),
        "stored_tokens_prefilled_again": again,
        "steady_jobs": [steady[0]["jobs"], steady[-1]["jobs"]],
        "growth_mb_per_1000_jobs": growth,
        "slower_per_1000_jobs": slower,
        "more_cpu_per_1000_jobs": slope(steady, "cpu_of_predicted"),
        "load_average_at_end": round(os.getloadavg()[0], 1),
        "slices": found,
    }


if __name__ == "__main__":
    main(__doc__ or "", "021", REPORT, run, render)

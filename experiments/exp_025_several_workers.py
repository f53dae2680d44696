"""EXP-025: several workers on one queue: how much faster are four than one, how many Redis commands does a job take,
and what do a hundred thousand jobs of other workers' agents cost? Scripted engines, real server; no model."""

import logging
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from command import main
from common import Json, note, ratios, server_machine, spread, take_turns, timed
from exp_025_report import render
from queue_bench import jobs_per_s
from redis import Redis
from worker_process import WorkerProcess

from stoker import Producer
from stoker_shared.wire import HOMES_KEY
from stoker_worker.embedded_redis.server import EmbeddedServer
from stoker_worker.ports import Busy
from stoker_worker.queue.connect import open_queue
from stoker_worker.settings import read_settings

N_WORKERS = 4
MAX_BATCH, STEPS_PER_S, PROMPT = 8, 12.0, "say nineteen characters"
"""Workers so slow that four of them and the server need less than the machine's processors."""

BEFORE = 129.4
"""Commands a job of one worker at this load, in the last version in which a worker had its queue alone."""

_READ_HERE = ("zcard", "info", "config|resetstat", "config", "command", "client|setinfo", "hello", "del")
_LOOKS_S = 5.0


def run_jobs(url: str, folder: Path, n_workers: int, n_jobs: int) -> Json:
    """All workers begin at once with jobs of many agents; the rate, and the commands for each job."""
    note(f"{n_jobs} jobs, {n_workers} workers")
    with Redis.from_url(url) as connection, Producer(connection) as producer, ExitStack() as workers:
        connection.flushdb()
        connection.set("rq:suspended", 1)
        shared = folder / f"shared-{time.monotonic_ns()}"
        shared.mkdir()
        options = [
            "--shared-store",
            f"file://{shared}",
            "--engine",
            "scripted",
            "--scripted-steps-per-s",
            str(STEPS_PER_S),
            "--max-batch",
            str(MAX_BATCH),
        ]
        for n in range(n_workers):
            store = folder / f"{n_workers}-{n_jobs}-{time.monotonic_ns()}"
            workers.enter_context(WorkerProcess(url, store, "--name", f"mac{n}", *options))
        request = {"prompt": PROMPT, "max_tokens": 100}
        tickets = producer.submit_many([{"agent_id": f"agent {n % (n_jobs // 4)}", **request} for n in range(n_jobs)])
        connection.config_resetstat()
        connection.delete("rq:suspended")
        while connection.zcard("rq:finished:generate") < n_jobs:
            time.sleep(0.1)
        calls = {
            name.removeprefix("cmdstat_"): found["calls"] for name, found in connection.info("commandstats").items()
        }
        rate = jobs_per_s(connection, [ticket.job_id for ticket in tickets])
    return {"per_s": rate, "commands": sum(n for name, n in calls.items() if name not in _READ_HERE) / n_jobs}


def elsewhere(url: str, waiting: int) -> Json:
    """A worker whose queue has only jobs of agents that are at home at another one: the first reading, then looks."""
    note(f"{waiting} jobs of another worker's agents")
    with Redis.from_url(url) as connection, Producer(connection) as producer, ExitStack() as opened:
        connection.flushdb()
        for name in ("home", "other"):
            settings = read_settings({"redis_url": url, "lease_ttl_s": 600, "name": name})
            queue = opened.enter_context(open_queue(settings, url)).rq_queue
        homes = HOMES_KEY.format(queue="generate")
        for first in range(0, waiting, 1000):
            connection.hset(homes, mapping={f"agent {n}": "home =" for n in range(first, first + 1000)})
            producer.submit_many([{"agent_id": f"agent {n}", "prompt": "x"} for n in range(first, first + 1000)])
        begin, looks = time.perf_counter(), [timed(lambda: queue.claim(1, Busy()))]
        while queue.has_unread():
            looks.append(timed(lambda: queue.claim(1, Busy())))
        first = {"s": time.perf_counter() - begin, "worst_ms": max(looks)}
        begin, cpu_s = time.perf_counter(), time.process_time()
        while time.perf_counter() < begin + _LOOKS_S:
            claimed = queue.claim(1, Busy())
            assert claimed == []
            time.sleep(0.05)
        busy_share = (time.process_time() - cpu_s) / (time.perf_counter() - begin)
        late = producer.submit(agent_id="late", prompt="x").job_id
        late_ms = timed(lambda: claimed.extend(queue.claim(1, Busy())))
        bytes_each = connection.memory_usage(homes, samples=0) / waiting
        is_found = [job.job_id for job in claimed] == [late]
    return {"waiting": waiting, "first_s": first["s"], "worst_ms": first["worst_ms"], "busy_share": busy_share,
            "late_ms": late_ms, "late_is_found": is_found, "bytes_each": bytes_each}  # fmt: skip


def run(folder: Path, *, quick: bool) -> Json:
    logging.disable(logging.WARNING)
    per_worker, rounds, waiting = (40, 1, 5000) if quick else (240, 3, 100_000)
    with EmbeddedServer(folder / "redis") as server, Redis.from_url(server.url) as connection:
        machine = server_machine(connection)
        both = {str(n): partial(run_jobs, server.url, folder, n, n * per_worker) for n in (1, N_WORKERS)}
        found = take_turns(both, rounds)
        aside = elsewhere(server.url, waiting)
    one, four = found["1"], found[str(N_WORKERS)]
    rates = {n: [each["per_s"] for each in runs] for n, runs in (("one", one), ("four", four))}
    commands = {n: [each["commands"] for each in runs] for n, runs in (("one", one), ("four", four))}
    speed = ratios(rates["four"], rates["one"])
    most = max(spread(counts, digits=1)["median"] for counts in commands.values())
    verdict = {
        "four_workers_do_3_6_times_the_jobs_of_one": speed["median"] >= 3.6,
        "at_most_1_3_times_the_commands_of_before": most <= 1.3 * BEFORE,
        "other_workers_jobs_cost_under_a_tenth_of_a_processor": aside["busy_share"] < 0.1,
        "a_job_behind_them_is_found_at_once": aside["late_is_found"],
    }
    jobs = {"jobs_per_worker": per_worker, "speed": speed, "before": BEFORE}
    jobs |= {f"{n}_per_s": spread(each, digits=1) for n, each in rates.items()}
    jobs |= {f"{n}_commands": spread(each, digits=1) for n, each in commands.items()}
    return {"machine": machine, "verdict": verdict, "jobs": jobs, "elsewhere": aside}


if __name__ == "__main__":
    main(__doc__ or "", "025", run, render)

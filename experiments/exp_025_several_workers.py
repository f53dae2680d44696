"""EXP-025: several workers on one queue: how much faster are four than one, how many Redis commands does a job take,
and what do a hundred thousand jobs of other workers' agents cost? Scripted engines, real servers; no model."""

import os
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

from command import server_main
from common import HERE, Json, note, ratios, spread, take_turns, timed
from queue_bench import jobs_per_s
from redis import Redis
from report import Report, columns, say
from slow_proxy import SlowProxy
from worker_process import ServerProcess, WorkerProcess

from stoker import Producer
from stoker_shared.wire import LAST_KEY
from stoker_worker.ports import Busy
from stoker_worker.queue.lease import OwnStore
from stoker_worker.queue.rq_queue import open_queue
from stoker_worker.settings import read_settings

N_WORKERS = 4
MAX_BATCH, STEPS_PER_S, PROMPT = 8, 12.0, "say nineteen characters"
"""Workers so slow that four of them and the servers need less than the machine's processors."""

DELAYS_MS = (0, 5, 50)
BEFORE = 250.0
"""Commands a job of four workers at this load, counted in the same way, in the last version with homes."""

_READ_HERE = ("zcard", "info", "config|resetstat", "config", "command", "client|setinfo", "hello", "del")
_LOOKS_S = 5.0


@contextmanager
def s3_server(folder: Path) -> Iterator[int]:
    """The port of a server with a bucket called `agents`."""
    (folder / "buckets" / "agents").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

    def answers() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/agents?list-type=2"):
            return True
        return False

    command = [sys.executable, str(HERE / "s3_server.py"), str(folder / "buckets"), "--port", str(port)]
    with ServerProcess(command, folder / "s3.log", is_ready=answers):
        yield port


def run_jobs(url: str, folder: Path, n_workers: int, n_jobs: int, proxy: SlowProxy) -> Json:
    """All workers begin at once with jobs of many agents; the rate, and for each job the Redis commands and the
    requests to the shared store, to which `proxy` is the way."""
    note(f"{n_jobs} jobs, {n_workers} workers")
    options = ["--engine", "scripted", "--scripted-steps-per-s", str(STEPS_PER_S), "--max-batch", str(MAX_BATCH)]
    options += ["--shared-store", f"s3://agents/{time.monotonic_ns()}"]
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "eu-central-1"}
    where = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
    with Redis.from_url(url) as connection, Producer(connection) as producer, ExitStack() as workers:
        workers.enter_context(patch.dict(os.environ, keys | where))
        connection.flushdb()  # a server of this experiment
        connection.set("rq:suspended", 1)
        for n in range(n_workers):
            store = folder / f"{n_workers}-{n_jobs}-{time.monotonic_ns()}"
            workers.enter_context(WorkerProcess(url, store, "--name", f"mac{n}", *options))
        request = {"prompt": PROMPT, "max_tokens": 100}
        tickets = producer.submit_many([{"agent_id": f"agent {n % (n_jobs // 4)}", **request} for n in range(n_jobs)])
        connection.config_resetstat()
        before = sum(proxy.requests.values())
        connection.delete("rq:suspended")
        while connection.zcard("rq:finished:generate") < n_jobs:
            time.sleep(0.1)
        calls = {
            name.removeprefix("cmdstat_"): found["calls"] for name, found in connection.info("commandstats").items()
        }
        requests = sum(proxy.requests.values()) - before
        rate = jobs_per_s(connection, [ticket.job_id for ticket in tickets])
    commands = sum(n for name, n in calls.items() if name not in _READ_HERE)
    return {"per_s": rate, "commands": commands / n_jobs, "requests": requests / n_jobs}


def elsewhere(url: str, waiting: int) -> Json:
    """A worker whose queue has only jobs that it leaves to another one for now: the first reading, then looks."""
    note(f"{waiting} jobs of another worker's agents")
    with Redis.from_url(url) as connection, Producer(connection) as producer, ExitStack() as opened:
        connection.flushdb()
        queues = []
        for name in ("maker", "other"):
            settings = read_settings({"redis_url": url, "lease_ttl_s": 600, "name": name, "patience_s": 600})
            store = OwnStore(name, "shared")
            queues.append(opened.enter_context(open_queue(settings, url, store=store, model="model")).rq_queue)
            queues[-1]._lease.announce({"loading": False})
        maker, queue = queues[0]._lease.worker_name, queues[1]
        last = LAST_KEY.format(queue="generate")
        for start in range(0, waiting, 1000):
            connection.hset(last, mapping={f"agent {n}": f"{maker} 1" for n in range(start, start + 1000)})
            producer.submit_many([{"agent_id": f"agent {n}", "prompt": "x"} for n in range(start, start + 1000)])
        begin, looks = time.perf_counter(), [timed(lambda: queue.claim(MAX_BATCH, Busy()))]
        while queue.has_unread():
            looks.append(timed(lambda: queue.claim(MAX_BATCH, Busy())))
        first = {"s": time.perf_counter() - begin, "worst_ms": max(looks)}
        begin, cpu_s = time.perf_counter(), time.process_time()
        while time.perf_counter() < begin + _LOOKS_S:
            claimed = queue.claim(MAX_BATCH, Busy())
            assert claimed == []
            time.sleep(0.05)
        busy_share = (time.process_time() - cpu_s) / (time.perf_counter() - begin)
        late = producer.submit(agent_id="late", prompt="x").job_id
        late_ms = timed(lambda: claimed.extend(queue.claim(MAX_BATCH, Busy())))
        bytes_each = connection.memory_usage(last, samples=0) / waiting
        is_found = [job.job_id for job in claimed] == [late]
    return {"waiting": waiting, "first_s": first["s"], "worst_ms": first["worst_ms"], "busy_share": busy_share,
            "late_ms": late_ms, "late_is_found": is_found, "bytes_each": bytes_each}  # fmt: skip


def compared(delay_ms: int, found: dict[str, list[Json]], per_worker: int) -> Json:
    one, four = ([run["per_s"] for run in found[str(n)]] for n in (1, N_WORKERS))
    about = f"{delay_ms} ms a request"
    row: Json = {"about": about, "jobs_per_worker": per_worker, "speed": ratios(four, one)}
    for name, n in (("one", 1), ("four", N_WORKERS)):
        for kind in ("per_s", "commands", "requests"):
            row[f"{name}_{kind}"] = spread([run[kind] for run in found[str(n)]], digits=2)
    return row


def run(url: str, folder: Path, *, quick: bool) -> Json:
    per_worker, rounds, waiting = (40, 1, 5000) if quick else (240, 1, 100_000)
    with ExitStack() as servers:
        port = servers.enter_context(s3_server(folder))
        proxies = {ms: servers.enter_context(SlowProxy(port, ms / 1000)) for ms in DELAYS_MS}
        turns = {
            f"{n} {ms}": partial(run_jobs, url, folder, n, n * per_worker, proxies[ms])
            for ms in DELAYS_MS
            for n in (1, N_WORKERS)
        }
        found = take_turns(turns, rounds)
        aside = elsewhere(url, waiting)
    rows = [compared(ms, {str(n): found[f"{n} {ms}"] for n in (1, N_WORKERS)}, per_worker) for ms in DELAYS_MS]
    verdict = {
        **{f"four_workers_do_3_6_times_the_jobs_of_one_with_{row['about'].replace(' ', '_')}":
           row["speed"]["median"] >= 3.6 for row in rows},
        "at_most_1_2_times_the_commands_of_before": max(row["four_commands"]["median"] for row in rows) <= 1.2 * BEFORE,
        "other_workers_jobs_cost_under_a_tenth_of_a_processor": aside["busy_share"] < 0.1,
        "a_job_behind_them_is_found_at_once": aside["late_is_found"],
    }  # fmt: skip
    return {"verdict": verdict, "jobs": rows, "before": BEFORE, "elsewhere": aside}


def render(content: Json, results: Path) -> Report:
    jobs, elsewhere = content["jobs"], content["elsewhere"]
    known = {**jobs[-1], **elsewhere, "before": content["before"]}
    aside = {name: round(value, 3) if isinstance(value, float) else value for name, value in elsewhere.items()}
    return Report("several workers on one queue", say(known, NUMBER), {
        "summary": say(known, SUMMARY), "jobs": columns(jobs, JOBS), "elsewhere": columns([aside], ELSEWHERE),
    })  # fmt: skip


NUMBER = "{speed[median]} times one worker's jobs (asked: 3.6); {four_commands[median]:g} commands a job"
SUMMARY = (
    "With a shared store that takes {about}, four workers do {speed[median]} times the jobs of one. A job takes "
    "{four_commands[median]:g} Redis commands with four workers ({before:g} while agents had homes). {waiting} jobs "
    "that are left to another worker take {busy_share:.3f} of a processor."
)
JOBS = {"shared store": "{about}", "jobs per worker": "{jobs_per_worker}", "one, jobs/s": "{one_per_s}",
        "four, jobs/s": "{four_per_s}", "ratio": "{speed}", "rounds": "{speed[n]}",
        "commands a job: one": "{one_commands}", "four": "{four_commands}",
        "its requests a job": "{four_requests[median]}"}  # fmt: skip
ELSEWHERE = {"jobs": "{waiting}", "first reading s": "{first_s}", "longest look ms": "{worst_ms}",
             "share of a processor": "{busy_share}", "a job behind them ms": "{late_ms}",
             "bytes in Redis an agent": "{bytes_each}"}  # fmt: skip


if __name__ == "__main__":
    server_main(__doc__ or "", "025", run, render)

"""EXP-026: what a fleet of 1 to 1,000 workers and a million agents costs Redis, by the calls that simulated fleets made
(kept in the results) and the cost of each call on a real server. No model and no MLX.

The simulation itself is gone: it drove classes inside the queue with a played Redis, and each change there broke it.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from command import main
from common import HERE, Json, note, server_machine, spread
from redis import Redis
from report import Report, columns, figure, lines

from stoker import Producer
from stoker_shared.wire import LAST_KEY
from stoker_worker.embedded_redis import EmbeddedServer
from stoker_worker.ports import Busy, SequenceProgress
from stoker_worker.queue.claim import Claimer
from stoker_worker.queue.lease import NO_STORE, Lease, OwnStore
from stoker_worker.queue.rq_queue import RqQueue, open_queue
from stoker_worker.settings import read_settings

# Calls that are not played (start and end of jobs, heartbeats, progress) are counted by the product's defaults.

MOST_SHARE: Final = 0.7
"""Of one core: above that, calls begin to wait for each other."""

BEATS_PER_S: Final = 1.0
WATCHES_PER_S: Final = 2.0
MEMBER_LOOKS_PER_S: Final = 1.0


def server_load(workers: int, jobs_per_s: float, sent: Mapping[str, float], cost: Json) -> Json:
    """The load of one queue.

    Args:
        sent: calls for each job, by kind.
        cost: as `costs` returns it. One look, one reading and one claim are in the cost of a job.
    """
    again = Counter({kind: max(0.0, n - (kind in ("look", "read", "jobs read", "claim"))) for kind, n in sent.items()})
    parts = {"look": again["look"] + again["read"] + again["claim"] + again["position"], "read": again["jobs read"]}
    parts |= {"pass": again["jobs passed"] + again["jobs held"], "job": 1.0}
    parts |= {"beat": workers * BEATS_PER_S / jobs_per_s, "watch": workers * WATCHES_PER_S / jobs_per_s}
    n_commands, us = (sum(n * cost[part][kind] for part, n in parts.items()) for kind in ("commands", "server_us"))
    looks = workers * MEMBER_LOOKS_PER_S / jobs_per_s
    measured = {int(n): found["server_us"] for n, found in cost["members look"].items()}
    us += looks * float(np.interp(workers, list(measured), list(measured.values())))
    return {
        "commands_a_job": round(n_commands + 2 * looks, 1),
        "server_us_a_job": round(us),
        "share": round(us * jobs_per_s / 1e6, 4),
    }


def computed(fleet: Json, cost: Json, workers: int) -> Json:
    """The load of one queue with so many workers like those of a simulated one: each look is theirs, and each waiting
    job is read, and left to another worker, by a part of the others."""
    there, rate = fleet["workers"], fleet["jobs_per_s"] / fleet["workers"]
    factor = (workers - 1) / (there - 1)
    sent = dict(fleet["sent_a_job"])
    for kind in ("read", "jobs read", "claim"):
        sent[kind] = 1 + max(0.0, sent[kind] - 1) * factor
    sent["jobs passed"] = sent.get("jobs passed", 0.0) * factor
    return {"workers": workers, "jobs_per_s": round(rate * workers, 1)} | server_load(
        workers, rate * workers, sent, cost
    )


def end_of_one_server(fleet: Json, cost: Json, *, most: int) -> int:
    """The most workers of one queue that keep a server at most `MOST_SHARE` busy, of those up to `most`."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if computed(fleet, cost, middle)["share"] <= MOST_SHARE else (low, middle - 1)
    return low


QUEUE = "generate"
RESULT = {"text": "word " * 200, "usage": {"prompt_tokens": 4000, "cached_tokens": 3600, "completion_tokens": 200}}
STORE, MODEL = OwnStore("mac", "bucket"), "model"
IN_FLIGHT = 16
LEASE_S = 600.0
WAITING_JOBS = 500
ROUNDS = 10


class Meter:
    """Measures calls on a server that nobody else uses."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    def cost(self, call: Callable[[], object], times: int) -> Json:
        """Commands of one call, those of its scripts included, and the least of the rounds' microseconds of the server:
        another program on its core only adds to them."""
        call()  # scripts are loaded, connections are open
        server_us, n_commands = [], 0
        for _ in range(ROUNDS):
            self._connection.config_resetstat()
            before = self._server_s()
            for _ in range(times):
                call()
            server_us.append(1e6 * (self._server_s() - before) / times)
            found: Any = self._connection.info("commandstats")
            n_commands = sum(one["calls"] for name, one in found.items() if name not in ("cmdstat_info", _RESET))
        return {"commands": round(n_commands / times, 2), "server_us": round(min(server_us), 1),
                "rounds_us": spread(server_us, digits=1)}  # fmt: skip

    def _server_s(self) -> float:
        found: Any = self._connection.info("cpu")
        ends = "_main_thread" if "used_cpu_user_main_thread" in found else ""
        return float(found[f"used_cpu_user{ends}"] + found[f"used_cpu_sys{ends}"])


_RESET = "cmdstat_config|resetstat"


def costs(url: str, members: tuple[int, ...], *, times: int) -> Json:
    """The parts of what a worker with a shared store sends, with `IN_FLIGHT` jobs that run."""
    found: Json = {}
    with Redis.from_url(url) as connection, Producer(connection) as producer, _opened(url) as queue:
        meter = Meter(connection)
        found["job"] = meter.cost(lambda: _one_job(producer, queue), times)
        found["submit"] = meter.cost(lambda: producer.submit(agent_id="later", prompt="x"), times)
        connection.delete(f"rq:queue:{QUEUE}")
        producer.submit_many([{"agent_id": f"agent {n}", "prompt": "x" * 500} for n in range(IN_FLIGHT)])
        while len(queue._in_flight) < IN_FLIGHT:
            queue.claim(IN_FLIGHT, Busy())
        found["look"] = meter.cost(lambda: queue._claim_order.claimers[QUEUE].read_ahead(0, Busy()), times)
        found["beat"] = meter.cost(queue.beat, max(5, times // 10))
        found["watch"] = meter.cost(lambda: queue.withdrawn(_progress(queue)), max(5, times // 10))
        found |= _waiting(connection, producer, queue, meter)
        found["members look"] = {str(n): _look_at(connection, queue, meter, n, max(5, times // 20)) for n in members}
    return found


@contextmanager
def _opened(url: str) -> Iterator[RqQueue]:
    settings = read_settings({"redis_url": url, "lease_ttl_s": LEASE_S, "name": "mac"})
    with open_queue(settings, url, store=STORE, model=MODEL) as opened:
        yield opened.rq_queue


def _one_job(producer: Producer, queue: RqQueue) -> None:
    """From its submission to its result, as when places become free one by one."""
    producer.submit(agent_id=f"agent {time.monotonic_ns()}", prompt="x" * 500)
    for job in queue.claim(1, Busy()):
        job.finish(RESULT)
        job.release()


_tokens = iter(range(1 << 60))


def _progress(queue: RqQueue) -> dict[str, SequenceProgress]:
    """Each job has generated more since the last look."""
    return {job.job_id: SequenceProgress("decode", next(_tokens), 20.0) for job in queue.in_flight()}


def _join(connection: Redis, number: int) -> str:
    """One more member, which is ready; its name as an RQ worker."""
    name = f"mac{number:04}"
    worker = f"stoker-{name}-01234567"
    store = {"store": name, "shared": STORE.shared, "model": MODEL}
    lease = Lease(connection, name, [QUEUE], worker_name=worker, ttl_s=LEASE_S, **store)
    lease.acquire()
    lease.announce({"loading": False})
    return worker


def _waiting(connection: Redis, producer: Producer, queue: RqQueue, meter: Meter) -> Json:
    """A waiting job read; and a claim that leaves one to another worker."""
    worker, last = _join(connection, 0), LAST_KEY.format(queue=QUEUE)
    producer.submit_many([{"agent_id": f"there {n}", "prompt": "x" * 500} for n in range(WAITING_JOBS)])
    connection.hset(last, mapping={f"there {n}": f"{worker} 1" for n in range(WAITING_JOBS)})
    known = queue._lease, queue._claim_order.claimers[QUEUE]._placement, queue._registration

    def read_all() -> Claimer:
        claimer = Claimer(connection, QUEUE, *known, is_at_hand=NO_STORE.is_at_hand, patience_s=60.0)
        claimer.read_ahead(0, Busy())
        while claimer.has_unread:
            claimer.read_ahead(0, Busy())
        return claimer

    def pass_all() -> None:
        claimer = read_all()
        while claimer.waiting.lines.agents():
            claimer.claim(1, Busy())

    read, passed = (meter.cost(call, 2) for call in (read_all, pass_all))
    connection.delete(f"rq:queue:{QUEUE}", last)
    kinds = ("commands", "server_us")
    each = {"read": {kind: read[kind] for kind in kinds}, "pass": {kind: passed[kind] - read[kind] for kind in kinds}}
    return {name: {kind: round(n / WAITING_JOBS, 2) for kind, n in found.items()} for name, found in each.items()}


def _look_at(connection: Redis, queue: RqQueue, meter: Meter, n_members: int, times: int) -> Json:
    """A look at the members."""
    n_there: Any = connection.hlen("stoker:members")
    for n in range(n_there, n_members):
        _join(connection, n)
    return meter.cost(queue._members.look, times)


RESULTS = HERE / "results" / "exp_026_results.json"
ONE_QUEUE = (1, 10, 25, 50, 100, 200, 500, 1000)


def with_load(fleet: Json, cost: Json) -> Json:
    """A fleet with the load of each queue's server."""
    workers, rate = fleet["workers"] // fleet["groups"], fleet["jobs_per_s"] / fleet["groups"]
    return {**fleet, "one_server": server_load(workers, rate, fleet["sent_a_job"], cost)}


def verdict(fleets: list[Json], *, is_same: bool) -> Json:
    peaceful = [fleet for fleet in fleets if not fleet["deaths_per_min"]]
    deadly = [fleet for fleet in fleets if fleet["deaths_per_min"]]
    several = next(fleet for fleet in peaceful if fleet["workers"] > 1)
    alone = next(fleet for fleet in fleets if fleet["workers"] == 1 and fleet["agents"] == several["agents"])
    one, more = (fleet["one_server"]["commands_a_job"] for fleet in (alone, several))
    return {
        "the_same_seed_gives_the_same_run": is_same,
        "while_nobody_dies_at_most_1_percent_of_jobs_move": all(
            sum(fleet["moves_per_1000_jobs"].values()) <= 10 for fleet in peaceful
        ),
        "while_nobody_dies_99_percent_of_jobs_wait_at_most_10_s": all(
            fleet["wait_s"]["p99"] <= 10 for fleet in peaceful
        ),
        "deaths_cost_at_most_2_percent_of_what_the_stores_could_hit": all(
            fleet["hit_share"] >= fleet["room_for"] * fleet["best_hit_share"] - 0.02 for fleet in deadly
        ),
        "with_deaths_95_percent_of_jobs_wait_at_most_10_s": all(fleet["wait_s"]["p95"] <= 10 for fleet in deadly),
        "several_workers_send_at_most_30_percent_more_commands_a_job_than_one": more <= 1.3 * one,
    }


def run(folder: Path, *, quick: bool) -> Json:
    logging.disable(logging.WARNING)
    times, members = (20, (1, 10)) if quick else (100, (1, 10, 100, 1000))
    note("one server")
    with EmbeddedServer(folder / "server", has_password=False) as server, Redis.from_url(server.url) as connection:
        machine, cost = server_machine(connection), costs(server.url, members, times=times)
    simulated = json.loads(RESULTS.read_text(encoding="utf-8"))
    fleets = [with_load(fleet, cost) for fleet in simulated["fleets"]]
    is_same = simulated["verdict"]["the_same_seed_gives_the_same_run"]
    together = [fleet for fleet in fleets if fleet["groups"] == 1 and fleet["workers"] > 1]
    like = [fleet for fleet in together if not fleet["deaths_per_min"]][-1]
    one_queue = [computed(like, cost, n) for n in ONE_QUEUE]
    return {
        "machine": machine, "verdict": verdict(fleets, is_same=is_same), "fleets": fleets,
        "one_server": {"cost": cost, "computed_like": like["name"], "one_queue": one_queue,
                       "ends_at_workers": end_of_one_server(like, cost, most=10_000)},
    }  # fmt: skip


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    fleets, server = content["fleets"], content["one_server"]
    last, cost = fleets[-1], server["cost"]
    summary = (
        f"{last['workers']:,} workers and {last['agents']:,} agents, with {last['deaths_per_min']:g} deaths a minute: "
        f"{last['hit_share']:.1%} of the prompt tokens come from a cache (at best {last['best_hit_share']:.1%}), the "
        f"median wait is {last['wait_s']['p50']:.2f} s, {last['over_10_s']:.1%} of the jobs wait for more than 10 s. A "
        f"job costs this machine's Redis {cost['job']['server_us']:.0f} µs alone. By computation, one queue on it ends "
        f"at {server['ends_at_workers']} workers."
    )
    number = (
        f"hit share {last['hit_share']:.1%} with {last['workers']:,} workers; one Redis ends at "
        f"{server['ends_at_workers']} workers of one queue"
    )
    return Report("scale out", number, {
        "summary": summary, "sent": _sent(fleets), "cost": _cost(cost), "one queue": _one_queue(server),
    })  # fmt: skip


def _sent(fleets: list[Json]) -> str:
    kinds = ("look", "read", "jobs read", "claim", "jobs passed", "jobs held", "members")
    rows = [{**fleet, "kinds": {kind: fleet["sent_a_job"].get(kind, 0.0) for kind in kinds}} for fleet in fleets]
    shown = {kind: "{kinds[" + kind + "]:.3g}" for kind in kinds}
    ends = {"commands a job, in all": "{one_server[commands_a_job]:.4g}", "µs of the server a job":
            "{one_server[server_us_a_job]}", "share of its core": "{one_server[share]:.1%}"}  # fmt: skip
    return columns(rows, {"a job": "{name}", **shown, **ends})


def _cost(cost: Json) -> str:
    names = {
        "job": "a job: submitted, claimed, started, finished", "submit": "of that, its submission",
        "look": "a look that finds nothing", "read": "a waiting job read", "pass": "a job left to another worker",
        "beat": f"a heartbeat with {IN_FLIGHT} jobs (1 a second)",
        "watch": f"a look at {IN_FLIGHT} running jobs, with progress (2 a second)",
    }  # fmt: skip
    rows = [{"name": name, **cost[key]} for key, name in names.items()]
    rows += [{"name": f"a look at {n} members (1 a second)", **found} for n, found in cost["members look"].items()]
    return columns(rows, {"": "{name}", "commands": "{commands:g}", "µs of the server": "{server_us:g}"})


def _one_queue(server: Json) -> str:
    table = columns(server["one_queue"], {
        "workers of one queue": "{workers}", "jobs/s": "{jobs_per_s:g}", "commands a job": "{commands_a_job:.4g}",
        "share of this machine's core": "{share:.1%}",
    })  # fmt: skip
    return (
        f"{table}\n\nThe share reaches {MOST_SHARE:.0%} at {server['ends_at_workers']} workers here (computed from "
        f"“{server['computed_like']}”), so a core that is twice as fast is as busy with each line at half the share."
    )


def plan(content: Json) -> str:
    """The table of `docs/scale-out.md`."""
    fleets = [{**fleet, "moves": sum(fleet["moves_per_1000_jobs"].values())} for fleet in content["fleets"]]
    return columns(fleets, {
        "a million agents": "{name}", "jobs/s": "{jobs_per_s:.3g}", "hit share": "{hit_share:.0%}",
        "moves per 1,000 jobs": "{moves:.0f}", "wait: median, s": "{wait_s[p50]:.2f}", "p95": "{wait_s[p95]:.1f}",
        "p99": "{wait_s[p99]:.0f}", "share of a core of each Redis": "{one_server[share]:.1%}",
    })  # fmt: skip


def plot(content: Json, results: Path) -> None:
    queue = content["one_server"]["one_queue"]
    with figure(content, results, "scale_out", (6, 4), title="one server for one queue") as axes:
        lines(axes, [one["workers"] for one in queue], {"": [one["share"] for one in queue]})
        axes.axhline(MOST_SHARE, ls="--", lw=0.8)
        axes.set(xscale="log", yscale="log", xlabel="workers of one queue", ylabel="cores of the server (computed)")


if __name__ == "__main__":
    main(__doc__ or "", "026", run, render)

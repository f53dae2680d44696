"""EXP-026: a fleet of 1 to 1,000 workers and a million agents: the product's routing in virtual time, and what it costs
a real Redis server. Scripted engines; no model and no MLX."""

import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from command import main
from common import HERE, Json, note, percentiles, server_machine
from exp_026_report import render
from fleet_load import Setup
from redis import Redis
from redis_costs import costs
from server_load import computed, end_of_one_server, server_load

from stoker_worker.embedded_redis.server import EmbeddedServer

MILLION = 1_000_000
FLEETS = {
    "1 worker, 1,000 agents": Setup(1, 1000, 60),
    "1 worker": Setup(1, MILLION, 60),
    "10 workers": Setup(10, MILLION, 10),
    "10 workers, a death a minute": Setup(10, MILLION, 10, deaths_per_min=1),
    "100 workers": Setup(100, MILLION, 1.5),
    "100 workers, a death a minute": Setup(100, MILLION, 1.5, deaths_per_min=1),
    "1,000 workers in groups of 25": Setup(1000, MILLION, 1, groups=40, simulated=8),
    "the same, 10 deaths a minute": Setup(1000, MILLION, 1, groups=40, simulated=8, deaths_per_min=10),
}
TEN = {"": {}, ", nearly full": {"load": 0.95}, ", a death a minute": {"deaths_per_min": 1.0}}
PATIENCES = {
    f"{patience_s} s{about}": Setup(10, MILLION, 10, patience_s=patience_s, **options)
    for about, options in TEN.items()
    for patience_s in (0, 2, 10, 60)
}
QUICK = {
    "1 worker": Setup(1, 10_000, 0.5),
    "4 workers": Setup(4, 10_000, 0.5),
    "4 workers in groups of 2, deaths": Setup(4, 10_000, 0.5, groups=2, simulated=2, deaths_per_min=4),
}
QUICK_PATIENCES = {"0 s": Setup(4, 10_000, 0.5, patience_s=0)}
TWICE = Setup(4, 1000, 0.5, deaths_per_min=4)
GROUPS_AT_ONCE = 4
ONE_QUEUE = (1, 10, 25, 50, 100, 200, 500, 1000)


def simulated(fleets: dict[str, Setup]) -> list[Json]:
    """Each fleet in processes of its own, two at a time, the last one first."""
    with ThreadPoolExecutor(2) as threads:
        parts = {
            name: [threads.submit(_process, name, setup, groups) for groups in _shares(setup)]
            for name, setup in reversed(fleets.items())
        }
        return [_together(name, setup, [part.result() for part in parts[name]]) for name, setup in fleets.items()]


def _shares(setup: Setup) -> list[list[int]]:
    groups = list(range(setup.simulated))
    return [groups[start : start + GROUPS_AT_ONCE] for start in range(0, len(groups), GROUPS_AT_ONCE)]


def _process(name: str, setup: Setup, groups: list[int]) -> Json:
    note(f"{name}: groups {groups[0]} to {groups[-1]}")
    command = [sys.executable, str(HERE / "fleet.py"), json.dumps({"setup": asdict(setup), "groups": groups})]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    answer: Json = json.loads(done.stdout)
    return answer


def _together(name: str, setup: Setup, parts: Sequence[Json]) -> Json:
    counts, sent = Counter[str](), Counter[str]()
    for part in parts:
        counts.update(part["counts"])
        sent.update(part["sent"])
    waits = [wait for part in parts for wait in part["waits"]]
    jobs, prompt = counts["jobs"], counts["prompt"]
    rate = jobs / (60 * setup.minutes) * setup.groups / setup.simulated
    moves = {whose: counts[f"moves from the {whose}"] for whose in ("living", "dead")}
    return {
        "name": name, **asdict(setup), "jobs": jobs, "jobs_per_s": round(rate, 2),
        "asked_per_s": round(parts[0]["asked_per_s"], 2), "room_for": round(parts[0]["stores_hits"], 3),
        "hit_share": round((counts["local"] + counts["fetched"]) / prompt, 4),
        "fetched_share": round(counts["fetched"] / prompt, 4), "best_hit_share": round(counts["context"] / prompt, 4),
        "moves_per_1000_jobs": {whose: round(1000 * n / jobs, 2) for whose, n in moves.items()},
        "wait_s": percentiles(waits), "over_10_s": round(sum(wait > 10 for wait in waits) / len(waits), 4),
        "first_token_s": percentiles([wait for part in parts for wait in part["firsts"]]),
        "deaths": counts["deaths"], "lost_with_a_worker": counts["lost with a worker"],
        "run_again": counts["run again"],
        "waiting_at_end": counts["waiting at the end"], "quarantined_at_end": counts["quarantined at the end"],
        "sent_a_job": {kind: round(n / jobs, 3) for kind, n in sorted(sent.items())},
    }  # fmt: skip


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
    asked = (QUICK, QUICK_PATIENCES) if quick else (FLEETS, PATIENCES)
    fleets, patient = ([with_load(fleet, cost) for fleet in simulated(setups)] for setups in asked)
    first, second = (_process("twice the same", TWICE, [0]) for _ in range(2))
    together = [fleet for fleet in fleets if fleet["groups"] == 1 and fleet["workers"] > 1]
    like = [fleet for fleet in together if not fleet["deaths_per_min"]][-1]
    one_queue = [computed(like, cost, n) for n in ONE_QUEUE]
    return {
        "machine": machine, "verdict": verdict(fleets, is_same=first == second), "fleets": fleets, "patience": patient,
        "one_server": {"cost": cost, "computed_like": like["name"], "one_queue": one_queue,
                       "ends_at_workers": end_of_one_server(like, cost, most=10_000)},
    }  # fmt: skip


if __name__ == "__main__":
    main(__doc__ or "", "026", run, render)

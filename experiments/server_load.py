"""How busy a fleet keeps one Redis server: counts of calls from virtual time, times of calls from a real server. Pure.

Calls that are not played (start and end of jobs, heartbeats, progress) are counted by the product's defaults.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np
from common import Json

MOST_SHARE: Final = 0.7
"""Of one core: above that, calls begin to wait for each other."""

BEATS_PER_S: Final = 1.0
WATCHES_PER_S: Final = 2.0
MEMBER_LOOKS_PER_S: Final = 1.0


def server_load(workers: int, jobs_per_s: float, sent: Mapping[str, float], cost: Json) -> Json:
    """The load of one queue.

    Args:
        sent: calls for each job, by kind.
        cost: as `redis_costs.costs` returns it. One look, one reading and one claim are in the cost of a job.
    """
    again = Counter({kind: max(0.0, n - (kind in ("look", "read", "jobs read", "claim"))) for kind, n in sent.items()})
    calls = again["look"] + again["read"] + again["position"]
    beats, watches, looks = (workers * rate for rate in (BEATS_PER_S, WATCHES_PER_S, MEMBER_LOOKS_PER_S))
    regular = {kind: beats * cost["beat"][kind] + watches * cost["watch"][kind] for kind in ("commands", "server_us")}
    measured = {int(n): found["server_us"] for n, found in cost["members look"].items()}
    us = jobs_per_s * (cost["job"]["server_us"] + calls * cost["look"]["server_us"])
    us += jobs_per_s * (again["jobs read"] * cost["read"]["server_us"] + again["claim"] * cost["pass"]["server_us"])
    us += regular["server_us"] + looks * float(np.interp(workers, list(measured), list(measured.values())))
    n_commands = cost["job"]["commands"] + calls * cost["look"]["commands"] + again["members"]
    n_commands += again["claim"] * cost["pass"]["commands"] + regular["commands"] / jobs_per_s
    return {
        "commands_a_job": round(n_commands, 1),
        "server_us_a_job": round(us / jobs_per_s),
        "share": round(us / 1e6, 4),
    }


def computed(fleet: Json, cost: Json, workers: int) -> Json:
    """The load of one queue with so many workers like those of a simulated one: each look is theirs, and each waiting
    job is read, and left to another worker, by a part of the others."""
    there, rate = fleet["workers"], fleet["jobs_per_s"] / fleet["workers"]
    factor = (workers - 1) / (there - 1)
    sent = dict(fleet["sent_a_job"])
    for kind in ("read", "jobs read", "claim"):
        sent[kind] = 1 + max(0.0, sent.get(kind, 0.0) - 1) * factor
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

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

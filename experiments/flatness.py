"""Whether a worker's figures are flat over a long run, for EXP-024. Pure; owns the limits, set before the first run.

The long life of the worker counts, after its first quarter. A figure is flat if the least-squares line through it
changes by no more than its limit from the beginning of that window to its end.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from common import Json
from long_run import Served, mb, nearest

WARM_UP = 0.25
"""Share of the long life before the window."""


@dataclass(frozen=True)
class Limit:
    """What the line may change by: `share` of the median, or `least` if that is more."""

    share: float
    least: float = 0.0


LIMITS = {
    "the_worker": {
        "rss_mb": Limit(0.02, 8.0), "heap_mb": Limit(0.02, 2.0), "fds": Limit(0.0, 4.0), "threads": Limit(0.0, 1.0),
    },
    "the_store": {
        "files": Limit(0.1, 20.0), "store_mb": Limit(0.1, 2.0), "database_mb": Limit(0.1, 2.0),
        "wal_mb": Limit(0.1, 4.0),
    },
    "redis": {"redis_mb": Limit(0.1, 1.0), "keys": Limit(0.1, 50.0)},
}  # fmt: skip
"""Most growth; of what the system tells."""
RATES = {"jobs_per_s": Limit(0.1), "tokens_per_cpu_s": Limit(0.1)}
"""Most loss."""


def flatness(served: Served, series: Sequence[Json], rates: Sequence[Json]) -> Json:
    """The window, and each figure's line, limit and verdict; times in seconds since the beginning.

    Args:
        series: `point`s.
        rates: `rate`s of slices.
    """
    begin, end = max(((a - served.began_at, b - served.began_at) for a, b in served.lives), key=lambda x: x[1] - x[0])
    window = (begin + WARM_UP * (end - begin), end)
    lines = {}
    for figures in LIMITS.values():
        for name, limit in figures.items():
            if name in series[0]:
                line = _line([(one["at_s"], one[name]) for one in series], window)
                lines[name] = line | _judged(line["change"], limit, line["median"])
    for name, limit in RATES.items():
        line = _line([(one["at_s"], one[name]) for one in rates if not one["has_restart"]], window)
        lines[name] = line | _judged(-line["change"], limit, line["median"])
    groups = {**{group: tuple(figures) for group, figures in LIMITS.items()}, "the_rate": tuple(RATES)}
    return {
        "window_s": [round(at, 1) for at in window],
        "lines": lines,
        "verdict": {
            f"{group}_is_flat": all(lines[name]["is_flat"] for name in names if name in lines)
            for group, names in groups.items()
        },
    }


def point(served: Served, worker: Json, beside: Json) -> Json:
    """The figures of a moment: the worker's sample of itself, and what was seen of its store and server."""
    return {
        "at_s": round(beside["at"] - served.began_at, 1), "rss_mb": mb(worker["rss"]), "fds": worker["fds"],
        **({} if worker["heap"] is None else {"heap_mb": mb(worker["heap"])}),
        "threads": worker["threads"], "files": beside["files"], "store_mb": mb(beside["du_bytes"]),
        "database_mb": mb(beside["database_bytes"]), "wal_mb": mb(beside["wal_bytes"]),
        "redis_mb": mb(beside["redis_bytes"]), "keys": beside["keys"],
    }  # fmt: skip


def rate(part: Json) -> Json:
    """The rates of one of `long_run.slices`. Tokens are those prefilled and those generated."""
    n_tokens = part["prefilled"] + part["generated"]
    return {
        "at_s": part["ended_s"], "jobs": part["jobs"], "has_restart": part["has_restart"],
        "jobs_per_s": part["jobs_per_s"], "tokens_per_s": round(n_tokens / part["s"], 1),
        "tokens_per_cpu_s": round(n_tokens / part["cpu_s"], 1) if part["cpu_s"] > 0 else 0.0,
    }  # fmt: skip


def life(served: Served, samples: Sequence[Json], begin: float, end: float) -> Json:
    """What the worker held ten seconds after it was ready, and at the end of that life."""
    first, last = nearest(samples, min(begin + 10.0, end)), nearest(samples, end - 1.0)
    return {
        "from_s": round(begin - served.began_at, 1), "to_s": round(end - served.began_at, 1),
        "jobs": sum(begin < at <= end for at in served.ends), "rss_mb": [mb(first["rss"]), mb(last["rss"])],
        "fds": [first["fds"], last["fds"]], "threads": [first["threads"], last["threads"]],
    }  # fmt: skip


def _line(points: Sequence[tuple[float, float]], window: tuple[float, float]) -> Json:
    inside = [pair for pair in points if window[0] <= pair[0] <= window[1]] or list(points[-1:])
    values = [value for _, value in inside]
    slope = statistics.linear_regression(*zip(*inside, strict=True)).slope if len(inside) > 1 else 0.0
    return {"median": round(statistics.median(values), 1), "min": min(values), "max": max(values), "n": len(values),
            "change": round(slope * (window[1] - window[0]), 2)}  # fmt: skip


def _judged(change: float, limit: Limit, median: float) -> Json:
    most = max(limit.share * median, limit.least)
    return {"most": round(most, 1), "is_flat": change <= most}

"""EXP-021's tables and plot, made from its results alone."""

from collections import Counter
from pathlib import Path

from common import Json
from report import Report, criteria, figure, listed, say, table

_ROWS = 10


SUMMARY = (
    "{jobs} jobs of {agents} agents took {took_s} s; prompts had {prompt_tokens[median]:.0f} tokens (median; 95th "
    "percentile {prompt_tokens[p95]:.0f}, most {prompt_tokens[most]:.0f}). Every job has its answer, and {run_again} "
    "of them ran again after the kill. From job {steady_jobs[0]} to job {steady_jobs[1]}, per 1,000 jobs: resident "
    "memory {growth_mb_per_1000_jobs[rss]:+.1f} MB, MLX's active memory {growth_mb_per_1000_jobs[active]:+.1f} MB, "
    "time by the work done {slower:+.1f} %, CPU time by the work done {more_cpu:+.1f} %."
)
NUMBER = "nothing lost; {growth_mb_per_1000_jobs[rss]:+.1f} MB of memory and {slower:+.1f} % of time per 1,000 jobs"
GROWTH = {
    "resident memory": "{rss:+.1f}", "MLX's active memory": "{active:+.1f}", "MLX's peak of a slice": "{peak:+.1f}",
    "memory that MLX keeps for reuse": "{kept:+.1f}",
}  # fmt: skip
SOURCES = (
    "\n\nFrom caches: {cached:.1f} % of all prompt tokens. Stored tokens prefilled again, at most: "
    "{stored_tokens_prefilled_again}. RAM cache: {ram_cache_mb:.0f} MB. The worker: {width}. It was ready {restart_s} "
    "s after the kill."
)


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    known = content | {"cached": 100 * content["cached_share"], "slower": 100 * content["slower_per_1000_jobs"],
                       "more_cpu": 100 * content["more_cpu_per_1000_jobs"]}  # fmt: skip
    found = Counter(content["sources"])
    sources = [
        (name, found[name], f"{100 * found[name] / content['jobs']:.1f} %") for name in ("memory", "disk", "none")
    ]
    return Report("a day in small", say(known, NUMBER), {
        "summary": say(known, SUMMARY), "time": _over_time(content["slices"]),
        "growth": listed(content["growth_mb_per_1000_jobs"], ("", "MB per 1,000 jobs"), GROWTH),
        "sources": table(("cache from", "jobs", "share"), sources) + say(known, SOURCES),
        "checks": criteria(content),
    })  # fmt: skip


def _over_time(slices: list[Json]) -> str:
    size = max(1, len(slices) // _ROWS)
    rows = []
    for first in range(0, len(slices), size):
        some = slices[first : first + size]
        last, seconds = some[-1], sum(one["s"] for one in some)
        predicted = sum(one["predicted_s"] for one in some)
        note = " (killed and restarted)" if any(one["has_restart"] for one in some) else ""
        rows.append([
            f"{last['jobs']}{note}", f"{seconds:.1f}", sum(one["prefilled"] for one in some),
            sum(one["generated"] for one in some), f"{sum(one['generated'] for one in some) / seconds:.1f}",
            f"{seconds / predicted:.2f}", _cpu(some), f"{last['rss_mb']:.0f}", f"{last['active_mb']:.0f}",
            f"{max(one['peak_mb'] for one in some):.0f}", f"{last['store_mb']:.0f}",
        ])  # fmt: skip
    head = ["jobs ended", "s", "tokens prefilled", "generated", "generated per s", "time by the work",
            "CPU time by the work", "RSS, MB", "MLX active, MB", "MLX peak, MB", "store, MB"]  # fmt: skip
    return table(head, rows)


def _cpu(some: list[Json]) -> str:
    """CPU seconds over predicted ones; without the slice of a restart, in which a new process begins to count."""
    whole = [one for one in some if not one["has_restart"]]
    if not whole:
        return "-"
    return f"{sum(one['cpu_s'] for one in whole) / sum(one['predicted_cpu_s'] for one in whole):.2f}"


def plot(content: Json, results: Path) -> None:
    slices = content["slices"]
    jobs, whole = [one["jobs"] for one in slices], [one for one in slices if not one["has_restart"]]
    named = {"rss": "resident", "peak": "MLX peak", "active": "MLX active", "kept": "kept by MLX"}
    with figure(content, results, "day", (14, 3.4), panels=(1, 4)) as (memory, speed, store, sources):
        for name, label in named.items():
            memory.plot(jobs, [one[f"{name}_mb"] for one in slices], label=label)
        for name, label in (("of_predicted", "time"), ("cpu_of_predicted", "CPU time")):
            speed.plot([one["jobs"] for one in whole], [one[name] for one in whole], label=label)
        speed.axhline(1.0, linestyle="--", color="gray")
        store.plot(jobs, [one["store_mb"] for one in slices])
        names = ("memory", "disk", "none")
        sources.stackplot(jobs, [[one["sources"].get(name, 0) for one in slices] for name in names], labels=names)
        labels = {memory: "MB", speed: "by the work done", store: "store, MB", sources: "jobs of a slice, by source"}
        for axes, label in labels.items():
            axes.set(xlabel="jobs ended", ylabel=label, ylim=(0, None))
        memory.legend()
        speed.legend()
        sources.legend(loc="lower right")

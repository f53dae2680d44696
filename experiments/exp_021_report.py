"""EXP-021's tables and plot, made from its results alone."""

from collections import Counter
from pathlib import Path

from common import Json, machine_lines, table, verdict_title

_ROWS = 10


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_021_day.png")
    parts = {
        "summary": _summary(content), "machine": _machine(content), "time": _over_time(content["slices"]),
        "growth": _growth(content), "sources": _sources(content), "checks": _checks(content["verdict"]),
        "plot": "![memory, speed, store and sources over the jobs](results/exp_021_day.png)",
    }  # fmt: skip
    return verdict_title(content, "a day in small"), parts


def _summary(content: Json) -> str:
    first, last = content["steady_jobs"]
    growth, tokens = content["growth_mb_per_1000_jobs"], content["prompt_tokens"]
    return (
        f"{content['jobs']} jobs of {content['agents']} agents took {content['took_s']} s; prompts had "
        f"{tokens['median']:.0f} tokens (median; 95th percentile {tokens['p95']:.0f}, most {tokens['most']:.0f}). "
        f"Every job has its answer, and {content['run_again']} of them ran again after the kill. From job {first} "
        f"to job {last}, per 1,000 jobs: resident memory {growth['rss']:+.1f} MB, MLX's active memory "
        f"{growth['active']:+.1f} MB, time by the work done {100 * content['slower_per_1000_jobs']:+.1f} %, "
        f"CPU time by the work done {100 * content['more_cpu_per_1000_jobs']:+.1f} %."
    )


def _machine(content: Json) -> str:
    return f"{machine_lines(content)} Load average at the end {content['load_average_at_end']}."


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


def _growth(content: Json) -> str:
    names = {"rss": "resident memory", "active": "MLX's active memory", "peak": "MLX's peak of a slice",
             "kept": "memory that MLX keeps for reuse"}  # fmt: skip
    growth = content["growth_mb_per_1000_jobs"]
    return table(["", "MB per 1,000 jobs"], [[names[name], f"{growth[name]:+.1f}"] for name in names])


def _sources(content: Json) -> str:
    found = Counter(content["sources"])
    rows = [[name, found[name], f"{100 * found[name] / content['jobs']:.1f} %"] for name in ("memory", "disk", "none")]
    return table(["cache from", "jobs", "share"], rows) + (
        f"\n\nFrom caches: {100 * content['cached_share']:.1f} % of all prompt tokens. Stored tokens prefilled again, "
        f"at most: {content['stored_tokens_prefilled_again']}. RAM cache: {content['ram_cache_mb']:.0f} MB. The "
        f"worker: {content['width']}. It was ready {content['restart_s']} s after the kill."
    )


def _checks(verdict: Json) -> str:
    rows = [
        [name.replace("_", " "), "yes" if passed else "**no**"] for name, passed in verdict.items() if name != "passed"
    ]
    return table(["asked", "held"], rows)


def plot(content: Json, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    slices = content["slices"]
    jobs = [one["jobs"] for one in slices]
    figure, (memory, speed, store, sources) = pyplot.subplots(1, 4, figsize=(14, 3.2))
    for name, label in (("rss", "resident"), ("peak", "MLX peak"), ("active", "MLX active"), ("kept", "kept by MLX")):
        memory.plot(jobs, [one[f"{name}_mb"] for one in slices], label=label)
    memory.set_ylabel("MB")
    memory.legend()
    whole = [one for one in slices if not one["has_restart"]]
    speed.plot(
        [one["jobs"] for one in whole], [one["of_predicted"] for one in whole], marker="o", markersize=3, label="time"
    )
    speed.plot([one["jobs"] for one in whole], [one["cpu_of_predicted"] for one in whole], label="CPU time")
    speed.legend()
    speed.axhline(1.0, linestyle="--", color="gray")
    speed.set_ylabel("by the work done")
    store.plot(jobs, [one["store_mb"] for one in slices])
    store.set_ylabel("store, MB")
    names = ("memory", "disk", "none")
    sources.stackplot(jobs, [[one["sources"].get(name, 0) for one in slices] for name in names], labels=names)
    sources.set_ylabel("jobs of a slice, by source")
    sources.legend(loc="lower right")
    for axis in (memory, speed, store, sources):
        axis.set_xlabel("jobs ended")
        axis.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)

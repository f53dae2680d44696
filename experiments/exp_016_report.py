"""EXP-016's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, columns, criteria, figure, listed, percent, say

SUMMARY = (
    "{worker[with_memory_per_s][median]:.0f} jobs/s with memory. {last[agents]:,} agents cost "
    "{direct[rss_growth_mb]:+.0f} MB of memory and {restart[stores_part_s]:+.2f} s of a start; {turns:,} turns open in "
    "{long[over_ten_turns_as_long]} times the time of 10 as long."
)
NUMBER = (
    "from {first[agents]:,} to {last[agents]:,} agents: {direct[rss_growth_mb]:+.0f} MB; "
    "{worker[with_memory_per_s][median]:.0f} jobs per second (asked: 200)"
)
WORKER = {
    "jobs/s with memory, {rate_jobs} jobs": "{with_memory_per_s:.0f}",
    "jobs/s without memory, {rate_jobs} jobs": "{without_memory_per_s:.0f}",
    "jobs/s from agent {agents[0]:,} to agent {agents[1]:,}, submitting included": "{jobs_per_s_of_all}",
    "memory of the worker at rest after {agents[0]:,} agents": "{rss_mb[0]} MB",
    "memory of the worker at rest after {agents[1]:,} agents": "{rss_mb[1]} MB",
    "files after {agents[1]:,} agents": "{files:,}",
    "database after {agents[1]:,} agents": "{database_mb:.1f} MB",
    "`memory ls`, s": "{ls_s[used]:.2f}",
}
DIRECT = {
    "agents": "{agents:,}", "after s": "{s:,.0f}", "RSS MB": "{rss_mb}", "files": "{files:,}",
    "database MB": "{database_mb:,.0f}", "du MB": "{du_mb:,.1f}", "usage over du": "{over_du}",
}  # fmt: skip
RESTART = {
    "start of the worker's process to the first result": "{large_s:.2f}",
    "the same on an empty store": "{empty_s:.2f}",
    "the difference of the medians": "{stores_part_s:+.3f}",
    "opening the store, in one process": "{open_s:.3f}",
    "`memory ls`, last used first": "{ls_s[used]:.2f}",
    "`memory ls --sort size`": "{ls_s[size]:.2f}",
    "`memory ls --help`": "{ls_s[help]:.2f}",
}
LONG = {"turns": "{turns:,}", "tokens": "{tokens:,}", "opening, ms": "{open_ms:.2f}"}


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    samples, long, worker = content["direct"]["samples"], content["long"], content["worker"]
    known = {**content, "first": samples[0], "last": samples[-1], "turns": long["points"][-1]["turns"]}
    sizes = [
        {**one, "database_mb": one["database_bytes"] / 1e6, "du_mb": one["du_bytes"] / 1e6,
         "over_du": percent(one["total_bytes"] / one["du_bytes"])}
        for one in samples
    ]  # fmt: skip
    alike = {**long["points"][-1], "turns": 10, "open_ms": long["ten_turns_as_long_ms"]}
    of_start = (f"with {samples[-1]['agents']:,} agents", "s")
    return Report("a store at scale", say(known, NUMBER), {
        "summary": say(known, SUMMARY),
        "worker": listed({**worker, "database_mb": worker["database_bytes"] / 1e6}, ("through the worker", ""), WORKER),
        "direct": columns(sizes, DIRECT),
        "restart": listed({**content["direct"], **content["restart"]}, of_start, RESTART),
        "long": columns([*long["points"], alike], LONG),
        "checks": criteria(content),
    })  # fmt: skip


def plot(content: Json, results: Path) -> None:
    samples, long = content["direct"]["samples"], content["long"]
    agents = [one["agents"] / 1000 for one in samples]
    shown = {"memory of the process, MB": ("rss_mb", 1), "files, thousands": ("files", 1000),
             "database, MB": ("database_bytes", 1e6)}  # fmt: skip
    with figure(content, results, "growth", (13, 3.2), panels=(1, 4)) as (*panels, turns):
        for axes, (label, (key, scale)) in zip(panels, shown.items(), strict=True):
            axes.plot(agents, [one[key] / scale for one in samples], marker="o")
            axes.set(xlabel="agents, thousands", ylabel=label, ylim=(0, None))
        opening = [point["open_ms"]["median"] for point in long["points"]]
        turns.plot([point["turns"] for point in long["points"]], opening, marker="o", label="one agent")
        alike = long["ten_turns_as_long_ms"]["median"]
        turns.axhline(alike, linestyle="--", color="gray", label="10 turns, as long at the end")
        turns.set(xscale="log", xlabel="turns", ylabel="opening, ms", ylim=(0, None))
        turns.legend()

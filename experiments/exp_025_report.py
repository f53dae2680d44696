"""EXP-025's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, columns, criteria, figure, say


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    jobs, elsewhere = content["jobs"], content["elsewhere"]
    slowest = jobs[-1]
    both = {**slowest, **elsewhere, "before": content["before"], "alone": content["alone"]["commands"]["median"]}
    summary = say(
        both,
        "With a shared store that takes {about}, four workers do {speed[median]} times the jobs of one. A job takes "
        "{four_commands[median]:g} Redis commands with four workers ({before:g} while agents had homes), and "
        "{alone:g} with one that has no shared store. {waiting} jobs that are left to another worker take "
        "{busy_share:.3f} of a processor.",
    )
    number = say(both, "{speed[median]} times one worker's jobs (asked: 3.6); {four_commands[median]:g} commands a job")
    parts = {
        "summary": summary,
        "checks": criteria(content),
        "jobs": columns(jobs, JOBS),
        "alone": columns([content["alone"]], ALONE),
        "elsewhere": columns([_rounded(elsewhere)], ELSEWHERE),
    }
    return Report("several workers on one queue", number, parts)


def _rounded(elsewhere: Json) -> Json:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in elsewhere.items()}


JOBS = {"shared store": "{about}", "jobs per worker": "{jobs_per_worker}", "one, jobs/s": "{one_per_s}",
        "four, jobs/s": "{four_per_s}", "ratio": "{speed}", "rounds": "{speed[n]}",
        "commands a job: one": "{one_commands}", "four": "{four_commands}",
        "its requests a job": "{four_requests[median]}", "processors of four": "{four_processors[median]}"}  # fmt: skip
ALONE = {"one worker without a shared store, jobs/s": "{per_s}", "commands a job": "{commands}"}
ELSEWHERE = {"jobs": "{waiting}", "first reading s": "{first_s}", "longest look ms": "{worst_ms}",
             "share of a processor": "{busy_share}", "a job behind them ms": "{late_ms}",
             "bytes in Redis an agent": "{bytes_each}"}  # fmt: skip


def plot(content: Json, results: Path) -> None:
    jobs = content["jobs"]
    with figure(content, results, "rates", (4.5, 3.2), title="jobs a second by workers") as axes:
        for number, name in enumerate(("one", "four")):
            places = [place + 0.38 * number for place in range(len(jobs))]
            axes.bar(places, [row[f"{name}_per_s"]["median"] for row in jobs], width=0.36, label=name)
        axes.set_xticks([place + 0.19 for place in range(len(jobs))], [row["about"] for row in jobs], fontsize=8)
        axes.set_ylabel("jobs/s")
        axes.legend(fontsize=8)

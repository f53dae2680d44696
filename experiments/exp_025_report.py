"""EXP-025's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, columns, figure, say


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    jobs, elsewhere = content["jobs"], content["elsewhere"]
    both = {**jobs, **elsewhere}
    summary = say(
        both,
        "Four workers do {speed[median]} times the jobs of one. A job takes {one_commands[median]:g} Redis commands "
        "with one worker and {four_commands[median]:g} with four; it took {before:g} before workers could share a "
        "queue. {waiting} jobs of agents that are at home elsewhere take {busy_share:.3f} of a processor.",
    )
    number = say(both, "{speed[median]} times one worker's jobs (asked: 3.6); {four_commands[median]:g} commands a job")
    parts = {"summary": summary, "jobs": columns([jobs], JOBS), "elsewhere": columns([_rounded(elsewhere)], ELSEWHERE)}
    return Report("several workers on one queue", number, parts)


def _rounded(elsewhere: Json) -> Json:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in elsewhere.items()}


JOBS = {"jobs per worker": "{jobs_per_worker}", "one, jobs/s": "{one_per_s:g}", "four, jobs/s": "{four_per_s:g}",
        "ratio": "{speed:g}", "rounds": "{speed[n]}", "commands a job: one": "{one_commands:g}",
        "four": "{four_commands:g}", "before": "{before:g}"}  # fmt: skip
ELSEWHERE = {"jobs": "{waiting}", "first reading s": "{first_s}", "longest look ms": "{worst_ms}",
             "share of a processor": "{busy_share}", "a job behind them ms": "{late_ms}",
             "bytes in Redis an agent": "{bytes_each}"}  # fmt: skip


def plot(content: Json, results: Path) -> None:
    jobs = content["jobs"]
    with figure(content, results, "rates", (4, 3.2), title="jobs a second by workers") as axes:
        axes.bar(["one", "four"], [jobs["one_per_s"]["median"], jobs["four_per_s"]["median"]], width=0.5)
        axes.set_ylabel("jobs/s")

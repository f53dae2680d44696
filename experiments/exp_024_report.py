"""EXP-024's tables and plot, made from its results alone."""

from pathlib import Path
from typing import Any

from common import Json
from report import Report, columns, figure, machine_line, say, yes

NAMES = {
    "rss_mb": "worker's resident memory, MB", "heap_mb": "in use on its C heap, MB", "fds": "open descriptors",
    "threads": "threads",
    "files": "files of the store", "store_mb": "store on disk, MB", "database_mb": "database with its log, MB",
    "wal_mb": "the database's log (WAL), MB", "redis_mb": "Redis' memory, MB", "keys": "keys in Redis",
    "jobs_per_s": "jobs per second", "tokens_per_cpu_s": "tokens per CPU second of the worker",
}  # fmt: skip
PARTS = {"scripted": "Scripted engine", "real": "Real model"}
PLOTS = (("rss_mb", "heap_mb"), ("fds", "threads"), ("store_mb", "database_mb", "wal_mb"), ("redis_mb",),
         ("jobs_per_s",), ("tokens_per_cpu_s",))  # fmt: skip
RATES = ("jobs_per_s", "tokens_per_cpu_s")


def render(content: Json, results: Path) -> Report:
    parts = content["parts"]
    plot(content, results)
    of_both = {"summary": _summary, "machine": machine_line, "loads": _load, "checks": _checks}
    of_each = {"flat": _flat, "lives": _lives}
    number = " and ".join(f"{one['jobs']} {'real' if key == 'real' else 'scripted'} ones" for key, one in parts.items())
    return Report("a soak", number, {
        **{name: "\n".join(f"* **{PARTS[key]}.** {make(one)}" for key, one in parts.items())
           for name, make in of_both.items()},
        **{f"{name} {key}": make(parts[key]) if key in parts else "Not run yet."
           for name, make in of_each.items() for key in PARTS},
    })  # fmt: skip


def _summary(part: Json) -> str:
    rising = [NAMES[name] for name, line in part["lines"].items() if not line["is_flat"]]
    memory, again = part["lines"]["rss_mb"], part["run_again"]
    return (
        f"{part['jobs']} jobs of {part['agents']} agents in {part['took_s']} s, with {len(part['restarts'])} restarts. "
        f"{_counted(part['verdict'])}; {again} ran again after a kill. Resident memory is {memory['median']} MB and "
        f"changes by {memory['change']:+.1f} MB in {_minutes(part)} minutes. "
        + (f"Not flat: {', '.join(rising)}." if rising else "Every figure is flat.")
    )


def _counted(verdict: Json) -> str:
    good = verdict["every_job_has_one_result"], verdict["each_agents_turns_are_in_order"]
    return "Every job has one result, in each agent's order" if all(good) else "NOT every job has one result in order"


def _minutes(part: Json) -> str:
    begin, end = part["window_s"]
    return f"{(end - begin) / 60:.1f}"


def _load(part: Json) -> str:
    return say(part["load"], (
        "{agents} agents take turns at any time, each 2 to {turns} of them; answers of {answer[0]} to {answer[1]} "
        "tokens; at most {ahead} jobs wait or run; a result stays in Redis for {result_ttl_s} s (`result_ttl_s`); the "
        "worker has `{limits}`."
    ))  # fmt: skip


def _checks(part: Json) -> str:
    missed = [name.replace("_", " ") for name, held in part["verdict"].items() if not held]
    found = ", ".join(f"{n} from {name}" for name, n in part["sources"].items())
    return (
        f"{len(part['verdict']) - len(missed)} of {len(part['verdict'])} criteria held"
        + (f"; **missed**: {'; '.join(missed)}" if missed else "")
        + "".join(f"; without an answer: `{reason}`" for reason in part.get("unanswered", ()))
        + f". Caches: {found}. Stored tokens prefilled again, at most: {part['stored_tokens_prefilled_again']}."
    )


def _flat(part: Json) -> str:
    lines = [
        {**line, "name": NAMES[name], "limit": f"{'-' if name in RATES else '+'}{line['most']}",
         "flat": yes(line["is_flat"], "**no**")}
        for name, line in part["lines"].items()
    ]  # fmt: skip
    begin, end = part["window_s"]
    return f"From second {begin:.0f} to second {end:.0f}:\n\n" + columns(lines, {
        "": "{name}", "median": "{median}", "least": "{min}", "most": "{max}", "change": "{change:+.2f}",
        "limit": "{limit}", "flat": "{flat}",
    })  # fmt: skip


def _lives(part: Json) -> str:
    starts = [None, *(f"{one['took_s']} ({one['signal']})" for one in part["restarts"])]
    lives = [{**one, "n": n, "start": start}
             for n, (one, start) in enumerate(zip(part["lives"], starts, strict=True), start=1)]  # fmt: skip
    return columns(lives, {
        "life": "{n}", "begins, s": "{from_s}", "ends, s": "{to_s}", "ready after, s": "{start}", "jobs": "{jobs}",
        "RSS, MB: after 10 s, at the end": "{rss_mb[0]}, {rss_mb[1]}", "descriptors": "{fds[0]}, {fds[1]}",
        "threads": "{threads[0]}, {threads[1]}",
    })  # fmt: skip


def plot(content: Json, results: Path) -> None:
    parts = content["parts"]
    with figure(content, results, "soak", (18, 3.2 * len(parts)), panels=(len(parts), len(PLOTS))) as rows:
        for axes_of_part, (key, part) in zip(rows if len(parts) > 1 else [rows], parts.items(), strict=True):
            for axes, names in zip(axes_of_part, PLOTS, strict=True):
                _plot(axes, part, names)
            axes_of_part[0].set_title(PARTS[key])


def _plot(axes: Any, part: Json, names: tuple[str, ...]) -> None:
    """Figures over the minutes; the window is grey, restarts are lines."""
    for name in filter(part["lines"].__contains__, names):
        points = [one for one in part["rates"] if not one["has_restart"]] if name in RATES else part["series"]
        axes.plot([one["at_s"] / 60 for one in points], [one[name] for one in points], lw=1, label=NAMES[name])
    axes.axvspan(*(at / 60 for at in part["window_s"]), color="0.92", zorder=0)
    for restart in part["restarts"]:
        axes.axvline(restart["at_s"] / 60, color="C3", lw=0.8, ls="--")
    axes.set(xlabel="minutes", ylim=(0, None))
    axes.legend(fontsize=7)

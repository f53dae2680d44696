"""The tables and the plot of EXP-016, made from its results alone."""

from pathlib import Path
from typing import Any

from common import Json, server_lines, table


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_016_growth.png")
    word = "PASSED" if content["verdict"]["passed"] else "FAILED"
    rate, last = content["worker"]["with_memory_per_s"]["median"], content["direct"]["samples"][-1]
    title = (
        f"# {content['experiment']}: a store at scale: {word}: {rate:.0f} jobs/s with memory; {last['agents']:,} "
        f"agents cost {content['direct']['rss_growth_mb']:+.0f} MB of memory and "
        f"{content['restart']['stores_part_s']:+.2f} s of "
        f"a start; {content['long']['points'][-1]['turns']:,} turns open in "
        f"{content['long']['over_ten_turns_as_long']} times the time of 10 as long"
    )
    parts = {
        "machine": server_lines(content), "worker": _worker(content), "direct": _direct(content),
        "restart": _restart(content), "long": _long(content["long"]), "checks": _checks(content["verdict"]),
    }  # fmt: skip
    return title, parts


def _cell(spread: Json, digits: int = 2) -> str:
    return " ".join([f"{spread['median']:.{digits}f}", f"({spread['min']:.{digits}f} to {spread['max']:.{digits}f})"])


def _worker(content: Json) -> str:
    found = content["worker"]
    few, many = found["agents"]
    rows: list[list[Any]] = [
        [f"jobs/s with memory, {found['rate_jobs']} jobs", _cell(found["with_memory_per_s"], 0)],
        [f"jobs/s without memory, {found['rate_jobs']} jobs", _cell(found["without_memory_per_s"], 0)],
        [f"jobs/s from agent {few:,} to agent {many:,}, submitting included", found["jobs_per_s_of_all"]],
        [f"memory of the worker at rest after {few:,} agents", f"{found['rss_mb'][0]} MB"],
        [f"memory of the worker at rest after {many:,} agents", f"{found['rss_mb'][1]} MB"],
        [f"files after {many:,} agents", f"{found['files']:,}"],
        [f"database after {many:,} agents", f"{found['database_bytes'] / 1e6:.1f} MB"],
        ["`memory ls`, s", _cell(found["ls_s"]["used"])],
    ]
    return table(["through the worker", ""], rows)


def _direct(content: Json) -> str:
    rows = [
        [
            f"{sample['agents']:,}", f"{sample['s']:,.0f}", f"{sample['rss_mb']}", f"{sample['files']:,}",
            f"{sample['database_bytes'] / 1e6:,.0f}", f"{sample['du_bytes'] / 1e6:,.1f}",
            f"{100 * (sample['total_bytes'] / sample['du_bytes'] - 1):+.2f} %",
        ]
        for sample in content["direct"]["samples"]
    ]  # fmt: skip
    return table(["agents", "after s", "RSS MB", "files", "database MB", "du MB", "usage over du"], rows)


def _restart(content: Json) -> str:
    restart, direct = content["restart"], content["direct"]
    rows = [
        ["start of the worker's process to the first result", _cell(restart["large_s"])],
        ["the same on an empty store", _cell(restart["empty_s"])],
        ["the difference of the medians", f"{restart['stores_part_s']:+.3f}"],
        ["opening the store, in one process", _cell(direct["open_s"], 3)],
        ["`memory ls`, last used first", _cell(direct["ls_s"]["used"])],
        ["`memory ls --sort size`", _cell(direct["ls_s"]["size"])],
        ["`memory ls --help`", _cell(direct["ls_s"]["help"])],
    ]
    return table([f"with {direct['samples'][-1]['agents']:,} agents", "s"], rows)


def _long(long: Json) -> str:
    rows = [[f"{point['turns']:,}", f"{point['tokens']:,}", _cell(point["open_ms"])] for point in long["points"]]
    rows.append(["10", f"{long['points'][-1]['tokens']:,}", _cell(long["ten_turns_as_long_ms"])])
    return table(["turns", "tokens", "opening, ms"], rows)


def _checks(verdict: Json) -> str:
    rows = [
        [name.replace("_", " "), "yes" if passed else "**no**"] for name, passed in verdict.items() if name != "passed"
    ]
    return table(["asked", "held"], rows)


def plot(content: Json, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples, points = content["direct"]["samples"], content["long"]["points"]
    agents = [sample["agents"] / 1000 for sample in samples]
    figure, axes = pyplot.subplots(1, 4, figsize=(13, 3.0))
    for axis, key, scale, label in (
        (axes[0], "rss_mb", 1, "memory of the process, MB"),
        (axes[1], "files", 1000, "files, thousands"),
        (axes[2], "database_bytes", 1e6, "database, MB"),
    ):
        axis.plot(agents, [sample[key] / scale for sample in samples], marker="o")
        axis.set_xlabel("agents, thousands")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[3].plot([x["turns"] for x in points], [x["open_ms"]["median"] for x in points], marker="o", label="one agent")
    alike = content["long"]["ten_turns_as_long_ms"]["median"]
    axes[3].axhline(alike, linestyle="--", color="gray", label="10 turns, as long at the end")
    axes[3].set_xscale("log")
    axes[3].set_xlabel("turns")
    axes[3].set_ylabel("opening, ms")
    axes[3].set_ylim(bottom=0)
    axes[3].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)

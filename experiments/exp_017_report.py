"""EXP-017's tables and plot, made from its results alone."""

from pathlib import Path
from typing import Any

from common import Json
from report import Report, columns, figure, say, short, table

CONTESTANTS = ("mlx-lm", "rows")
COLORS = {"mlx-lm": "grey", "rows": "C0"}


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    loads, joins = content["loads"], content["joins"]
    number = (
        f"with restored caches {loads[1]['ratio']['median']} times mlx-lm's speed; the longest step "
        f"{joins['in rows']['longest']['median']} quiet ones"
    )
    return Report("rows against one rectangle", number, {
        "summary": _summary(loads, joins["in rows"]), "ratios": columns(loads, RATIOS),
        "memory": columns(loads, MEMORY), "joins": _joins(joins),
        "parts": "\n\n".join(_parts(split) for split in content["parts"]),
    })  # fmt: skip


def _summary(loads: list[Json], join: Json) -> str:
    met = [load for load in loads if load["ratio"]["median"] >= load["target"]]
    least = min(loads, key=lambda load: load["ratio"]["median"] / load["target"])
    same = all(load["same_rows"] == load["n_rows"] for load in loads)
    return "\n".join((
        f"Rows reach the speed asked for in {len(met)} of {len(loads)} loads. The furthest from it is "
        f"{least['name']}: {short(least['ratio'])} times mlx-lm's speed (asked: {least['target']}).",
        say(join, "While {tokens} restored tokens ({mb} MB) join {beside_rows} decoding rows, the longest step takes "
            "{longest:.3g} quiet ones (asked: at most 1.5), the step in which they join {join:.3g} (asked: at most "
            "1.3)."),
        f"{'Every' if same else 'NOT every'} row has the same tokens in all runs.",
    ))  # fmt: skip


RATIOS = {
    "load": "{name}", "mlx-lm, s": "{mlx-lm[s][median]:.3g}", "rows, s": "{rows[s][median]:.3g}",
    "rows / mlx-lm, in speed": "{ratio:.3g}", "rounds": "{ratio[n]}", "asked": "{target}",
    "steps: mlx-lm, rows": "{mlx-lm[steps]}, {rows[steps]}", "same rows": "{same_rows} of {n_rows}",
}  # fmt: skip
MEMORY = {
    "load": "{name}", "all rows, MB": "{mb_of_rows}", "peak, MB: mlx-lm": "{mlx-lm[peak_mb][median]:.0f}",
    "peak, MB: rows": "{rows[peak_mb][median]:.0f}", "of all rows: mlx-lm": "{mlx-lm[peak_to_rows]}",
    "of all rows: rows": "{rows[peak_to_rows]}",
}  # fmt: skip


def _joins(joins: Json) -> str:
    names = {
        "quiet_ms": "quiet step, ms",
        "longest": "longest step until its first token, in quiet ones",
        "join": "the step in which it joins",
        "beside": "a step once it decodes",
    }
    lines = [(title, *(short(join[name]) for join in joins.values())) for name, title in names.items()]
    own = [f"{join['longest']['median'] / join['beside']['median']:.3g}" for join in joins.values()]
    return table(("", *joins), [*lines, ("the longest, in steps once it decodes (of the medians)", *own)])


def _parts(split: Json) -> str:
    lines = []
    for name in CONTESTANTS:
        one = split[name]
        each = [f"{1000 * seconds / one['steps']:.1f}" for seconds in (*one["parts"].values(), one["s"])]
        lines.append((name, *each, one["steps"]))
    return table((f"{split['load']}: ms per step", *split["rows"]["parts"], "all", "steps"), lines)


def plot(content: Json, results: Path) -> None:
    with figure(content, results, "rows", (12, 8.5), panels=(2, 2)) as ((ratios, joins), (parts, memory)):
        _plot_ratios(ratios, content["loads"])
        _plot_joins(joins, content["joins"])
        _plot_parts(parts, content["parts"])
        for name in CONTESTANTS:
            memory.plot(content["memory"][name]["s"], content["memory"][name]["mb"], color=COLORS[name], label=name)
        memory.set_xlabel(f"seconds; {content['memory']['load']}", fontsize=7)
        memory.set(ylabel="MB in use after a step", ylim=(0, None))
        for axes in (ratios, joins, parts, memory):
            axes.legend(fontsize=8)


def _plot_ratios(axes: Any, loads: list[Json]) -> None:
    places = range(len(loads))
    middle = [load["ratio"]["median"] for load in loads]
    ends = [[abs(load["ratio"][end] - load["ratio"]["median"]) for load in loads] for end in ("min", "max")]
    axes.barh(places, middle, xerr=ends, color=COLORS["rows"], ecolor="black", capsize=3)
    axes.plot([load["target"] for load in loads], places, "|", color="C3", ms=16, mew=2, label="asked for")
    axes.set_yticks(places, [load["key"].replace("_", " ") for load in loads])
    axes.invert_yaxis()
    axes.set(xlabel="times mlx-lm's speed, least to most")


def _plot_joins(axes: Any, joins: Json) -> None:
    for (name, join), color in zip(joins.items(), (COLORS["rows"], COLORS["mlx-lm"]), strict=True):
        for number, ratios in enumerate(join["steps"]):
            axes.plot(range(1, len(ratios) + 1), ratios, "o-", color=color, alpha=0.6, label=None if number else name)
    axes.axhline(1.5, color="C3", ls="--", label="longest asked for")
    axes.set(yscale="log", xlabel="step since the long row was submitted", ylabel="time of a step, 1 = quiet")


def _plot_parts(axes: Any, splits: list[Json]) -> None:
    rows = [(f"{split['load'][:24]}...\n{name}", split[name]["parts"]) for split in splits for name in CONTESTANTS]
    before = [0.0] * len(rows)
    for part in rows[0][1]:
        values = [seconds[part] for _, seconds in rows]
        axes.barh(range(len(rows)), values, left=before, label=part)
        before = [a + b for a, b in zip(before, values, strict=True)]
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a run, every part waited for")

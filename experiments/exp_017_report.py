"""EXP-017's tables and plot, made from its results alone."""

from pathlib import Path
from typing import Any

from common import Json, machine_lines, table, verdict_title

CONTESTANTS = ("mlx-lm", "rows")
COLORS = {"mlx-lm": "grey", "rows": "C0"}


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_017_rows.png")
    machine = f"{machine_lines(content)} Load average at the end {content['load_average_at_end']}."
    parts = {
        "summary": _summary(content),
        "machine": machine,
        "ratios": _ratios(content["loads"]),
        "memory": _memory(content["loads"]),
        "joins": _joins(content["joins"]),
        "parts": "\n\n".join(_parts(split) for split in content["parts"]),
    }
    return verdict_title(content, "rows against one rectangle"), parts


def _summary(content: Json) -> str:
    loads = content["loads"]
    met = [load for load in loads if load["ratio"]["median"] >= load["target"]]
    least = min(loads, key=lambda load: load["ratio"]["median"] / load["target"])
    same = all(load["same_rows"] == load["n_rows"] for load in loads)
    join = content["joins"]["in rows"]
    return "\n".join(
        (
            f"Rows reach the speed asked for in {len(met)} of {len(loads)} loads. The furthest from it is "
            f"{least['name']}: {_span(least['ratio'])} times mlx-lm's speed (asked: {least['target']}).",
            f"While {join['tokens']} restored tokens ({join['mb']} MB) join {join['beside_rows']} decoding rows, the "
            f"longest step takes {_span(join['longest'])} quiet ones (asked: at most 1.5), the step in which they join "
            f"{_span(join['join'])} (asked: at most 1.3).",
            "Every row has the same tokens in all runs." if same else "NOT every row has the same tokens in all runs.",
        )
    )


def _ratios(loads: list[Json]) -> str:
    head = ("load", "mlx-lm, s", "rows, s", "rows / mlx-lm, in speed", "rounds", "asked", "steps: mlx-lm, rows",
            "same rows")  # fmt: skip
    lines = [
        (
            load["name"],
            *(f"{load[name]['s']['median']:.3g}" for name in CONTESTANTS),
            _span(load["ratio"]),
            load["ratio"]["n"],
            load["target"],
            ", ".join(str(load[name]["steps"]) for name in CONTESTANTS),
            f"{load['same_rows']} of {load['n_rows']}",
        )
        for load in loads
    ]
    return table(head, lines)


def _memory(loads: list[Json]) -> str:
    head = ("load", "all rows, MB", "peak, MB: mlx-lm", "peak, MB: rows", "of all rows: mlx-lm", "of all rows: rows")
    lines = []
    for load in loads:
        peaks = [f"{load[name]['peak_mb']['median']:.0f}" for name in CONTESTANTS]
        lines.append((load["name"], load["mb_of_rows"], *peaks, *(load[name]["peak_to_rows"] for name in CONTESTANTS)))
    return table(head, lines)


def _joins(joins: Json) -> str:
    names = {
        "quiet_ms": "quiet step, ms",
        "longest": "longest step until its first token, in quiet ones",
        "join": "the step in which it joins",
        "beside": "a step once it decodes",
    }
    lines = [(title, *(_span(join[name]) for join in joins.values())) for name, title in names.items()]
    own = [f"{join['longest']['median'] / join['beside']['median']:.3g}" for join in joins.values()]
    return table(("", *joins), [*lines, ("the longest, in steps once it decodes (of the medians)", *own)])


def _parts(split: Json) -> str:
    head = (f"{split['load']}: ms per step", *split["rows"]["parts"], "all", "steps")
    lines = []
    for name in CONTESTANTS:
        one = split[name]
        each = [f"{1000 * seconds / one['steps']:.1f}" for seconds in one["parts"].values()]
        lines.append((name, *each, f"{1000 * one['s'] / one['steps']:.1f}", one["steps"]))
    return table(head, lines)


def plot(content: Json, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, ((ratios, joins), (parts, memory)) = plt.subplots(2, 2, figsize=(12, 8.5))
    _plot_ratios(ratios, content["loads"])
    _plot_joins(joins, content["joins"])
    _plot_parts(parts, content["parts"])
    _plot_memory(memory, content["memory"])
    figure.suptitle(f"EXP-017 on {content['machine']['device']}: {content['machine']['model']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _plot_ratios(axes: Any, loads: list[Json]) -> None:
    places = range(len(loads))
    middle = [load["ratio"]["median"] for load in loads]
    ends = [[abs(load["ratio"][end] - load["ratio"]["median"]) for load in loads] for end in ("min", "max")]
    axes.barh(places, middle, xerr=ends, color=COLORS["rows"], ecolor="black", capsize=3)
    axes.plot([load["target"] for load in loads], places, "|", color="C3", ms=16, mew=2, label="asked for")
    axes.set_yticks(places, [load["key"].replace("_", " ") for load in loads])
    axes.invert_yaxis()
    axes.set(xlabel="times mlx-lm's speed, least to most")
    axes.legend(fontsize=8)


def _plot_joins(axes: Any, joins: Json) -> None:
    for (name, join), color in zip(joins.items(), (COLORS["rows"], COLORS["mlx-lm"]), strict=True):
        for number, ratios in enumerate(join["steps"]):
            axes.plot(range(1, len(ratios) + 1), ratios, "o-", color=color, alpha=0.6, label=None if number else name)
    axes.axhline(1.5, color="C3", ls="--", label="longest asked for")
    axes.set(yscale="log", xlabel="step since the long row was submitted", ylabel="time of a step, 1 = quiet")
    axes.legend(fontsize=8)


def _plot_parts(axes: Any, splits: list[Json]) -> None:
    bars = [(f"{split['load'][:24]}...\n{name}", split[name]["parts"]) for split in splits for name in CONTESTANTS]
    before = [0.0] * len(bars)
    for part in bars[0][1]:
        values = [seconds[part] for _, seconds in bars]
        axes.barh(range(len(bars)), values, left=before, label=part)
        before = [a + b for a, b in zip(before, values, strict=True)]
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a run, every part waited for")
    axes.legend(fontsize=8)


def _plot_memory(axes: Any, memory: Json) -> None:
    for name in CONTESTANTS:
        axes.plot(memory[name]["s"], memory[name]["mb"], color=COLORS[name], label=name)
    axes.set(xlabel=f"seconds; {memory['load']}", ylabel="MB in use after a step", ylim=(0, None))
    axes.xaxis.label.set_fontsize(7)
    axes.legend(fontsize=8)


def _span(value: Json) -> str:
    return f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"

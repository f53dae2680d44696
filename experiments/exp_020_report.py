"""EXP-020's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, columns, figure

PASSES = {
    "rows": "{pass rows}", "a step, read a pass late": "{pass a step ahead:.3g}",
    "a step, waited for": "{pass waited for:.3g}", "waited for, rows apart": "{pass 1:.3g}",
    "2 tokens of each row": "{pass 2:.3g}", "3 tokens of each row": "{pass 3:.3g}",
    "5 tokens of each row": "{pass 5:.3g}",
}  # fmt: skip


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    loads = content["loads"]
    number = (
        f"{loads[0]['ratio']['median']} times the speed where an answer quotes its context; "
        f"{loads[1]['ratio']['median']} elsewhere"
    )
    passes = [{f"pass {name}": value for name, value in one.items()} for one in content["passes"]]
    parts = {"summary": _summary(loads), "loads": _loads(loads), "passes": columns(passes, PASSES)}
    return Report("drafts from a row's own context", number, parts)


def _summary(loads: list[Json]) -> str:
    lines = []
    for kind, what in (("quoting", "quote their context"), ("other", "do not")):
        of_kind = [load for load in loads if load["kind"] == kind]
        each = ", ".join(f"{load['ratio']['median']:.3g} ({_rows(load)})" for load in of_kind)
        accepted = sum(load["accepted"] for load in of_kind) / max(1, sum(load["drafted"] for load in of_kind))
        lines.append(
            f"Speed of decoding with drafts, as a multiple of that without, where answers {what}: {each}; "
            f"{100 * accepted:.0f} % of the drafted tokens were right."
        )
    same = all(load["same_answers"] == load["answers"] for load in loads)
    lines.append("All answers are the same with and without drafts." if same else "NOT all answers are the same.")
    return "\n".join(lines)


def _rows(load: Json) -> str:
    rows = "1 row" if load["width"] == 1 else f"{load['width']} rows"
    return f"{rows}, temperature {load['temperature']}" if load["temperature"] else rows


def _loads(loads: list[Json]) -> str:
    rows = [
        {**load, "who": load["kind"].replace("other", "others"), "at_a_time": _rows(load),
         "without": load["tokens_per_s"][0], "with": load["tokens_per_s"][1]}
        for load in loads
    ]  # fmt: skip
    return columns(rows, {
        "answers": "{who}", "at a time": "{at_a_time}",
        "tokens/s: without, with": "{without[median]:.3g}, {with[median]:.3g}", "with / without": "{ratio:.3g}",
        "rounds": "{ratio[n]}", "tokens": "{tokens}", "steps: without, with": "{steps[0]}, {steps[1]}",
        "drafted": "{drafted}", "right": "{accepted}", "same answers": "{same_answers} of {answers}",
    })  # fmt: skip


def plot(content: Json, results: Path) -> None:
    with figure(content, results, "drafts", (6.5, 3.5)) as axes:
        for kind, color, least in (("quoting", "C0", 1.2), ("other", "grey", 0.97)):
            loads = [load for load in content["loads"] if load["kind"] == kind and not load["temperature"]]
            widths = [str(load["width"]) for load in loads]
            axes.plot(widths, [load["ratio"]["median"] for load in loads], "o-", color=color, label=f"{kind} answers")
            axes.axhline(least, color=color, linestyle="--", label=f"asked for: {kind}")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(xlabel="rows", ylabel="speed, 1 = without drafts")
        axes.legend()

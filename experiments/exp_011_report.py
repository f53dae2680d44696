"""EXP-011's tables and plot, made from its results alone."""

from pathlib import Path
from typing import Any

from common import Json
from report import Report, columns, figure, say, span

MODES = ("rectangle", "rows")
COLORS = {"rectangle": "grey", "rows": "C0"}
SPEEDS = {
    "order": "{order}", "mode": "{mode}", "s": "{s}", "tokens/s": "{tokens_per_s}",
    "held after a step, MB": "{held_mb}", "peak, MB": "{peak_mb}", "copied, MB": "{copied_mb}",
    "rows / rectangle, in speed": "{to_rectangle}",
}  # fmt: skip
COUNTS = {
    "order": "{order}", "mode": "{mode}", "decode passes": "{decode_passes}",
    "their places occupied": "{places_occupied:.1%}", "prefill passes": "{prefill_passes}",
    "padding in prefill": "{prefill_padded:.1%}", "padding in attention": "{attention_padded:.1%}",
}  # fmt: skip


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    number = say(
        content["turnover"][-1], "rows that come and go have {to_base[rows][median]} of a steady batch's speed"
    )
    return Report("what padding and the order of arrival cost", number, {
        "summary": _summary(content), "sizes": _sizes(content["sizes"]),
        "arrival": columns(_by_mode(content["arrival"]), {**SPEEDS, "speed, 1 = sorted": "{to_base}"}),
        "arrival counts": columns(_by_mode(content["arrival"]), COUNTS),
        "turnover": columns(_by_mode(content["turnover"]), {**SPEEDS, "speed, 1 = steady": "{to_base}"}),
        "turnover counts": columns(_by_mode(content["turnover"]), COUNTS),
    })  # fmt: skip


def _summary(content: Json) -> str:
    arrival, churn = content["arrival"], content["turnover"][-1]
    worst = {mode: min(arrival, key=lambda load: load["to_base"][mode]["median"]) for mode in MODES}
    most = max(arrival, key=lambda load: load["rectangle"]["attention_padded"])
    lines = [
        f"In mlx-lm's rectangle the worst order ({worst['rectangle']['key']}) has "
        f"{span(worst['rectangle']['to_base']['rectangle'])} of the speed of the sorted one, in rows "
        f"({worst['rows']['key']}) {span(worst['rows']['to_base']['rows'])}.",
        f"Up to {most['rectangle']['attention_padded']:.0%} of what the rectangle's decode passes attend to is padding "
        f"({most['key']}); in rows {most['rows']['attention_padded']:.1%}. In that order it copies "
        f"{most['rectangle']['copied_mb']} MB, rows {most['rows']['copied_mb']} MB.",
        f"Sequences that come and go one by one have {span(churn['to_base']['rows'])} of the speed of as many that "
        f"come and go together, in rows (asked: 0.95), and {span(churn['to_base']['rectangle'])} in the rectangle.",
        "Every sequence has the same tokens in all runs."
        if content["verdict"]["all_tokens_equal"]
        else "NOT every sequence has the same tokens in all runs.",
    ]
    return "\n".join(lines)


def _sizes(sizes: Json) -> str:
    contexts = ", ".join(f"{n} with {tokens} restored tokens and 32 new ones" for tokens, n in sizes["contexts"])
    least, most = sizes["short"]
    return (
        f"Orders: {sizes['jobs']} sequences in {sizes['places']} places: {contexts}, {sizes['n_short']} with "
        f"{least} to {most} new tokens. Turnover: {sizes['churn_jobs']} sequences in {sizes['churn_places']} places."
    )


def _by_mode(loads: list[Json]) -> list[Json]:
    return [
        {**load[mode], "order": _named(load), "mode": mode, "to_base": load["to_base"][mode],
         "to_rectangle": load["rows_to_rectangle"] if mode == "rows" else None}
        for load in loads for mode in MODES
    ]  # fmt: skip


def _named(load: Json) -> str:
    return load["key"] if load["key"] == load["name"] else f"{load['key']}: {load['name']}"


def plot(content: Json, results: Path) -> None:
    loads = [*content["arrival"], *content["turnover"]]
    with figure(content, results, "arrival_order", (13, 4), panels=(1, 3)) as axes:
        _bars(axes[0], loads, "tokens per second", lambda one: one["tokens_per_s"]["median"])
        _bars(axes[1], loads, "padding in attention, %", lambda one: 100 * one["attention_padded"])
        _bars(axes[2], loads, "copied, MB", lambda one: one["copied_mb"])
        axes[0].legend(fontsize=8)


def _bars(axes: Any, loads: list[Json], title: str, value: Any) -> None:
    for number, mode in enumerate(MODES):
        places = [n + 0.4 * number - 0.2 for n in range(len(loads))]
        axes.bar(places, [value(load[mode]) for load in loads], 0.4, color=COLORS[mode], label=mode)
    axes.set_xticks(range(len(loads)), [load["key"] for load in loads], rotation=20)
    axes.set_ylabel(title)

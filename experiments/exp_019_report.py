"""EXP-019's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, columns, figure


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    accepted, alone, cost = (content[name] for name in ("accepted_percent", "large_alone_percent", "cost_percent"))
    after = content["followed_after_lines"]
    summary = (
        f"{accepted} % of the answers pass, {alone} % with the large model alone, at {cost} % of its cost (the oracle: "
        f"{content['oracle_cost_percent']} %). After the small model turns bad in one class, jobs of that class begin "
        f"with the large one within {'no' if after is None else after} lines."
    )
    number = f"{accepted} % accepted (large alone: {alone} %) at {cost} % of its cost"
    parts = {"summary": summary, "cost": _costs(content), "begun": _begun(content)}
    return Report("a cheaper model first", number, parts)


def _costs(content: Json) -> str:
    before, since = content["cost_percent_before_and_since"]
    row = {**content, "parts": f"{before}, {since}"}
    return columns([row], {
        "lines": "{lines}", "turned bad at": "{turned_bad_at}", "accepted %": "{accepted_percent}",
        "large alone %": "{large_alone_percent}", "cost, % of the large one's": "{cost_percent}",
        "before, since": "{parts}", "oracle's cost %": "{oracle_cost_percent}",
        "followed after lines": "{followed_after_lines}", "lines/s": "{lines_per_s}",
        "measured ms a token, small": "{measured_ms_per_token[small]}", "large": "{measured_ms_per_token[large]}",
    })  # fmt: skip


def _begun(content: Json) -> str:
    rows = [{"task": task, "before": before, "after": after}
            for task, (before, after) in content["begun_with_small_percent"].items()]  # fmt: skip
    return columns(rows, {"class": "{task}", "begun with small %, before it turns bad": "{before}", "since": "{after}"})


def plot(content: Json, results: Path) -> None:
    step = content["curve_step"]
    with figure(content, results, "regret", (6, 3.4), title="cost above that of an oracle") as axes:
        for name, curve in content["curves"].items():
            axes.plot([n * step for n in range(len(curve))], [value / 1000 for value in curve], label=name)
        axes.axvline(content["turned_bad_at"], linestyle=":", color="grey")
        axes.set_xlabel("lines; the small model turns bad at the dotted one")
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("seconds, stated costs")
        axes.legend()

"""EXP-020's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json, machine_lines, table, verdict_title

_PASSES = {
    "a step ahead": "a step, read a pass late",
    "waited for": "a step, waited for",
    "1": "waited for, rows apart",
    **{str(n): f"{n} tokens of each row" for n in (2, 3, 5)},
}


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_020_drafts.png")
    parts = {
        "summary": _summary(content),
        "machine": f"{machine_lines(content)} Load average at the end {content['load_average_at_end']}.",
        "loads": _loads(content["loads"]),
        "passes": _passes(content["passes"]),
    }
    return verdict_title(content, "drafts from a row's own context"), parts


def _summary(content: Json) -> str:
    lines = []
    for kind, what in (("quoting", "quote their context"), ("other", "do not")):
        of_kind = [load for load in content["loads"] if load["kind"] == kind]
        each = ", ".join(f"{load['ratio']['median']:.3g} ({_rows(load)})" for load in of_kind)
        accepted = sum(load["accepted"] for load in of_kind) / max(1, sum(load["drafted"] for load in of_kind))
        lines.append(
            f"Speed of decoding with drafts, as a multiple of that without, where answers {what}: {each}; "
            f"{100 * accepted:.0f} % of the drafted tokens were right."
        )
    same = all(load["same_answers"] == load["answers"] for load in content["loads"])
    lines.append("All answers are the same with and without drafts." if same else "NOT all answers are the same.")
    return "\n".join(lines)


def _rows(load: Json) -> str:
    rows = "1 row" if load["width"] == 1 else f"{load['width']} rows"
    return f"{rows}, temperature {load['temperature']}" if load["temperature"] else rows


def _loads(loads: list[Json]) -> str:
    head = ("answers", "at a time", "tokens/s: without, with", "with / without", "rounds", "tokens",
            "steps: without, with", "drafted", "right", "same answers")  # fmt: skip
    lines = [
        (
            "quoting" if load["kind"] == "quoting" else "others",
            _rows(load),
            ", ".join(f"{spread['median']:.3g}" for spread in load["tokens_per_s"]),
            _span(load["ratio"]),
            load["ratio"]["n"],
            load["tokens"],
            ", ".join(map(str, load["steps"])),
            load["drafted"],
            load["accepted"],
            f"{load['same_answers']} of {load['answers']}",
        )
        for load in loads
    ]
    return table(head, lines)


def _passes(of_rows: list[Json]) -> str:
    head = ("rows", *(title for name, title in _PASSES.items() if name in of_rows[0]))
    return table(head, [(one["rows"], *(_span(one[name]) for name in _PASSES if name in one)) for one in of_rows])


def _span(spread: Json) -> str:
    return f"{spread['median']:.3g} ({spread['min']:.3g} to {spread['max']:.3g})"


def plot(content: Json, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 3.5))
    for kind, color in (("quoting", "C0"), ("other", "grey")):
        loads = [load for load in content["loads"] if load["kind"] == kind and not load["temperature"]]
        widths = [str(load["width"]) for load in loads]
        axes.plot(widths, [load["ratio"]["median"] for load in loads], "o-", color=color, label=f"{kind} answers")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.axhline(1.2, color="C0", linestyle="--", label="asked for: quoting")
    axes.axhline(0.97, color="grey", linestyle="--", label="asked for: others")
    axes.set_xlabel("rows")
    axes.set_ylabel("speed, 1 = without drafts")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)

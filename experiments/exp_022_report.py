"""EXP-022's table and plot, made from its results alone."""

from pathlib import Path

from common import Json, machine_lines, table, verdict_title

NAMES = ("a copy each", "shared")


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_022_shared_prefix.png")
    parts = {
        "summary": _summary(content["cells"]),
        "machine": machine_lines(content),
        "cells": _cells(content["cells"]),
    }
    return verdict_title(content, "a prefix that several sequences share"), parts


def _summary(cells: list[Json]) -> str:
    last = cells[-1]
    least = min(cells, key=lambda cell: cell["speed"]["median"])
    same = all(cell["same_rows"] == cell["rows"] for cell in cells)
    return "\n".join(
        (
            f"{last['rows']} sequences with {last['tokens']} common tokens take {last['shared']['cache_mb']:.0f} MB of "
            f"cache instead of {last['a copy each']['cache_mb']:.0f}, and decode {_span(last['speed'])} times as fast.",
            f"The least speed is {_span(least['speed'])}, of {least['rows']} sequences with {least['tokens']} tokens.",
            "Every sequence has the same tokens in all runs." if same else "NOT every sequence has the same tokens.",
        )
    )


def _cells(cells: list[Json]) -> str:
    head = ("common tokens", "rows", "ms a step: copies", "shared", "in speed", "cache, MB: copies", "shared",
            "blocks: copies", "shared", "peak, MB: copies", "shared", "same rows")  # fmt: skip
    lines = [
        (
            cell["tokens"],
            cell["rows"],
            *(f"{cell[name]['step_ms']['median']:.0f}" for name in NAMES),
            _span(cell["speed"]),
            *(f"{cell[name]['cache_mb']:.0f}" for name in NAMES),
            *(cell[name]["blocks"] for name in NAMES),
            *(f"{cell[name]['peak_mb']['median']:.0f}" for name in NAMES),
            f"{cell['same_rows']} of {cell['rows']}",
        )
        for cell in cells
    ]
    return table(head, lines)


def plot(content: Json, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    cells = content["cells"]
    labels = [f"{cell['tokens']} x {cell['rows']}" for cell in cells]
    for shown, title, value in zip(
        axes,
        ("ms a step", "MB of cache"),
        (lambda one: one["step_ms"]["median"], lambda one: one["cache_mb"]),
        strict=True,
    ):
        for number, name in enumerate(NAMES):
            places = [place + 0.4 * number for place in range(len(cells))]
            shown.bar(places, [value(cell[name]) for cell in cells], 0.4, label=name)
        shown.set_xticks([place + 0.2 for place in range(len(cells))], labels, fontsize=8)
        shown.set(title=title, xlabel="common tokens x rows")
        shown.legend(fontsize=8)
    figure.suptitle(f"EXP-022 on {content['machine']['device']}: {content['machine']['model']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _span(value: Json) -> str:
    return f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"

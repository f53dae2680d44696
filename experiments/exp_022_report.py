"""EXP-022's table and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, columns, figure, short

NAMES = ("a copy each", "shared")


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    cells = content["cells"]
    last, least = cells[-1], min(cells, key=lambda cell: cell["speed"]["median"])
    copies, shared = (f"{last[name]['cache_mb']:.0f}" for name in NAMES)
    same = all(cell["same_rows"] == cell["rows"] for cell in cells)
    summary = "\n".join((
        f"{last['rows']} sequences with {last['tokens']} common tokens take {shared} MB of cache instead of {copies}, "
        f"and decode {short(last['speed'])} times as fast.",
        f"The least speed is {short(least['speed'])}, of {least['rows']} sequences with {least['tokens']} tokens.",
        "Every sequence has the same tokens in all runs." if same else "NOT every sequence has the same tokens.",
    ))  # fmt: skip
    number = f"{shared} MB of cache instead of {copies}; {last['speed']['median']} times as fast"
    return Report("a prefix that several sequences share", number, {"summary": summary, "cells": columns(cells, CELLS)})


CELLS = {
    "common tokens": "{tokens}", "rows": "{rows}", "ms a step: copies": "{a copy each[step_ms][median]:.0f}",
    "ms: shared": "{shared[step_ms][median]:.0f}", "in speed": "{speed:.3g}",
    "cache, MB: copies": "{a copy each[cache_mb]:.0f}", "MB: shared": "{shared[cache_mb]:.0f}",
    "blocks: copies": "{a copy each[blocks]}", "blocks: shared": "{shared[blocks]}",
    "peak, MB: copies": "{a copy each[peak_mb][median]:.0f}", "peak: shared": "{shared[peak_mb][median]:.0f}",
    "same rows": "{same_rows} of {rows}",
}  # fmt: skip


def plot(content: Json, results: Path) -> None:
    cells = content["cells"]
    labels = [f"{cell['tokens']} x {cell['rows']}" for cell in cells]
    with figure(content, results, "shared_prefix", (11, 4), panels=(1, 2)) as (time, memory):
        for number, name in enumerate(NAMES):
            places = [place + 0.4 * number for place in range(len(cells))]
            time.bar(places, [cell[name]["step_ms"]["median"] for cell in cells], 0.4, label=name)
            memory.bar(places, [cell[name]["cache_mb"] for cell in cells], 0.4, label=name)
        for axes, title in ((time, "ms a step"), (memory, "MB of cache")):
            axes.set_xticks([place + 0.2 for place in range(len(cells))], labels, fontsize=8)
            axes.set(title=title, xlabel="common tokens x rows")
            axes.legend(fontsize=8)

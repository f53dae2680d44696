"""EXP-006's plot: a heat map over blocks and layers, and the same times over bytes beside their floors."""

from pathlib import Path
from typing import Any

from common import Json
from report import figure


def plot(content: Json, results: Path) -> None:
    title = f"on {content['machine']['device']}, from blocks in the page cache to the engine's caches"
    with figure(content, results, "scaling", (12, 4.8), panels=(1, 2), title=title) as (left, right):
        _heat_map(left, content["cells"])
        _over_bytes(right, content)


def _heat_map(axes: Any, cells: list[Json]) -> None:
    from matplotlib.colors import LogNorm

    blocks, layers = (sorted({cell[key] for cell in cells}) for key in ("blocks", "layers"))
    p95 = {(cell["blocks"], cell["layers"]): cell["reconstruct_ms"]["p95"] for cell in cells}
    axes.imshow(
        [[p95[n, m] for n in blocks] for m in layers],
        norm=LogNorm(), cmap="YlOrBr", origin="lower", aspect="auto", alpha=0.6,
    )  # fmt: skip
    for cell in cells:
        at = blocks.index(cell["blocks"]), layers.index(cell["layers"])
        text = f"{cell['reconstruct_ms']['p95']:.3g} ms\n{cell['of_floor']['median']:.1f} floors"
        axes.text(*at, text, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(blocks)), blocks)
    axes.set_yticks(range(len(layers)), layers)
    axes.set(xlabel="blocks of 256 tokens", ylabel="layers", title="p95, and the median in copies of the bytes")


def _over_bytes(axes: Any, content: Json) -> None:
    cells, fit = sorted(content["cells"], key=lambda cell: cell["bytes"]), content["fit"]
    for n_layers in sorted({cell["layers"] for cell in cells}):
        own = [cell for cell in cells if cell["layers"] == n_layers]
        p50 = [cell["reconstruct_ms"]["p50"] for cell in own]
        above = [max(0.0, cell["reconstruct_ms"]["p95"] - cell["reconstruct_ms"]["p50"]) for cell in own]
        axes.errorbar(_mb(own), p50, yerr=[[0.0] * len(own), above], fmt="o", ms=4, label=f"{n_layers} layers")
    for found in content["gemma"]:
        p50 = found["reconstruct_ms"]["p50"]
        axes.plot(found["bytes"] / 1e6, p50, "D", ms=5, label=f"Gemma 3 12B, {found['name']}")
    line = [fit["at_zero_ms"] + fit["ms_per_mb"] * mb for mb in _mb(cells)]
    axes.plot(_mb(cells), line, color="black", lw=1, label=f"{fit['ms_per_mb']:.2f} ms per MB, r2 {fit['r2']:.3f}")
    for key, style, name in (("fresh_copy_ms", "-", "fresh memory"), ("used_copy_ms", "--", "memory in use"),
                             ("threads_copy_ms", ":", "the same, all threads")):  # fmt: skip
        axes.plot(_mb(cells), [cell[key]["p50"] for cell in cells], color="grey", ls=style, label=f"copy: {name}")
    targets = [(one["bytes"] / 1e6, one["target_ms"]) for one in content["targets"]]
    axes.plot(*zip(*targets, strict=True), "kx", label="the seed's targets (p95)")
    axes.set(xscale="log", yscale="log", xlabel="MB of cache", ylabel="ms, p50 to p95")
    axes.legend(fontsize=7, loc="upper left")


def _mb(cells: list[Json]) -> list[float]:
    return [cell["bytes"] / 1e6 for cell in cells]

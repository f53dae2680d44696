"""EXP-002's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, columns, figure, say

NAMES = {
    "pool": "pool alone: take two blocks, one more, give back",
    "join": "a sequence admitted beside 15 others, and removed",
    "step": "a step's bookkeeping for 16 sequences",
}


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    kinds, leak = content["kinds"], content["leak"]
    slowest = max(size["p99"] for kind in kinds.values() for size in kind["sizes"].values())
    ratio = max(kind["ratio"]["median"] for kind in kinds.values())
    summary = (
        f"The slowest kind takes {slowest:.3f} ms at the 99th percentile, and at most {ratio:.2f} times as long with "
        f"10,000 blocks as with 100. After {leak['ended']} jobs {leak['used_at_the_end']} blocks are held."
    )
    number = f"p99 {kinds['join']['sizes']['10000']['p99']:.3f} ms with 10,000 blocks"
    return Report("allocation", number, {"summary": summary, "cycles": _cycles(kinds), "leak": say(leak, LEAK)})


def _cycles(kinds: Json) -> str:
    rows = [{**kind, **taken, "name": NAMES[name], "size": size, "ratio": kind["ratio"] if size == "10000" else None}
            for name, kind in kinds.items() for size, taken in kind["sizes"].items()]  # fmt: skip
    return columns(rows, {
        "what": "{name}", "blocks": "{size}", "cycles": "{cycles}", "mean, ms": "{mean:.4f}", "p50": "{p50:.4f}",
        "p99": "{p99:.4f}", "most": "{most:.4f}", "10,000 : 100 (medians of a round)": "{ratio:.2f}",
    })  # fmt: skip


LEAK = (
    "{ended} of {jobs} jobs ended. Of {total} blocks at most {most_used} were held at once; at the end "
    "{used_at_the_end} were held, {cache_bytes_at_the_end} bytes were in the generator's caches, and "
    "{rows_at_the_end} sequences were in the engine."
)


def plot(content: Json, results: Path) -> None:
    title, places = "what the block pool and the pricing of a batch take", []
    with figure(content, results, "latencies", (7.5, 4), title=title) as axes:
        for number, kind in enumerate(content["kinds"].values()):
            for side, (size, taken) in enumerate(kind["sizes"].items()):
                at, label = 3 * number + side, "" if number else f"{size} blocks, p50 to p99"
                axes.plot([at, at], [taken["p50"], taken["p99"]], color=f"C{side}", lw=5, alpha=0.5)
                axes.plot(at, taken["p50"], "o", color=f"C{side}", label=label)
                axes.plot(at, taken["mean"], "kx", label="" if number or side else "mean")
            places.append(3 * number + 0.5)
        axes.axhline(1.0, color="black", ls=":", label="target: 1 ms")
        axes.set(yscale="log", ylabel="ms")
        axes.set_xticks(places, list(content["kinds"]))
        axes.legend(fontsize=8)

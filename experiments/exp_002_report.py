"""EXP-002's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json, machine_lines, table, verdict_title

NAMES = {
    "pool": "pool alone: take two blocks, one more, give back",
    "join": "a sequence admitted beside 15 others, and removed",
    "step": "a step's bookkeeping for 16 sequences",
}


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_002_latencies.png")
    slowest = max(size["p99"] for kind in content["kinds"].values() for size in kind["sizes"].values())
    ratio = max(kind["ratio"]["median"] for kind in content["kinds"].values())
    parts = {"machine": machine_lines(content), "cycles": _cycles(content["kinds"]), "leak": _leak(content["leak"])}
    title = verdict_title(content, "allocation")
    return f"{title}: p99 at most {slowest:.3f} ms, {ratio:.2f} times as long at 10,000 blocks", parts


def _cycles(kinds: Json) -> str:
    head = ("what", "blocks", "cycles", "mean, ms", "p50", "p99", "most", "10,000 : 100 (medians of a round)")
    rows = []
    for name, kind in kinds.items():
        for size, taken in kind["sizes"].items():
            ratio = kind["ratio"]
            shown = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})" if size == "10000" else ""
            times = [f"{taken[k]:.4f}" for k in ("mean", "p50", "p99", "most")]
            rows.append((NAMES[name], size, kind["cycles"], *times, shown))
    return table(head, rows)


def _leak(leak: Json) -> str:
    return (
        f"{leak['ended']} of {leak['jobs']} jobs ended. Of {leak['total']} blocks at most {leak['most_used']} were "
        f"held at once; at the end {leak['used_at_the_end']} were held, {leak['cache_bytes_at_the_end']} bytes were in "
        f"the generator's caches, and {leak['rows_at_the_end']} sequences were in the engine."
    )


def plot(content: Json, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4))
    places, labels = [], []
    for number, (name, kind) in enumerate(content["kinds"].items()):
        for side, (size, taken) in enumerate(kind["sizes"].items()):
            at = 3 * number + side
            axes.plot([at, at], [taken["p50"], taken["p99"]], color=f"C{side}", lw=5, alpha=0.5)
            axes.plot(at, taken["p50"], "o", color=f"C{side}", label=f"{size} blocks, p50 to p99" if not number else "")
            axes.plot(at, taken["mean"], "kx", label="mean" if not (number or side) else "")
        places.append(3 * number + 0.5)
        labels.append(name)
    axes.axhline(1.0, color="black", ls=":", label="target: 1 ms")
    axes.set(yscale="log", ylabel="ms")
    axes.set_xticks(places, labels)
    axes.legend(fontsize=8)
    figure.suptitle("EXP-002: what the block pool and the pricing of a batch take")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)

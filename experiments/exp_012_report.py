"""EXP-012's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json, machine_lines, table, verdict_title

MODES = ("native", "q8", "q4")


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_012_store_dtype.png")
    parts = {
        "summary": _summary(content),
        "machine": machine_lines(content),
        "sizes": _sizes(content["sizes"]),
        "times": _times(content["times"]),
        "quality": _quality(content),
        "greedy": _greedy(content["greedy"]),
    }
    sizes, ppl = content["sizes"]["modes"], content["perplexity_ratios"]
    percent = {mode: f"{100 * sizes[mode]['block_bytes_per_token_ratio']:.1f} %" for mode in MODES}
    greedy = content["greedy"]
    said = "; ".join(
        f"{mode} {percent[mode]} of the bytes at {100 * (ppl[mode] - 1):+.2f} % perplexity, "
        f"{greedy['modes'][mode]['identical']} of {greedy['continuations']} greedy answers the same"
        for mode in MODES[1:]
    )
    return f"{verdict_title(content, 'stored precision')}: {said}", parts


def _summary(content: Json) -> str:
    lines = []
    for mode in MODES[1:]:
        size, taken = content["sizes"]["modes"][mode], content["times"]["modes"][mode]
        same = content["greedy"]["modes"][mode]["identical"]
        most = max(row["modes"][mode]["most_change"] for row in content["quality"])
        lines.append(
            f"{mode}: {100 * size['all_bytes_per_token_ratio']:.1f} % of native's bytes on disk; restoring takes "
            f"{taken['caches_ms_ratio']['median']} times as long; perplexity "
            f"{100 * (content['perplexity_ratios'][mode] - 1):+.2f} %, a token's log-likelihood by up to "
            f"{most:.2f}; {same} of {content['greedy']['continuations']} "
            "greedy continuations are the same."
        )
    return "\n".join(lines)


def _sizes(sizes: Json) -> str:
    head = ("store", "bytes per token, block files", "of native", "bytes per token, everything", "of native")
    rows = [
        (mode, row["block_bytes_per_token"], row["block_bytes_per_token_ratio"], row["all_bytes_per_token"],
         row["all_bytes_per_token_ratio"])
        for mode, row in sizes["modes"].items()
    ]  # fmt: skip
    return f"{sizes['agents']} agents, {sizes['tokens']} tokens.\n\n{table(head, rows)}"


def _times(times: Json) -> str:
    head = ("store", "restore, ms", "of native", "restore and MLX, ms", "of native", "n")
    rows = [
        (mode, _span(row["store_ms"]), _span(row["store_ms_ratio"]), _span(row["caches_ms"]),
         _span(row["caches_ms_ratio"]), row["caches_ms"]["n"])
        for mode, row in times["modes"].items()
    ]  # fmt: skip
    return f"{times['tokens']} tokens, files in the page cache.\n\n{table(head, rows)}"


def _quality(content: Json) -> str:
    head = ("text", "restored", "scored", "perplexity, cache never stored", "store", "change per token (mean)",
            "(root mean square)", "(largest)", "perplexity")  # fmt: skip
    rows = []
    for row in content["quality"]:
        for mode, found in row["modes"].items():
            rows.append((row["agent"], row["restored_tokens"], row["scored_tokens"], row["kept_perplexity"], mode,
                         f"{found['mean_change']:+.5f}", f"{found['rms_change']:.5f}", f"{found['most_change']:.4f}",
                         f"{100 * (found['perplexity_ratio'] - 1):+.3f} %"))  # fmt: skip
    ratios = ", ".join(f"{mode} {100 * (ratio - 1):+.3f} %" for mode, ratio in content["perplexity_ratios"].items())
    return f"{table(head, rows)}\n\nGeometric mean over the texts: {ratios}."


def _greedy(greedy: Json) -> str:
    head = (
        "store",
        f"the same, of {greedy['continuations']}",
        "first difference at token",
        "share of tokens before it",
    )
    rows = [
        (mode, row["identical"], ", ".join(map(str, row["first_differences"])) or "-",
         row["share_of_tokens_before_the_first_difference"])
        for mode, row in greedy["modes"].items()
    ]  # fmt: skip
    return table(head, rows)


def plot(content: Json, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    values = {
        "bytes in block files, of native": [content["sizes"]["modes"][m]["block_bytes_per_token_ratio"] for m in MODES],
        "restore time, of native": [content["times"]["modes"][m]["caches_ms_ratio"]["median"] for m in MODES],
        "change of log-likelihood per token, r.m.s.": [
            max(row["modes"][m]["rms_change"] for row in content["quality"]) for m in MODES
        ],
    }
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.6))
    for axes, (title, heights) in zip(panels, values.items(), strict=True):
        axes.bar(MODES, heights, color=("grey", "C0", "C1"))
        axes.set_title(title, fontsize=10)
        axes.axhline(0, color="black", lw=0.5)
    figure.suptitle(f"EXP-012 on {content['machine']['device']}: {content['machine']['model']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _span(value: Json) -> str:
    return f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"

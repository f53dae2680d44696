"""EXP-012's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, columns, figure, percent

MODES = ("native", "q8", "q4")


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    share = content["sizes"]["modes"]["q8"]["block_bytes_per_token_ratio"]
    number = f"q8: {100 * share:.1f} % of the bytes at {percent(content['perplexity_ratios']['q8'])} perplexity"
    return Report("stored precision", number, {
        "summary": _summary(content), "sizes": _sizes(content["sizes"]), "times": _times(content["times"]),
        "quality": _quality(content), "greedy": _greedy(content["greedy"]),
    })  # fmt: skip


def _summary(content: Json) -> str:
    lines = []
    for mode in MODES[1:]:
        size, taken = content["sizes"]["modes"][mode], content["times"]["modes"][mode]
        same = content["greedy"]["modes"][mode]["identical"]
        most = max(row["modes"][mode]["most_change"] for row in content["quality"])
        lines.append(
            f"{mode}: {100 * size['all_bytes_per_token_ratio']:.1f} % of native's bytes on disk; restoring takes "
            f"{taken['caches_ms_ratio']['median']} times as long; perplexity "
            f"{percent(content['perplexity_ratios'][mode])}, a token's log-likelihood by up to {most:.2f}; {same} of "
            f"{content['greedy']['continuations']} greedy continuations are the same."
        )
    return "\n".join(lines)


def _sizes(sizes: Json) -> str:
    return f"{sizes['agents']} agents, {sizes['tokens']} tokens.\n\n" + columns(_named(sizes["modes"]), {
        "store": "{store}", "bytes per token, block files": "{block_bytes_per_token}",
        "of native": "{block_bytes_per_token_ratio}", "bytes per token, everything": "{all_bytes_per_token}",
        "everything, of native": "{all_bytes_per_token_ratio}",
    })  # fmt: skip


def _times(times: Json) -> str:
    return f"{times['tokens']} tokens, files in the page cache.\n\n" + columns(_named(times["modes"]), {
        "store": "{store}", "restore, ms": "{store_ms:.3g}", "of native": "{store_ms_ratio:.3g}",
        "restore and MLX, ms": "{caches_ms:.3g}", "both, of native": "{caches_ms_ratio:.3g}", "n": "{caches_ms[n]}",
    })  # fmt: skip


def _quality(content: Json) -> str:
    rows = [{**text, **found} for text in content["quality"] for found in _named(text["modes"])]
    shown = columns([{**row, "change": percent(row["perplexity_ratio"], 3)} for row in rows], {
        "text": "{agent}", "restored": "{restored_tokens}", "scored": "{scored_tokens}",
        "perplexity, cache never stored": "{kept_perplexity}", "store": "{store}",
        "change per token (mean)": "{mean_change:+.5f}", "(root mean square)": "{rms_change:.5f}",
        "(largest)": "{most_change:.4f}", "perplexity": "{change}",
    })  # fmt: skip
    means = ", ".join(f"{mode} {percent(ratio, 3)}" for mode, ratio in content["perplexity_ratios"].items())
    return f"{shown}\n\nGeometric mean over the texts: {means}."


def _greedy(greedy: Json) -> str:
    rows = _named(greedy["modes"])
    return columns([{**row, "ends": ", ".join(map(str, row["first_differences"])) or "-"} for row in rows], {
        "store": "{store}", f"the same, of {greedy['continuations']}": "{identical}",
        "first difference at token": "{ends}",
        "share of tokens before it": "{share_of_tokens_before_the_first_difference}",
    })  # fmt: skip


def _named(modes: Json) -> list[Json]:
    return [{"store": mode, **found} for mode, found in modes.items()]


def plot(content: Json, results: Path) -> None:
    sizes, times = content["sizes"]["modes"], content["times"]["modes"]
    shown = {
        "bytes in block files, of native": [sizes[mode]["block_bytes_per_token_ratio"] for mode in MODES],
        "restore time, of native": [times[mode]["caches_ms_ratio"]["median"] for mode in MODES],
        "change of log-likelihood per token, r.m.s.": [
            max(row["modes"][mode]["rms_change"] for row in content["quality"]) for mode in MODES
        ],
    }
    with figure(content, results, "store_dtype", (11, 3.6), panels=(1, 3)) as panels:
        for axes, (title, heights) in zip(panels, shown.items(), strict=True):
            axes.bar(MODES, heights, color=("grey", "C0", "C1"))
            axes.set_title(title, fontsize=10)

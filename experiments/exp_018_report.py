"""EXP-018's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, columns, figure, percent, say


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    ratio, change = content["capacity"][-1]["ratio"], percent(content["perplexity_ratio"])
    summary = (
        f"{ratio} times the sequences of a 16-bit cache at {change} perplexity; a decode step takes "
        f"{content['decoding']['step_ratio']['median']} times as long."
    )
    ends = ", ".join(map(str, content["greedy"]["first_differences"])) or "none"
    return Report(
        "keys and values in 8 bits",
        f"beside a 16-bit cache {ratio} times the sequences at {change} perplexity",
        {
            "summary": summary,
            "capacity": columns(content["capacity"], CAPACITY),
            "likelihoods": _likelihoods(content),
            "greedy": say({**content["greedy"], "ends": ends}, GREEDY),
            "decoding": _decoding(content["decoding"]),
        },
    )


CAPACITY = {
    "cache": "{dtype}", "bytes per token": "{native[bytes_per_token]}", "in 8 bits": "{8 bits[bytes_per_token]}",
    "sequences in 8 GiB": "{native[sequences]}", "with 8 bits": "{8 bits[sequences]}", "ratio": "{ratio}",
}  # fmt: skip
LIKELIHOODS = {
    "text": "{text}", "prompt": "{prompt_tokens}", "scored": "{scored_tokens}", "perplexity": "{perplexity}",
    "change per token (mean)": "{mean_change:+.5f}", "(root mean square)": "{rms_change:.5f}",
    "(largest)": "{most_change:.4f}", "perplexity in 8 bits": "{change}",
}  # fmt: skip
MEANS = (
    "\n\nGeometric mean over the texts: {change}. EXP-012's q8, which quantises a finished cache: {at_rest}, a token "
    "by up to {at_rest_most_change:.4f}."
)
GREEDY = (
    "{answers} answers of {tokens} tokens: {as_alone} are the ones that the sequence gives alone with 8 bits; "
    "{as_native} are those of the model's own precision (first differences at token: {ends})."
)


def _likelihoods(content: Json) -> str:
    rows = [{**row, "change": percent(row["perplexity_ratio"], 3)} for row in content["likelihoods"]]
    change, at_rest = (percent(content[name], 3) for name in ("perplexity_ratio", "at_rest_perplexity_ratio"))
    return columns(rows, LIKELIHOODS) + say({**content, "change": change, "at_rest": at_rest}, MEANS)


def _decoding(steps: Json) -> str:
    rows = [{"name": name, "bytes": steps["cache_bytes"][name], "ms": ms} for name, ms in steps["step_ms"].items()]
    shown = columns(rows, {"cache": "{name}", "bytes of the batch's caches": "{bytes}", "a step, ms": "{ms:.3g}"})
    return say({**steps, "shown": shown}, (
        "{rows} sequences of {tokens} tokens.\n\n{shown}\n\nRatio of bytes {bytes_ratio}; of a step's time "
        "{step_ratio[median]} ({step_ratio[min]} to {step_ratio[max]}, n {step_ratio[n]})."
    ))  # fmt: skip


def plot(content: Json, results: Path) -> None:
    texts, sizes = content["likelihoods"], content["capacity"]
    with figure(content, results, "kv_bits", (9, 3.6), panels=(1, 2)) as (left, right):
        left.bar([row["text"] for row in texts], [row["rms_change"] for row in texts])
        left.set_title("change of log-likelihood per token, r.m.s.", fontsize=10)
        right.bar([row["dtype"] for row in sizes], [row["ratio"] for row in sizes], color="C1")
        right.set_title("sequences in the same KV memory, of native", fontsize=10)
        right.axhline(1, color="black", lw=0.5)

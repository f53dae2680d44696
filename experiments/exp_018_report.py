"""EXP-018's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json, machine_lines, table, verdict_title


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_018_kv_bits.png")
    sixteen, steps = content["capacity"][-1], content["decoding"]["step_ratio"]
    said = (
        f"{sixteen['ratio']} times the sequences of a 16-bit cache at "
        f"{100 * (content['perplexity_ratio'] - 1):+.2f} % perplexity; a decode step {steps['median']} times as long"
    )
    return f"{verdict_title(content, 'keys and values in 8 bits')}: {said}", {
        "machine": machine_lines(content),
        "capacity": _capacity(content["capacity"]),
        "likelihoods": _likelihoods(content),
        "greedy": _greedy(content["greedy"]),
        "decoding": _decoding(content["decoding"]),
    }


def _capacity(rows: list[Json]) -> str:
    head = ("cache", "bytes per token", "with 8 bits", "sequences in 8 GiB", "with 8 bits", "ratio")
    return table(
        head,
        [
            (row["dtype"], row["native"]["bytes_per_token"], row["8 bits"]["bytes_per_token"],
             row["native"]["sequences"], row["8 bits"]["sequences"], row["ratio"])
            for row in rows
        ],
    )  # fmt: skip


def _likelihoods(content: Json) -> str:
    head = ("text", "prompt", "scored", "perplexity", "change per token (mean)", "(root mean square)", "(largest)",
            "perplexity in 8 bits")  # fmt: skip
    rows = [
        (row["text"], row["prompt_tokens"], row["scored_tokens"], row["perplexity"], f"{row['mean_change']:+.5f}",
         f"{row['rms_change']:.5f}", f"{row['most_change']:.4f}", f"{100 * (row['perplexity_ratio'] - 1):+.3f} %")
        for row in content["likelihoods"]
    ]  # fmt: skip
    return (
        f"{table(head, rows)}\n\nGeometric mean over the texts: {100 * (content['perplexity_ratio'] - 1):+.3f} %. "
        f"EXP-012's q8, which quantises a finished cache: {100 * (content['at_rest_perplexity_ratio'] - 1):+.3f} %, a "
        f"token by up to {content['at_rest_most_change']:.4f}."
    )


def _greedy(said: Json) -> str:
    ends = ", ".join(map(str, said["first_differences"])) or "none"
    return (
        f"{said['answers']} answers of {said['tokens']} tokens: {said['as_alone']} are the ones that the sequence "
        f"gives alone with 8 bits; {said['as_native']} are those of the model's own precision (first differences at "
        f"token: {ends})."
    )


def _decoding(steps: Json) -> str:
    head = ("cache", "bytes of the batch's caches", "a step, ms")
    rows = [
        (name, steps["cache_bytes"][name], f"{ms['median']:.3g} ({ms['min']:.3g} to {ms['max']:.3g})")
        for name, ms in steps["step_ms"].items()
    ]
    ratio, span = steps["step_ratio"], f"{steps['step_ratio']['min']} to {steps['step_ratio']['max']}"
    return (
        f"{steps['rows']} sequences of {steps['tokens']} tokens.\n\n{table(head, rows)}\n\nRatio of bytes "
        f"{steps['bytes_ratio']}; of a step's time {ratio['median']} ({span}, n {ratio['n']})."
    )


def plot(content: Json, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6))
    rows = content["likelihoods"]
    panels[0].bar([row["text"] for row in rows], [row["rms_change"] for row in rows])
    panels[0].set_title("change of log-likelihood per token, r.m.s.", fontsize=10)
    sizes = content["capacity"]
    panels[1].bar([row["dtype"] for row in sizes], [row["ratio"] for row in sizes], color="C1")
    panels[1].set_title("sequences in the same KV memory, of native", fontsize=10)
    panels[1].axhline(1, color="black", lw=0.5)
    figure.suptitle(f"EXP-018 on {content['machine']['device']}: {content['machine']['model']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)

"""EXP-015's table and plot, made from its results alone."""

from pathlib import Path

from common import Json, machine_lines, table, verdict_title

_NAMES = {
    "quiet_tokens_per_s": "tokens/s of the decoding sequences, before",
    "speed": "their speed while the prompt is prefilled, as a share",
    "speed_afterwards": "their speed once the long prompt decodes, as a share",
    "prefill_s": "seconds until the long prompt's first token",
    "longest_step_s": "longest step in that time, s",
    "cancel_s": "seconds until a cancel in mid-prefill took effect",
    "long_prompt": "tokens of the long prompt",
}


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_015_long_prompt.png")
    found = content["found"]
    rows = [(title, f"{found[name]['median']} ({found[name]['min']} to {found[name]['max']})") for name, title in
            _NAMES.items()]  # fmt: skip
    summary = (
        f"While a prompt of {found['long_prompt']['median']:.0f} tokens was prefilled, the sequences beside it decoded "
        f"at {found['speed']['median']} of their speed (median of {found['speed']['n']} runs, {found['speed']['min']} "
        f"to {found['speed']['max']}; target: at least 0.5). A cancel in the middle of a prefill took effect within "
        f"{found['cancel_s']['max']} s (target: at most 2)."
    )
    parts = {
        "summary": summary,
        "machine": machine_lines(content),
        "found": table(("", "median (least to most)"), rows),
    }
    return verdict_title(content, "a long prompt beside decoding sequences"), parts


def plot(content: Json, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = content["found"]
    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    names = {"while it is prefilled": "speed", "once it decodes": "speed_afterwards"}
    axes.bar(list(names), [found[name]["median"] for name in names.values()], color="tab:blue")
    axes.axhline(0.5, color="tab:red", linestyle="--", label="asked for")
    axes.set_ylabel("speed of the other rows, 1 = before")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)

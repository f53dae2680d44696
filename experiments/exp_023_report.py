"""EXP-023's tables and plot, made from its results alone."""

from collections import Counter
from pathlib import Path

from common import Json, machine_lines, span, table, verdict_title


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_023_guides.png")
    parts = {
        "summary": _summary(content),
        "machine": machine_lines(content),
        "validity": _validity(content["validity"]),
        "refused": _refused(content["schemas"]),
        "costs": _costs(content),
    }
    return verdict_title(content, "answers that follow a schema"), parts


def _summary(content: Json) -> str:
    whole, wrong = (
        sum(f(one) for one in content["validity"]) for f in (lambda x: x["whole"], lambda x: len(x["wrong"]))
    )
    worst = min(content["costs"], key=lambda one: one["speed"]["median"])
    longer, beside = 1 / worst["speed"]["median"], content["beside"]
    return "\n".join(
        (
            f"Of {whole} answers that ended by themselves, {whole - wrong} are valid for their schema.",
            f"With {worst['rows']} guided rows, a step takes {longer:.3f} times as long as with {worst['rows']} plain "
            "ones, in the slower of the two loads.",
            f"{beside['same']} of {beside['plain_rows']} rows beside a guided one have the tokens they have alone.",
        )
    )


def _validity(found: list[Json]) -> str:
    head = ("temperature", "answers", "whole", "of these valid", "cut off by max_tokens", "failed")
    lines = [(one["temperature"], one["answers"], one["whole"], one["whole"] - len(one["wrong"]), one["cut_off"],
              one["failed"]) for one in found]  # fmt: skip
    return table(head, lines)


def _refused(schemas: Json) -> str:
    counted = Counter(reason.partition("[")[0].strip() for reason in schemas["reasons"])
    reasons = ", ".join(f"{reason} ({n})" for reason, n in counted.most_common(4))
    return f"{schemas['refused']} further schemas were refused by name. The most frequent reasons: {reasons or 'none'}."


def _costs(content: Json) -> str:
    head = ("temperature", "turns", "ms a step: plain", "guided", "speed of the guided rows", "the middle half of it")
    lines = [
        (one["temperature"], one["turns"], span(one["plain_step_ms"]), span(one["guided_step_ms"]), span(one["speed"]),
         "{} to {}".format(*one["speed"]["middle_half"]))
        for one in content["costs"]
    ]  # fmt: skip
    masks = content["mask_us"]
    return (
        f"{table(head, lines)}\n\nTo take a token and make a mask, a guide needs {masks['median']} µs in the median, "
        f"and {masks['most']} µs at most ({masks['n']} masks)."
    )


def plot(content: Json, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, shown = plt.subplots(figsize=(7, 4))
    costs = content["costs"]
    for place, name in enumerate(("plain_step_ms", "guided_step_ms")):
        values = [one[name]["median"] for one in costs]
        shown.bar([n + 0.4 * place for n in range(len(costs))], values, 0.4, label=name.partition("_")[0])
    labels = [f"temperature {one['temperature']}" for one in costs]
    shown.set_xticks([n + 0.2 for n in range(len(costs))], labels)
    shown.set(ylabel=f"ms a step of {costs[0]['rows']} rows")
    shown.legend()
    figure.suptitle(f"EXP-023 on {content['machine']['device']}: {content['machine']['model']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)

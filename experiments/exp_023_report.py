"""EXP-023's tables and plot, made from its results alone."""

from collections import Counter
from pathlib import Path

from common import Json
from report import Report, columns, figure, say


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    found = [{**one, "valid": one["whole"] - len(one["wrong"])} for one in content["validity"]]
    whole, valid = (sum(one[key] for one in found) for key in ("whole", "valid"))
    worst = min(content["costs"], key=lambda one: one["speed"]["median"])
    beside = content["beside"]
    summary = "\n".join((
        f"Of {whole} answers that ended by themselves, {valid} are valid for their schema.",
        f"With {worst['rows']} guided rows, a step takes {1 / worst['speed']['median']:.3f} times as long as with "
        f"{worst['rows']} plain ones, in the slower of the two loads.",
        f"{beside['same']} of {beside['plain_rows']} rows beside a guided one have the tokens they have alone.",
    ))  # fmt: skip
    all_valid = "all valid" if valid == whole else f"{whole - valid} not valid"
    number = f"{whole} whole answers, {all_valid}; {worst['speed']['median']} of the speed"
    return Report("answers that follow a schema", number, {
        "summary": summary, "validity": columns(found, VALIDITY), "refused": _refused(content["schemas"]),
        "costs": columns(content["costs"], COSTS) + say(content["mask_us"], MASKS),
    })  # fmt: skip


VALIDITY = {
    "temperature": "{temperature}", "answers": "{answers}", "whole": "{whole}", "of these valid": "{valid}",
    "cut off by max_tokens": "{cut_off}", "failed": "{failed}",
}  # fmt: skip
COSTS = {
    "temperature": "{temperature}", "turns": "{turns}", "ms a step: plain": "{plain_step_ms}",
    "guided": "{guided_step_ms}", "speed of the guided rows": "{speed}",
    "the middle half of it": "{speed[middle_half][0]} to {speed[middle_half][1]}",
}  # fmt: skip
MASKS = (
    "\n\nTo take a token and make a mask, a guide needs {median} µs in the median, and {most} µs at most ({n} masks)."
)


def _refused(schemas: Json) -> str:
    counted = Counter(reason.partition("[")[0].strip() for reason in schemas["reasons"])
    reasons = ", ".join(f"{reason} ({n})" for reason, n in counted.most_common(4))
    return f"{schemas['refused']} further schemas were refused by name. The most frequent reasons: {reasons or 'none'}."


def plot(content: Json, results: Path) -> None:
    costs = content["costs"]
    with figure(content, results, "guides", (7, 4)) as axes:
        for place, name in enumerate(("plain_step_ms", "guided_step_ms")):
            values = [one[name]["median"] for one in costs]
            axes.bar([n + 0.4 * place for n in range(len(costs))], values, 0.4, label=name.partition("_")[0])
        axes.set_xticks([n + 0.2 for n in range(len(costs))], [f"temperature {one['temperature']}" for one in costs])
        axes.set(ylabel=f"ms a step of {costs[0]['rows']} rows")
        axes.legend()

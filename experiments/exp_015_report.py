"""EXP-015's table and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, bars, figure, listed, say

SUMMARY = (
    "While a prompt of {long_prompt[median]:.0f} tokens was prefilled, the sequences beside it decoded at "
    "{speed[median]} of their speed (median of {speed[n]} runs, {speed[min]} to {speed[max]}; target: at least 0.5). A "
    "cancel in the middle of a prefill took effect within {cancel_s[max]} s (target: at most 2)."
)
FOUND = {
    "tokens/s of the decoding sequences, before": "{quiet_tokens_per_s}",
    "their speed while the prompt is prefilled, as a share": "{speed}",
    "their speed once the long prompt decodes, as a share": "{speed_afterwards}",
    "seconds until the long prompt's first token": "{prefill_s}",
    "longest step in that time, s": "{longest_step_s}",
    "seconds until a cancel in mid-prefill took effect": "{cancel_s}",
    "tokens of the long prompt": "{long_prompt}",
}


def render(content: Json, results: Path) -> Report:
    found = content["found"]
    with figure(content, results, "long_prompt", (6, 3.5)) as axes:
        bars(axes, {"while it is prefilled": found["speed"], "once it decodes": found["speed_afterwards"]})
        axes.axhline(0.5, color="tab:red", linestyle="--", label="asked for")
        axes.set_ylabel("speed of the other rows, 1 = before")
        axes.legend()
    number = say(found, "{speed[median]} of their speed while {long_prompt[median]:.0f} tokens are prefilled")
    parts = {"summary": say(found, SUMMARY), "found": listed(found, ("", "median (least to most)"), FOUND)}
    return Report("a long prompt beside decoding sequences", number, parts)

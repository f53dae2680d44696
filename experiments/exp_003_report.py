"""EXP-003's tables and plot, made from its results alone."""

import json
from pathlib import Path

from common import Json
from report import Report, band, columns, figure, table

LOADING_LIMIT_MS = 500.0
"""The plan's limit for loading a cache; a criterion."""
LITERAL_ROWS_SHOWN = 4


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    rows, timing, literal = content["rows"], content["timing"], content["seed_method"]
    longest = timing[-1]
    number = (
        f"first token of {longest['prompt_tokens']} known tokens: {longest['speedup']} times as fast as without cache"
    )
    return Report("cache injection", number, {
        "summary": _summary(rows, timing, literal), "exactness": _exactness(rows), "loading": columns(timing, LOADING),
        "literal": _literal(literal["rows"]),
    })  # fmt: skip


def _summary(rows: list[Json], timing: list[Json], literal: Json) -> str:
    lengths = [r["first_prompt"] for r in rows]
    return "\n".join((
        f"{len(rows)} prompts of {min(lengths)} to {max(lengths)} tokens; "
        f"{sum(r['first_differs_at'] is None for r in rows)} first runs, "
        f"{sum(r['again_differs_at'] is None for r in rows)} repeats from the restored cache and "
        f"{sum(r['continued_differs_at'] is None for r in rows)} continuations from it "
        "gave exactly the reference's tokens.",
        f"The longest loading was {max(r['loading_ms']['max'] for r in timing):.0f} ms, with the files out of memory "
        f"{max(r['loading_evicted_ms']['max'] for r in timing):.0f} ms (limit: {LOADING_LIMIT_MS:.0f} ms).",
        f"The seed's own call, taken literally: {literal['equal']} of {literal['prompts']} outputs were the same.",
    ))  # fmt: skip


def _exactness(rows: list[Json]) -> str:
    runs = ("first", "again", "continued")
    lines = [{**r, **{run: "equal" if r[f"{run}_differs_at"] is None else "DIFFERS" for run in runs}} for r in rows]
    return columns(lines, {
        "prompt": "{name}", "tokens": "{first_prompt}", "generated": "{first_generated}", "ended by": "{ended_by}",
        "first run": "{first}", "cached": "{again_cached}", "same prompt again": "{again}",
        "cached, continued": "{continued_cached} of {continued_prompt}", "continued": "{continued}",
    })  # fmt: skip


LOADING = {
    "tokens": "{prompt_tokens}", "MB": "{mb}", "loading, ms": "{loading_ms:.3g}",
    "loading, files not in memory, ms": "{loading_evicted_ms:.3g}", "cold, s": "{cold_first_token_s:.3g}",
    "from cache, s": "{warm_first_token_s:.3g}", "ratio": "{speedup}x",
}  # fmt: skip


def _literal(rows: list[Json]) -> str:
    head = ("prompt", "without cache", "with the whole cache and the whole prompt")
    shown = rows[:LITERAL_ROWS_SHOWN]
    return table(
        head, [(row["name"], *(f"`{json.dumps(text, ensure_ascii=False)}`" for text in row["texts"])) for row in shown]
    )


def plot(content: Json, results: Path) -> None:
    timing = content["timing"]
    tokens = [row["prompt_tokens"] for row in timing]
    lines = (("cold_first_token_s", 1.0, "first token, cold"), ("warm_first_token_s", 1.0, "first token, from disk"),
             ("loading_ms", 1e-3, "of which loading"))  # fmt: skip
    with figure(content, results, "loading", (7, 4)) as axes:
        for key, scale, label in lines:
            band(axes, tokens, [row[key] for row in timing], scale, label=label)
        axes.axhline(LOADING_LIMIT_MS / 1000, linestyle=":", color="grey", label="limit of the plan for loading")
        axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="seconds")
        axes.legend()

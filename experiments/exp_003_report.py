"""EXP-003's tables and plot, made from its results alone."""

import json
from pathlib import Path

from common import LOADING_LIMIT_MS, Json, machine_lines, table, verdict_title

LITERAL_ROWS_SHOWN = 4


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_003_loading.png")
    rows, timing, literal = content["rows"], content["timing"], content["seed_method"]
    yes = {True: "equal", False: "DIFFERS"}
    exact = [
        (r["name"], r["first_prompt"], r["first_generated"], r["ended_by"], yes[r["first_differs_at"] is None],
         r["again_cached"], yes[r["again_differs_at"] is None], f"{r['continued_cached']} of {r['continued_prompt']}",
         yes[r["continued_differs_at"] is None])
        for r in rows
    ]  # fmt: skip
    head = (
        "prompt",
        "tokens",
        "generated",
        "ended by",
        "first run",
        "cached",
        "same prompt again",
        "cached",
        "continued",
    )
    times = [
        (r["prompt_tokens"], r["mb"], *(_span(r[k]) for k in ("loading_ms", "loading_evicted_ms", "cold_first_token_s",
         "warm_first_token_s")), f"{r['speedup']}x")
        for r in timing
    ]  # fmt: skip
    times_head = (
        "tokens",
        "MB",
        "loading, ms",
        "loading, files not in memory, ms",
        "cold, s",
        "from cache, s",
        "ratio",
    )
    lengths = [r["first_prompt"] for r in rows]
    summary = [
        f"{len(rows)} prompts of {min(lengths)} to {max(lengths)} tokens; "
        f"{sum(r['first_differs_at'] is None for r in rows)} first runs, "
        f"{sum(r['again_differs_at'] is None for r in rows)} repeats from the restored cache and "
        f"{sum(r['continued_differs_at'] is None for r in rows)} continuations from it "
        "gave exactly the reference's tokens.",
        f"The longest loading was {max(r['loading_ms']['max'] for r in timing):.0f} ms, with the files out of memory "
        f"{max(r['loading_evicted_ms']['max'] for r in timing):.0f} ms (limit: {LOADING_LIMIT_MS:.0f} ms).",
        f"The seed's own call, taken literally: {literal['equal']} of {literal['prompts']} outputs were the same.",
    ]
    parts = {"summary": "\n".join(summary), "machine": machine_lines(content), "exactness": table(head, exact),
             "loading": table(times_head, times), "literal": _literal(literal)}  # fmt: skip
    return verdict_title(content, "cache injection"), parts


def _literal(literal: Json) -> str:
    rows = [
        (row["name"], *(f"`{json.dumps(text, ensure_ascii=False)}`" for text in row["texts"]))
        for row in literal["rows"]
    ]
    return table(("prompt", "without cache", "with the whole cache and the whole prompt"), rows[:LITERAL_ROWS_SHOWN])


def plot(content: Json, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    timing = content["timing"]
    tokens = [row["prompt_tokens"] for row in timing]
    figure, axes = plt.subplots(figsize=(7, 4))
    lines = (("cold_first_token_s", 1.0, "first token, cold"), ("warm_first_token_s", 1.0, "first token, from disk"),
             ("loading_ms", 1e-3, "of which loading"))  # fmt: skip
    for key, scale, label in lines:
        low, middle, high = ([row[key][part] * scale for row in timing] for part in ("min", "median", "max"))
        (line,) = axes.plot(tokens, middle, marker="o", label=label)
        axes.fill_between(tokens, low, high, alpha=0.2, color=line.get_color())
    axes.axhline(LOADING_LIMIT_MS / 1000, linestyle=":", color="grey", label="limit of the plan for loading")
    axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="seconds")
    axes.set_title(f"EXP-003 on {content['machine']['device']}: {content['machine']['model']}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _span(value: Json) -> str:
    return f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"

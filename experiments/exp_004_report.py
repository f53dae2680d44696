"""EXP-004's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json, machine_lines, table, verdict_title


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_004_steps.png")
    yes = {True: "yes", False: "NO"}
    head = ("batch", "sequence", "prompt", "tokens", "ended by", "steps", "still running", "save, ms",
            "equals solo run", "cached after reopening", "continued equals uncached")  # fmt: skip
    lines = [
        (name, r["name"], r["prompt_tokens"], r["generated"], r["ended_by"], f"{r['first_step']} to {r['end_step']}",
         r["rows_going_on"], r["saved_ms"], yes[r["differs_at"] is None],
         f"{r['continued_cached']} of {r['continued_prompt']}", yes[r["continued_differs_at"] is None])
        for name, batch in content["batches"].items() for r in batch
    ]  # fmt: skip
    costs_head = (
        "prompt tokens",
        "handed over",
        "MB",
        "copy, ms",
        "step before, ms",
        "copy / step",
        "wait, ms",
        "save, ms",
    )
    costs = [
        (c["tokens"], c["kind"], f"{c['mb']['median']:.1f}", _span(c["copy_ms"]), _span(c["quiet_step_ms"]),
         " ".join(f"{100 * c['share_of_step'][k]:.2g}%{t}" for k, t in (("median", " ("), ("min", " to"), ("max", ")"))
                  ).replace("( ", "("),
         _span(c["wait_ms"]), _span(c["save_ms"]) if "save_ms" in c else "")
        for c in content["costs"]
    ]  # fmt: skip
    parts = {"summary": _summary(content), "machine": machine_lines(content), "rows": table(head, lines),
             "costs": table(costs_head, costs), "claims": _claims(content["seed_claims"])}  # fmt: skip
    return verdict_title(content, "per-sequence cache extraction"), parts


def _summary(content: Json) -> str:
    rows = [row for batch in content["batches"].values() for row in batch]
    whole = [cost for cost in content["costs"] if cost["kind"] == "whole"]
    busy = content["busy"]
    most = max(whole, key=lambda cost: cost["tokens"])
    return "\n".join((
        f"{len(rows)} sequences in {len(content['batches'])} batches: {sum(r['differs_at'] is None for r in rows)} "
        f"gave exactly the tokens they give alone, {sum(r['rows_going_on'] > 0 for r in rows)} were handed over and "
        f"saved while others continued, {sum(r['continued_ok'] for r in rows)} were complete in the reopened store, "
        f"and {sum(r['continued_differs_at'] is None for r in rows)} continued exactly like an uncached run.",
        f"Handing over the whole cache of about {most['tokens']} tokens ({most['mb']['median']:.0f} MB) took "
        f"{most['copy_ms']['median']:.1f} ms, {100 * most['share_of_step']['median']:.1f}% of the decode step before "
        f"it (medians of {most['copy_ms']['n']}); saving it durably took {most['save_ms']['median']:.0f} ms "
        f"(median of {most['save_ms']['n']}).",
        f"In a batch of {busy['in_the_batch']} that was kept full, {busy['turns']} turns of agents with "
        f"{busy['history']} tokens, {busy['tokens'] // busy['turns']} tokens each: handing over took "
        f"{busy['copy_ms']:.0f} ms beside {busy['decode_ms'] / 1000:.3g} s of decoding, "
        f"{100 * busy['share']:.2g}% of it.",
    ))  # fmt: skip


def _claims(found: Json) -> str:
    yes = {True: "yes", False: "no"}
    gemma = ", ".join(f"{count} {kind}" for kind, count in found["gemma_3_caches"].items())
    rows = (
        ("Gemma 3 with 48 layers has 48 `RotatingKVCache` objects (both reports' key findings)", gemma),
        ("`Response.prompt_cache` is an attribute (reports) or a method (plan)", found["prompt_cache_is"]),
        ("`while responses := gen.next()` ends: is `next()` of an exhausted generator falsy?",
         f"{yes[found['next_of_an_exhausted_generator_is_falsy']]}; `next_generated()`: "
         f"{yes[found['next_generated_of_an_exhausted_generator_is_falsy']]}"),
        ("the seed's loop, which takes no token from the last response, collects all tokens",
         f"{found['tokens_the_seeds_loop_collects']} of {found['tokens_asked_for']}; the last response carries the "
         f"last token: {yes[found['last_response_carries_the_last_token']]}"),
        ("tokens behind the prompt in the cache that comes out", found["tokens_in_extracted_cache_beyond_the_prompt"]),
        ("`insert` takes one `max_tokens` number for all prompts", yes[found["insert_takes_one_max_tokens_for_all"]]),
        (
            f"mlx-lm reloads {found['reload_tokens']} tokens: until the loader returns; until the arrays are there",
            f"{_span(found['reload_returns_ms'])} ms; {_span(found['reload_evaluated_ms'])} ms",
        ),
        ("stoker serves Gemma 3, the seeds' own model", yes[found["gemma_3_is_served"]]),
    )  # fmt: skip
    return table(("asked", "found"), rows)


def plot(content: Json, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    batch = list(content["batches"].values())[-1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for place, row in enumerate(sorted(batch, key=lambda r: (r["first_step"], r["end_step"]))):
        left.barh(place, row["end_step"] - row["first_step"] + 1, left=row["first_step"] - 0.5)
        left.text(row["end_step"] + 0.7, place, row["name"], va="center", fontsize=8)
    left.set(xlabel="engine step", yticks=[], title="one token a step; the cache leaves at the right end")
    left.set_xlim(0, 1.45 * max(row["end_step"] for row in batch))
    for kind in ("whole", "new part"):
        costs = [cost for cost in content["costs"] if cost["kind"] == kind]
        tokens = [cost["tokens"] for cost in costs]
        low, middle, high = ([100 * cost["share_of_step"][part] for cost in costs] for part in ("min", "median", "max"))
        (line,) = right.plot(tokens, middle, marker="o", label=f"{kind} handed over")
        right.fill_between(tokens, low, high, alpha=0.2, color=line.get_color())
    right.set(
        xlabel="prompt tokens", ylabel="hand-over, % of a decode step", ylim=(0, None), title="cost of handing over"
    )
    right.legend()
    figure.suptitle(f"EXP-004 on {content['machine']['device']}: {content['machine']['model']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _span(value: Json) -> str:
    return f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"

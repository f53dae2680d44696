"""EXP-004's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, band, columns, figure, listed, say, yes


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    costs, busy = content["costs"], content["busy"]
    most = max((cost for cost in costs if cost["kind"] == "whole"), key=lambda cost: cost["tokens"])
    number = (
        f"handing over {most['tokens']} tokens: {most['copy_ms']['median']:.1f} ms of a "
        f"{most['quiet_step_ms']['median']:.0f} ms step; {100 * busy['share']:.2g} % of a busy batch's decoding"
    )
    return Report("per-sequence cache extraction", number, {
        "summary": _summary(content["batches"], most, busy), "rows": _rows(content["batches"]),
        "costs": columns(costs, COSTS), "claims": _claims(content["seed_claims"]),
    })  # fmt: skip


def _summary(batches: Json, most: Json, busy: Json) -> str:
    rows = [row for batch in batches.values() for row in batch]
    equal, continued = (sum(row[key] is None for row in rows) for key in ("differs_at", "continued_differs_at"))
    return "\n".join((
        f"{len(rows)} sequences in {len(batches)} batches: {equal} gave exactly the tokens they give alone, "
        f"{sum(r['rows_going_on'] > 0 for r in rows)} were handed over and saved while others continued, "
        f"{sum(r['continued_ok'] for r in rows)} were complete in the reopened store, and {continued} continued "
        "exactly like an uncached run.",
        say(most, "Handing over the whole cache of about {tokens} tokens ({mb[median]:.0f} MB) took "
            "{copy_ms[median]:.1f} ms, {share_of_step[median]:.1%} of the decode step before it (medians of "
            "{copy_ms[n]}); saving it durably took {save_ms[median]:.0f} ms (median of {save_ms[n]})."),
        say(busy | {"each": busy["tokens"] // busy["turns"], "decode_s": busy["decode_ms"] / 1000},
            "In a batch of {in_the_batch} that was kept full, {turns} turns of agents with {history} tokens, {each} "
            "tokens each: handing over took {copy_ms:.0f} ms beside {decode_s:.3g} s of decoding, {share:.2%} of it."),
    ))  # fmt: skip


def _rows(batches: Json) -> str:
    rows = [
        {**r, "batch": name, "as_alone": r["differs_at"] is None, "as_uncached": r["continued_differs_at"] is None}
        for name, batch in batches.items() for r in batch
    ]  # fmt: skip
    return columns(rows, {
        "batch": "{batch}", "sequence": "{name}", "prompt": "{prompt_tokens}", "tokens": "{generated}",
        "ended by": "{ended_by}", "steps": "{first_step} to {end_step}", "still running": "{rows_going_on}",
        "save, ms": "{saved_ms}", "equals solo run": "{as_alone}",
        "cached after reopening": "{continued_cached} of {continued_prompt}",
        "continued equals uncached": "{as_uncached}",
    })  # fmt: skip


COSTS = {
    "prompt tokens": "{tokens}", "handed over": "{kind}", "MB": "{mb[median]:.1f}", "copy, ms": "{copy_ms:.3g}",
    "step before, ms": "{quiet_step_ms:.3g}", "copy / step": "{share_of_step:.1%}", "wait, ms": "{wait_ms:.3g}",
    "save, ms": "{save_ms:.3g}",
}  # fmt: skip


def _claims(found: Json) -> str:
    gemma = ", ".join(f"{count} {kind}" for kind, count in found["gemma_3_caches"].items())
    asked = {
        "Gemma 3 with 48 layers has 48 `RotatingKVCache` objects (both reports' key findings)": gemma,
        "`Response.prompt_cache` is an attribute (reports) or a method (plan)": "{prompt_cache_is}",
        "`while responses := gen.next()` ends: is `next()` of an exhausted generator falsy?":
            "{next_of_an_exhausted_generator_is_falsy}; `next_generated()`: "
            "{next_generated_of_an_exhausted_generator_is_falsy}",
        "the seed's loop, which takes no token from the last response, collects all tokens":
            "{tokens_the_seeds_loop_collects} of {tokens_asked_for}; the last response carries the last token: "
            "{last_response_carries_the_last_token}",
        "tokens behind the prompt in the cache that comes out": "{tokens_in_extracted_cache_beyond_the_prompt}",
        "`insert` takes one `max_tokens` number for all prompts": "{insert_takes_one_max_tokens_for_all}",
        "mlx-lm reloads {reload_tokens} tokens: until the loader returns; until the arrays are there":
            "{reload_returns_ms:.3g} ms; {reload_evaluated_ms:.3g} ms",
        "stoker serves Gemma 3, the seeds' own model": "{gemma_3_is_served}",
    }  # fmt: skip
    said = {name: yes(value, "no") if isinstance(value, bool) else value for name, value in found.items()}
    return listed(said, ("asked", "found"), asked)


def plot(content: Json, results: Path) -> None:
    batch = list(content["batches"].values())[-1]
    with figure(content, results, "steps", (11, 4), panels=(1, 2)) as (left, right):
        for place, row in enumerate(sorted(batch, key=lambda r: (r["first_step"], r["end_step"]))):
            left.barh(place, row["end_step"] - row["first_step"] + 1, left=row["first_step"] - 0.5)
            left.text(row["end_step"] + 0.7, place, row["name"], va="center", fontsize=8)
        left.set(xlabel="engine step", yticks=[], title="one token a step; the cache leaves at the right end")
        left.set_xlim(0, 1.45 * max(row["end_step"] for row in batch))
        for kind in ("whole", "new part"):
            costs = [cost for cost in content["costs"] if cost["kind"] == kind]
            shares = [cost["share_of_step"] for cost in costs]
            band(right, [cost["tokens"] for cost in costs], shares, 100, label=f"{kind} handed over")
        right.set(xlabel="prompt tokens", ylabel="hand-over, % of a decode step", ylim=(0, None))
        right.set_title("cost of handing over")
        right.legend()

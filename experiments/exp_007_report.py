"""EXP-007's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, band, columns, figure, span, table, yes

EXPECTED = {10: "1.1", 100: "1.5 to 2", 1000: "3 to 5"}
"""The document's own words, by tokens of context."""


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    rows = content["speeds"]
    long = rows[min(2, len(rows) - 1)]
    times = f"{_whole(long)['median']} times as fast at {long['tokens']} tokens of context"
    number = f"an answer of {long['generated']} tokens {times}"
    return Report("whole answers from a cache", number, {
        "summary": _summary(content), "bytes": _bytes(content["bytes"]), "answers": _answers(content["answers"]),
        "speeds": _speeds(rows), "lengths": _lengths(rows),
    })  # fmt: skip


def _summary(content: Json) -> str:
    rows, verdict = content["speeds"], content["verdict"]
    speeds = ", ".join(f"{_whole(row)['median']} at {row['tokens']}" for row in rows)
    same = verdict["the_same_answer_with_and_without_cache"] and verdict["greedy_answers_are_mlx_lms"]
    n_answers = sum(row[kind]["answers"] for row in content["answers"] for kind in ("greedy", "seeded"))
    return "\n".join(
        (
            f"A token of Qwen2-0.5B takes {content['bytes']['by_layout']} bytes in 16 bit; the document has 12 KB.",
            f"{n_answers} answers to {len(content['answers'])} prompts, greedy and seeded, with and without cache: "
            + ("each prompt has one answer each way, and the greedy one is mlx-lm's." if same else "NOT all the same."),
            f"An answer of {rows[0]['generated']} tokens from RAM came so many times as fast as without a cache, by "
            f"tokens of context: {speeds}.",
        )
    )


def _whole(row: Json) -> Json:
    found: Json = row["memory"]["speedup"][f"{row['generated']}"]
    return found


def _bytes(found: Json) -> str:
    shape = f"{found['layers']} layers x 2 x {found['kv_heads']} K/V heads x {found['head_dim']} x 2 bytes"
    turns = [{**turn, "asked": {9: "0.11", 100: "1.2"}[turn["tokens"]], "mb": round(turn["arrays"] / 1e6, 2),
              "each": turn["arrays"] // turn["tokens"]} for turn in found["turns"]]  # fmt: skip
    return f"By layout: {shape} = {found['by_layout']} bytes a token.\n\n" + columns(turns, {
        "tokens": "{tokens}", "the document, MB": "{asked}", "in memory, bytes": "{arrays}", "MB": "{mb}",
        "in files, bytes": "{files}", "bytes a token in memory": "{each}",
    })  # fmt: skip


def _answers(rows: list[Json]) -> str:
    def same(found: Json) -> str:
        return f"{found['answers']} the same" if found["different"] == 1 else f"{found['different']} DIFFERENT"

    lines = [
        (row["prompt"], row["tokens"], same(row["greedy"]),
         yes(row["differs_from_mlx_lm_at"] is None), same(row["seeded"]),
         yes(row["seeded"]["first"] != row["greedy"]["first"], "no"))
        for row in rows
    ]  # fmt: skip
    return table(("prompt", "tokens", "greedy", "as mlx-lm's", "seeded", "unlike the greedy one"), lines)


def _speeds(rows: list[Json]) -> str:
    head = ("tokens of context", "expected", "without cache, s", "from disk, s", "from RAM, s", "disk: times as fast",
            "RAM: times as fast", "met", "a further token, ms")  # fmt: skip
    lines = []
    for row in rows:
        expected = EXPECTED.get(row["tokens"], "")
        met = ("yes" if _whole(row)["median"] >= float(expected.split()[0]) else "no") if expected else ""
        seconds = [span(row[source]["answer_s"]) for source in ("no cache", "disk", "memory")]
        speedups = [span(row[source]["speedup"][f"{row['generated']}"]) for source in ("disk", "memory")]
        lines.append((row["tokens"], expected, *seconds, *speedups, met, row["decode_ms"]))
    return table(head, lines)


def _lengths(rows: list[Json]) -> str:
    """By the length of the answer: a short one gains more."""
    lengths = list(rows[0]["memory"]["speedup"])
    lines = [(row["tokens"], *(span(row["memory"]["speedup"][n]) for n in lengths)) for row in rows]
    heads = [f"{n} token{'' if n == '1' else 's'}" for n in lengths]
    return table(("tokens of context", *heads), lines)


def plot(content: Json, results: Path) -> None:
    rows = content["speeds"]
    with figure(content, results, "whole_answer", (7, 4)) as axes:
        for n in rows[0]["memory"]["speedup"]:
            found = [row["memory"]["speedup"][n] for row in rows]
            band(axes, [row["tokens"] for row in rows], found, label=f"{n} tokens")
        for n, expected in EXPECTED.items():
            ends = [float(x) for x in expected.split(" to ")]
            axes.plot([n, n], [ends[0], max(ends[-1], 1.03 * ends[0])], color="black", linewidth=6, alpha=0.5)
        axes.plot([], [], color="black", linewidth=6, alpha=0.5, label="the document expects")
        axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="from RAM, times as fast as without")
        axes.legend(title="answer of")

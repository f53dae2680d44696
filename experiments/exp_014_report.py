"""EXP-014's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, bars, columns, figure, say, span

_ROUNDS = {"none": "stays", "SIGTERM": "stopped and restarted", "SIGKILL": "killed and restarted"}


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    found, steps = content["rounds"], content["steps"]
    kinds = {"term": found["ratio"]["SIGTERM"], "kill": found["ratio"]["SIGKILL"]}
    number = f"a round after a restart: {found['ratio']['SIGTERM']['median']} times a round without one"
    parts = {"summary": say({**content, **kinds}, SUMMARY), "rounds": _rounds(found), "steps": _steps(steps)}
    return Report("a restart, and a long memory coming back", number, parts)


SUMMARY = (
    "A round of {rounds[agents]} agents, {rounds[tokens_at_first]} to {rounds[tokens_at_last]} tokens each, took "
    "{term[median]} times as long after a stop and a restart as without (median of {term[n]} pairs, {term[min]} to "
    "{term[max]}; target: at most 1.15), and {kill[median]} times after a `kill -9` ({kill[min]} to {kill[max]}). Of "
    "the stored tokens at most {rounds[stored_tokens_prefilled_again]} was prefilled again. While {steps[mb]} MB were "
    "read and verified ({steps[read_s][median]} s), {steps[rows]} other sequences decoded; their longest step took "
    "{steps[longest_over_quiet][reading]} times a quiet one for a restore (target: at most 2), and "
    "{steps[longest_over_quiet][reading ahead]} times for a cache that was read ahead."
)


def _rounds(found: Json) -> str:
    rows = [
        {"kind": _ROUNDS[kind], "round": span(found["round_s"][kind], " s"), "ratio": found["ratio"].get(kind),
         "sources": ", ".join(f"{n} {source}" for source, n in sources.items())}
        for kind, sources in found["sources"].items()
    ]  # fmt: skip
    head = {"the worker": "{kind}", "a round: median (least to most)": "{round}",
            "times the round without a restart": "{ratio}", "sources of the caches": "{sources}"}  # fmt: skip
    said = (
        "Start of the worker until it is ready: {started}. Stored tokens that were prefilled again, at most: "
        "{stored_tokens_prefilled_again}. Load average of the machine after each round: {load_average}."
    )
    return f"{columns(rows, head)}\n\n{say({**found, 'started': span(found['start_s'], ' s')}, said)}"


def _steps(steps: Json) -> str:
    parts = ("p95_over_quiet", "longest_over_quiet")
    rows = [{"name": name, "ms": span(taken, " ms"), "n": taken["n"], **{part: steps[part][name] for part in parts}}
            for name, taken in steps["step_ms"].items()]  # fmt: skip
    return columns(rows, {
        "meanwhile": "{name}", "step, median (least to most)": "{ms}", "steps": "{n}",
        "95th percentile / quiet": "{p95_over_quiet}", "longest / quiet": "{longest_over_quiet}",
    })  # fmt: skip


def plot(content: Json, results: Path) -> None:
    rounds = {_ROUNDS[kind]: taken for kind, taken in content["rounds"]["round_s"].items()}
    with figure(content, results, "restart", (10, 4), panels=(1, 2)) as (left, right):
        bars(left, rounds, color="tab:blue")
        bars(right, content["steps"]["step_ms"], color="tab:blue")
        left.set_ylabel("s per round")
        right.set_ylabel("ms per step")

"""EXP-024, a soak: after many jobs, hours and kills, is anything of a worker larger or slower than before?

``--part scripted``: 50,000 small jobs of many agents, through Redis, to a worker process with the scripted engine.
``--part real``: jobs for ``--minutes``, with the real model. The results keep both parts, each from its last run.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any

from bench import Bench
from command import arguments, finish, measured
from common import Json, machine, note
from flatness import flatness, life, point, rate
from long_run import Served, long_tailed, nearest, out_of_order, prefilled_again, serve, slices
from prompts import SIX_KINDS, text_of
from redis import Redis
from report import Report, columns, figure, lines, machine_line, say, yes
from store_bench import sizes
from worker_process import SCRIPTED

NUMBER = "024"
PARTS = {"scripted": "Scripted engine", "real": "Real model"}
RESTARTS = ((0.1, SIGKILL), (0.2, SIGTERM), (0.3, SIGKILL), (0.9, SIGKILL))
"""At which share of the run, with which signal. The long life between the last two has to be flat."""
POINTS, SLICES = 240, 40
Text = Callable[[random.Random, int, int], str]
"""Of a prompt, from the number of the agent's turns before it and of the job."""


@dataclass(frozen=True)
class Load:
    """
    Attributes:
        jobs: how many in all; ``None``: they are submitted for `seconds`.
        seconds: how long the run takes; a guess if there are `jobs`.
        agents: how many take turns at any time; each takes 2 to `turns` of them and never comes back.
        answer: fewest and most tokens of an answer.
        ahead: jobs that wait or run at any time.
        engine, limits: options of the worker.
    """

    jobs: int | None
    seconds: float
    agents: int
    turns: int
    answer: tuple[int, int]
    ahead: int
    engine: tuple[str, ...]
    limits: tuple[str, ...]
    result_ttl_s: int
    restarts: tuple[tuple[float, Signals], ...] = RESTARTS


def scripted(quick: bool) -> tuple[Load, Text]:
    limits = ("--agent-ttl", "1m", "--store-max-bytes", "48000000", "--memory-max-bytes", "250000")
    jobs, seconds, agents = (400, 6.0, 20) if quick else (50_000, 480.0, 200)

    def text(dice: random.Random, turn: int, number: int) -> str:
        return " ".join(dice.choices(("alpha", "beta", "gamma", "delta"), k=dice.randint(4, 24)))

    return Load(jobs, seconds, agents, 20, (4, 16), agents, SCRIPTED, limits, result_ttl_s=60), text


def real(bench: Bench, minutes: float, quick: bool) -> tuple[Load, Text]:
    engine = ("--model", bench.source, "--dtype", bench.dtype)
    limits = ("--agent-ttl", "5m", "--store-max-bytes", "1000000000", "--memory-max-bytes", "256000000")
    longest = 60 if quick else 500

    def text(dice: random.Random, turn: int, number: int) -> str:
        n_tokens = long_tailed(dice, 12, 0.8, 4, 100) if turn else long_tailed(dice, 80, 1.0, 20, longest)
        return text_of(bench.encode, dice.choice(SIX_KINDS), n_tokens, seed=number)

    if quick:
        return Load(None, 10.0, 6, 4, (2, 4), 12, engine, limits, 60, RESTARTS[:1]), text
    return Load(None, 60 * minutes, 32, 12, (4, 24), 64, engine, limits, result_ttl_s=300), text


def requests(load: Load, text: Text, progress: Callable[[int], float]) -> Iterator[dict[str, Any]]:
    """Turns of agents, in an order that changes every round, until the run is over."""
    dice = random.Random(24)
    numbers = count()
    turns: dict[str, list[int]] = {}  # taken, and to take
    for job in count():
        if progress(job) >= 1:
            return
        if job % load.agents == 0:
            while len(turns) < load.agents:
                turns[f"agent {next(numbers)}"] = [0, dice.randint(2, load.turns)]
            order = dice.sample(list(turns), load.agents)
        agent = order[job % load.agents]
        taken, most = turns[agent]
        prompt = f"{agent}, note {taken}: {text(dice, taken, job)}\n"  # no two agents begin alike
        yield {"agent_id": agent, "prompt": prompt, "context": "append", "max_tokens": dice.randint(*load.answer)}
        turns[agent][0] += 1
        if taken + 1 == most:
            del turns[agent]


def soak(folder: Path, load: Load, text: Text) -> tuple[Served, list[Json], list[Json]]:
    """Run a load; returns what was served, the worker's samples of itself, and those of its store and server."""
    beside, began = list[Json](), cache(time.monotonic)  # of its first call, when the worker is ready

    def progress(n_jobs: int) -> float:
        return n_jobs / load.jobs if load.jobs else (time.monotonic() - began()) / load.seconds

    def look(n_ended: int, connection: Redis) -> None:
        if beside and time.time() - beside[-1]["at"] < load.seconds / POINTS:
            return
        redis = {"redis_bytes": connection.info("memory")["used_memory"], "keys": connection.dbsize()}
        beside.append({"at": time.time(), **sizes(folder / "store"), **redis})
        if len(beside) % 10 == 1:
            note(f"{n_ended} jobs, {progress(n_ended):.0%}: {beside[-1]}")

    served, samples, _ = serve(
        folder, (*load.engine, *load.limits), requests(load, text, progress), ahead=load.ahead,
        restarts=load.restarts, progress=progress, look=look, result_ttl_s=load.result_ttl_s,
    )  # fmt: skip
    return served, samples, beside


def part(load: Load, text: Text, facts: Json) -> Json:
    """One part's results."""
    with tempfile.TemporaryDirectory() as folder:
        served, samples, beside = soak(Path(folder), load, text)
    results = [result for result, _ in served.answered]
    again = prefilled_again(results)
    series = [point(served, nearest(samples, one["at"]), one) for one in beside]
    rates = [rate(one) for one in slices(served, samples, max(1, len(results) // SLICES))]
    flat = flatness(served, series, rates)
    return {
        "machine": facts,
        "verdict": {
            "every_job_has_one_result": len(results) == len(served.results) and set(served.n_results) == {1},
            "each_agents_turns_are_in_order": out_of_order(served.answered) == 0,
            "no_stored_token_is_prefilled_again_but_the_last": again <= 1,
            **flat.pop("verdict"),
        },
        "load": {"agents": load.agents, "turns": load.turns, "answer": load.answer, "ahead": load.ahead,
                 "limits": " ".join(load.limits), "result_ttl_s": load.result_ttl_s},
        "jobs": len(served.results),
        "agents": len({result.agent_id for result in results}),
        "took_s": round(max(served.ends) - served.began_at),
        "unanswered": served.unanswered[:20],
        "run_again": sum(result.attempt > 1 for result in results),
        "sources": dict(Counter(result.cache.source for result in results)),
        "stored_tokens_prefilled_again": again,
        "restarts": [{"signal": one.signal, "at_s": round(one.at - served.began_at, 1),
                      "took_s": round(one.ready_at - one.at, 2)} for one in served.restarts],
        "lives": [life(served, samples, *span) for span in served.lives],
        **flat,
        "series": series,
        "rates": rates,
    }  # fmt: skip


def measure(args: argparse.Namespace, *, quick: bool) -> Json:
    """Run the parts that are asked for; the others stay as their last run left them."""
    kept = args.out / "results" / f"exp_{NUMBER}_results.json"
    before = json.loads(kept.read_text()) if kept.exists() else {"quick": None}
    parts = before["parts"] if before["quick"] == quick else {}
    for name in [args.part] if args.part else PARTS:
        if name == "scripted":
            facts, (load, text) = machine(), scripted(quick)
        else:
            bench = Bench.load(args.model, args.dtype)
            facts, (load, text) = machine(bench.facts), real(bench, args.minutes, quick)
        parts[name] = measured(partial(part, load, text, facts), args, quick=quick)
        del parts[name]["verdict"]["passed"]
    verdict = {f"{name}_{check}": held for name in parts for check, held in parts[name]["verdict"].items()}
    return {"machine": facts, "verdict": {"both_parts_have_run": len(parts) == len(PARTS), **verdict}, "parts": parts}


NAMES = {
    "rss_mb": "worker's resident memory, MB", "heap_mb": "in use on its C heap, MB", "fds": "open descriptors",
    "threads": "threads",
    "files": "files of the store", "store_mb": "store on disk, MB", "database_mb": "database with its log, MB",
    "wal_mb": "the database's log (WAL), MB", "redis_mb": "Redis' memory, MB", "keys": "keys in Redis",
    "jobs_per_s": "jobs per second", "tokens_per_cpu_s": "tokens per CPU second of the worker",
}  # fmt: skip
PLOTS = (("rss_mb", "heap_mb"), ("fds", "threads"), ("store_mb", "database_mb", "wal_mb"), ("redis_mb",),
         ("jobs_per_s",), ("tokens_per_cpu_s",))  # fmt: skip
RATES = ("jobs_per_s", "tokens_per_cpu_s")


def render(content: Json, results: Path) -> Report:
    parts = content["parts"]
    plot(content, results)
    of_both = {"summary": _summary, "machine": machine_line, "loads": _load, "caches": _caches}
    of_each = {"flat": _flat, "lives": _lives}
    number = "; ".join(f"{one['jobs']} {key} jobs, not flat: {_not_flat(one)}" for key, one in parts.items())
    return Report("a soak", number, {
        **{name: "\n".join(f"* **{PARTS[key]}.** {make(one)}" for key, one in parts.items())
           for name, make in of_both.items()},
        **{f"{name} {key}": make(parts[key]) if key in parts else "Not run yet."
           for name, make in of_each.items() for key in PARTS},
    })  # fmt: skip


def _summary(part: Json) -> str:
    memory, (begin, end) = part["lines"]["rss_mb"], part["window_s"]
    good = part["verdict"]["every_job_has_one_result"] and part["verdict"]["each_agents_turns_are_in_order"]
    return (
        f"{part['jobs']} jobs of {part['agents']} agents in {part['took_s']} s, with {len(part['restarts'])} restarts. "
        f"{'Every' if good else 'NOT every'} job has one result, in each agent's order; {part['run_again']} ran "
        "again after a kill. "
        f"Resident memory is {memory['median']} MB and changes by {memory['change']:+.1f} MB in "
        f"{(end - begin) / 60:.1f} minutes. Not flat: {_not_flat(part)}."
    )


def _not_flat(part: Json) -> str:
    names = [NAMES[name].removesuffix(", MB") for name, line in part["lines"].items() if not line["is_flat"]]
    return " and ".join(names) or "nothing"


def _load(part: Json) -> str:
    return say(part["load"], (
        "{agents} agents take turns at any time, each 2 to {turns} of them; answers of {answer[0]} to {answer[1]} "
        "tokens; at most {ahead} jobs wait or run; a result stays in Redis for {result_ttl_s} s (`result_ttl_s`); the "
        "worker has `{limits}`."
    ))  # fmt: skip


def _caches(part: Json) -> str:
    found = ", ".join(f"{n} from {name}" for name, n in part["sources"].items())
    return (
        f"Caches: {found}. Stored tokens prefilled again, at most: {part['stored_tokens_prefilled_again']}."
        + "".join(f" Without an answer: `{reason}`." for reason in part.get("unanswered", ()))
    )


def _flat(part: Json) -> str:
    lines = [
        {**line, "name": NAMES[name], "limit": f"{'-' if name in RATES else '+'}{line['most']}",
         "flat": yes(line["is_flat"], "**no**")}
        for name, line in part["lines"].items()
    ]  # fmt: skip
    begin, end = part["window_s"]
    return f"From second {begin:.0f} to second {end:.0f}:\n\n" + columns(lines, {
        "": "{name}", "median": "{median}", "least": "{min}", "most": "{max}", "change": "{change:+.2f}",
        "limit": "{limit}", "flat": "{flat}",
    })  # fmt: skip


def _lives(part: Json) -> str:
    starts = [None, *(f"{one['took_s']} ({one['signal']})" for one in part["restarts"])]
    lives = [{**one, "n": n, "start": start}
             for n, (one, start) in enumerate(zip(part["lives"], starts, strict=True), start=1)]  # fmt: skip
    return columns(lives, {
        "life": "{n}", "begins, s": "{from_s}", "ends, s": "{to_s}", "ready after, s": "{start}", "jobs": "{jobs}",
        "RSS, MB: after 10 s, at the end": "{rss_mb[0]}, {rss_mb[1]}", "descriptors": "{fds[0]}, {fds[1]}",
        "threads": "{threads[0]}, {threads[1]}",
    })  # fmt: skip


def plot(content: Json, results: Path) -> None:
    """Figures over the minutes; the window is grey, restarts are lines."""
    parts = content["parts"]
    size = (18, 3.2 * len(parts))
    with figure(content, results, "soak", size, panels=(len(parts), len(PLOTS)), squeeze=False) as rows:
        for axes_of_part, (key, part) in zip(rows, parts.items(), strict=True):
            whole = [one for one in part["rates"] if not one["has_restart"]]
            for axes, names in zip(axes_of_part, PLOTS, strict=True):
                for name in filter(part["lines"].__contains__, names):
                    points = whole if name in RATES else part["series"]
                    minutes = [one["at_s"] / 60 for one in points]
                    lines(axes, minutes, {NAMES[name]: [one[name] for one in points]}, marker="", lw=1)
                axes.axvspan(*(at / 60 for at in part["window_s"]), color="0.92", zorder=0)
                for restart in part["restarts"]:
                    axes.axvline(restart["at_s"] / 60, color="C3", lw=0.8, ls="--")
                axes.set(xlabel="minutes", ylabel=NAMES[names[0]], ylim=(0, None))
            axes_of_part[0].set_title(PARTS[key])


if __name__ == "__main__":
    own = {
        "part": {"choices": tuple(PARTS), "help": "only this one; the other's results stay as they are"},
        "minutes": {"type": float, "default": 120.0, "help": "of the real part"},
    }
    args = arguments(__doc__ or "", model=True, more=own)
    finish(args, NUMBER, partial(measure, args), render)

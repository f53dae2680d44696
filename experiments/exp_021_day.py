"""EXP-021, a day in small: does a worker that serves 240 agents for 1,600 jobs grow, slow down or lose anything?

Jobs go through Redis to a worker process with the real model. Agents come, return soon or much later, and stay away;
lengths have long tails. The RAM cache is smaller than the agents. A quarter into it, the worker is killed.
"""

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
from bench import Bench, main
from common import Json, note
from long_run import long_tailed, mb, nearest, out_of_order, prefilled_again, serve, slices
from prompts import SIX_KINDS, text_of
from report import Report, listed, say, table
from store_bench import sizes

LIFE_BEFORE_KILL = 0.25
"""Share of the jobs that end before the worker is killed."""
WARM_UP = 0.25
"""Share of the second life's jobs before its memory and speed count."""
MOST_MB = 50.0
MOST_SLOWER = 0.1


@dataclass(frozen=True)
class Size:
    """
    Attributes:
        longest: most tokens of an agent's first prompt; later ones have a sixth of that at most.
        ahead: jobs that wait or run at any time.
        slices: parts of the day that are compared.
    """

    jobs: int
    agents: int
    longest: int
    answer: tuple[int, int]
    ahead: int
    slices: int
    ram_bytes: int


FULL = Size(1600, 240, 300, (2, 8), 100, 40, 128 << 20)
QUICK = Size(32, 6, 60, (2, 4), 12, 8, 4 << 20)


def day(bench: Bench, size: Size) -> list[dict[str, Any]]:
    """The requests of all jobs, in the order of their submission."""
    dice = random.Random(21)
    turns: list[int] = []  # of each agent
    recent: list[int] = []
    requests = []
    for number in range(size.jobs):
        agent = _agent(dice, number, turns, recent, size)
        tail = (6, 0.8, 4, size.longest // 6) if turns[agent] else (40, 1.1, 20, size.longest)
        n_tokens = long_tailed(dice, *tail)
        text = text_of(bench.encode, dice.choice(SIX_KINDS), n_tokens, seed=number)
        least, most = size.answer
        answer = min(most, least + int(dice.expovariate(1 / 3)))
        name = f"agent {agent}"
        prompt = f"{name}, note {turns[agent]}: {text}\n"  # no two agents begin alike
        requests.append({"agent_id": name, "prompt": prompt, "context": "append", "max_tokens": answer})
        turns[agent] += 1
    return requests


def _agent(dice: random.Random, number: int, turns: list[int], recent: list[int], size: Size) -> int:
    """A new agent at even intervals; else mostly one of the last forty, now and then any that was ever there."""
    if len(turns) <= number * size.agents // size.jobs:
        agent = len(turns)
        turns.append(0)
    else:
        agent = dice.choice(recent[-40:]) if dice.random() < 0.7 else dice.randrange(len(turns))
    if agent in recent:
        recent.remove(agent)
    recent.append(agent)
    return agent


def add_predictions(found: list[Json]) -> None:
    """The time that the work of each slice should have taken, and how the real one compares."""
    prices = _prices([one for one in found if not one["has_restart"]])
    for one in found:
        one["predicted_s"] = round(max(0.01, float(np.dot(_work(one), prices))), 3)
        one["of_predicted"] = round(one["s"] / one["predicted_s"], 3)


def _work(one: Json) -> list[float]:
    return [one["prefilled"], one["generated"], one["attended"]]


def _prices(found: Sequence[Json]) -> Any:
    """Seconds per prefilled, generated and attended token, none of them negative: least squares."""
    work, seconds = np.array([_work(one) for one in found], float), np.array([one["s"] for one in found])
    best, error = np.zeros(3), math.inf
    for n in (1, 2, 3):
        for columns in combinations(range(3), n):
            some, *_ = np.linalg.lstsq(work[:, columns], seconds, rcond=None)
            prices = np.zeros(3)
            prices[list(columns)] = some
            wrong = float(np.sum((work @ prices - seconds) ** 2))
            if (some >= 0).all() and wrong < error:
                best, error = prices, wrong
    return best


def slope(found: Sequence[Json], name: str) -> float:
    """Change per 1,000 jobs: the median of the slopes between all pairs of slices."""
    slopes = [(b[name] - a[name]) / (b["jobs"] - a["jobs"]) for a, b in combinations(found, 2)]
    return round(1000 * statistics.median(slopes), 3)


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    size = QUICK if quick else FULL
    requests = day(bench, size)
    stored: list[Json] = []

    def look(n_ended: int, _: object) -> None:
        stored.append({"at": time.time(), "bytes": sizes(folder / "store")["du_bytes"]})
        note(f"{n_ended} of {size.jobs} jobs")

    options = ("--model", bench.source, "--dtype", bench.dtype, "--memory-max-bytes", str(size.ram_bytes))
    served, seen, log = serve(
        folder, options, requests, ahead=size.ahead, restarts=[(LIFE_BEFORE_KILL, SIGKILL)],
        progress=lambda n_ended: n_ended / size.jobs, look=look,
    )  # fmt: skip
    results = [result for result, _ in served.answered]
    missing = size.jobs - len(results)
    if missing:
        raise RuntimeError(f"{missing} jobs have no answer:\n{log[-4000:]}")
    found = slices(served, seen, max(1, size.jobs // size.slices))
    for one in found:
        one["store_mb"] = mb(nearest(stored, served.began_at + one["ended_s"])["bytes"])
    add_predictions(found)
    steady = [one for one in found if one["life"] == 2 and not one["has_restart"]]
    steady = steady[int(WARM_UP * len(steady)) : -1]  # in the last one, the queue runs out
    growth = {name: slope(steady, f"{name}_mb") for name in ("rss", "active", "peak", "kept")}
    slower = slope(steady, "of_predicted")
    sources = sum((Counter(one["sources"]) for one in found), Counter())
    again = prefilled_again(results)
    (killed,) = served.restarts
    verdict = {
        "every_job_has_its_answer": missing == 0,
        "each_agents_turns_are_in_order": out_of_order(served.answered) == 0,
        "no_stored_token_is_prefilled_again_but_the_last": again <= 1,
        "memory_grows_by_at_most_50_mb_per_1000_jobs": max(growth["rss"], growth["active"]) <= MOST_MB,
        "speed_changes_by_at_most_10_percent_per_1000_jobs": abs(slower) <= MOST_SLOWER,
    }
    lengths = [result.usage.prompt_tokens for result in results]
    return {
        "verdict": verdict,
        "jobs": size.jobs,
        "agents": size.agents,
        "ram_cache_mb": mb(size.ram_bytes),
        "took_s": round(max(served.ends) - served.began_at),
        "prompt_tokens": dict(
            zip(("median", "p95", "most"), np.quantile(lengths, [0.5, 0.95, 1]).tolist(), strict=True)
        ),
        "restart_s": round(killed.ready_at - killed.at, 2),
        "run_again": sum(result.attempt > 1 for result in results),
        "sources": dict(sources),
        "cached_share": round(sum(one["cached"] for one in found) / sum(lengths), 3),
        "stored_tokens_prefilled_again": again,
        "steady_jobs": [steady[0]["jobs"], steady[-1]["jobs"]],
        "growth_mb_per_1000_jobs": growth,
        "slower_per_1000_jobs": slower,
        "slices": found,
    }


_ROWS = 10


SUMMARY = (
    "{jobs} jobs of {agents} agents took {took_s} s; prompts had {prompt_tokens[median]:.0f} tokens (median; 95th "
    "percentile {prompt_tokens[p95]:.0f}, most {prompt_tokens[most]:.0f}). Every job has its answer, and {run_again} "
    "of them ran again after the kill. From job {steady_jobs[0]} to job {steady_jobs[1]}, per 1,000 jobs: resident "
    "memory {growth_mb_per_1000_jobs[rss]:+.1f} MB, MLX's active memory {growth_mb_per_1000_jobs[active]:+.1f} MB, "
    "time by the work done {slower:+.1f} %."
)
NUMBER = "nothing lost; {growth_mb_per_1000_jobs[rss]:+.1f} MB of memory and {slower:+.1f} % of time per 1,000 jobs"
GROWTH = {
    "resident memory": "{rss:+.1f}", "MLX's active memory": "{active:+.1f}", "MLX's peak of a slice": "{peak:+.1f}",
    "memory that MLX keeps for reuse": "{kept:+.1f}",
}  # fmt: skip
SOURCES = (
    "\n\nFrom caches: {cached:.1f} % of all prompt tokens. Stored tokens prefilled again, at most: "
    "{stored_tokens_prefilled_again}. RAM cache: {ram_cache_mb:.0f} MB. The worker was ready {restart_s} s after the "
    "kill."
)


def render(content: Json, results: Path) -> Report:
    known = content | {"cached": 100 * content["cached_share"], "slower": 100 * content["slower_per_1000_jobs"]}
    found = Counter(content["sources"])
    sources = [
        (name, found[name], f"{100 * found[name] / content['jobs']:.1f} %") for name in ("memory", "disk", "none")
    ]
    return Report("a day in small", say(known, NUMBER), {
        "summary": say(known, SUMMARY), "time": _over_time(content["slices"]),
        "growth": listed(content["growth_mb_per_1000_jobs"], ("", "MB per 1,000 jobs"), GROWTH),
        "sources": table(("cache from", "jobs", "share"), sources) + say(known, SOURCES),
    })  # fmt: skip


def _over_time(slices: list[Json]) -> str:
    size = max(1, len(slices) // _ROWS)
    rows = []
    for first in range(0, len(slices), size):
        some = slices[first : first + size]
        last, seconds = some[-1], sum(one["s"] for one in some)
        predicted = sum(one["predicted_s"] for one in some)
        note = " (killed and restarted)" if any(one["has_restart"] for one in some) else ""
        rows.append([
            f"{last['jobs']}{note}", f"{seconds:.1f}", sum(one["prefilled"] for one in some),
            sum(one["generated"] for one in some), f"{sum(one['generated'] for one in some) / seconds:.1f}",
            f"{seconds / predicted:.2f}", f"{last['rss_mb']:.0f}", f"{last['active_mb']:.0f}",
            f"{max(one['peak_mb'] for one in some):.0f}", f"{last['store_mb']:.0f}",
        ])  # fmt: skip
    head = ["jobs ended", "s", "tokens prefilled", "generated", "generated per s", "time by the work",
            "RSS, MB", "MLX active, MB", "MLX peak, MB", "store, MB"]  # fmt: skip
    return table(head, rows)


if __name__ == "__main__":
    main(__doc__ or "", "021", run, render)

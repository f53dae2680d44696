"""EXP-027, checkpoints: what do agents with a common beginning, and conversations edited in the middle, prefill?

Models of mlx-lm's own classes with random weights: tiny ones of each kind of cache through the product's engine and
store, and two of about 130 M parameters behind a worker and mlx_lm.server.
Run: ``python experiments/exp_027_checkpoints.py``.
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from command import main
from common import Json, note, rss_mib
from peer_servers import STOKER, Answer, Job, Servers, rotated
from random_models import RandomModel, random_ids, write_model
from report import Report, columns
from smollm2 import smollm2
from synthetic_cache import save_turn
from works import work

from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.models.blas import find_blas
from stoker_worker.ports import GenerationWork
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

PLAIN: Final = "plain: llama"
KINDS: Final = (PLAIN, "window: gemma3_text", "hybrid: falcon_h1")
SERVED: Final = ("window, 130 M", "hybrid, 125 M")
COMMON, OWN, ANSWER = 2000, 60, 4
MOST_MORE, LEAST_SOONER, MOST_GROWN = 1.05, 5.0, 50e6
MEGABYTES: Final = {"max_mb": "max_bytes", "mb": "bytes", "grown_mb": "rss_grown_bytes"}


def prepared(
    store: AgentCacheStore, model: RandomModel, agent: str, ids: Sequence[int], n_system: int
) -> GenerationWork:
    """A turn that is ready for the engine, as the loader makes it."""
    restored = store.restore(
        ids, agent=store.open_agent(agent), model=model.loaded, salt=None, max_tokens=ANSWER, system_tokens=n_system
    )
    asked = work(ids, ANSWER, restored.prefix, is_saved=True)
    return replace(asked, shares=(None,), checkpoints_at=restored.checkpoints_at)


def turns(store: AgentCacheStore, model: RandomModel, prompts: dict[str, list[int]], n_system: int = 0) -> Json:
    """Turns of these agents in one batch, saved at their ends: tokens prefilled, and seconds to the first token."""
    began = time.perf_counter()
    works = {name: prepared(store, model, name, ids, n_system) for name, ids in prompts.items()}
    prefilled, first_s, answers = 0, 0.0, {}
    with closing(model.engine(max_batch=32, blocks=100_000, prefill_tokens=512)) as engine:
        uids = {engine.submit(one): name for name, one in works.items()}
        while engine.in_flight:
            ended = engine.step()
            if not first_s and (ended or any(one.tokens for one in engine.progress().values())):
                first_s = time.perf_counter() - began
            for end in ended:
                name = uids[end.uid]
                prefilled += len(prompts[name]) - end.cached_tokens
                answers[name] = list(end.generated_ids)
                save_turn(store, model.loaded, name, (*prompts[name], *end.generated_ids), end.cache)
    return {"prefilled": prefilled, "first_s": first_s, "answers": answers}


def crowd(model: RandomModel, folder: Path, n_agents: int, *, at_once: bool, n_system: int) -> Json:
    """Agents with one beginning: all in one batch, or one after the other through the store."""
    dice = random.Random(27)
    system = random_ids(dice, COMMON)
    prompts = {f"{n}": [*system, *random_ids(dice, OWN)] for n in range(n_agents)}
    with closing(AgentCacheStore(folder, memory_max_bytes=0)) as store:
        groups = [prompts] if at_once else [{name: ids} for name, ids in prompts.items()]
        done = [turns(store, model, group, n_system) for group in groups]
    answers = {name: ids for one in done for name, ids in one["answers"].items()}
    checked = (f"{n_agents // 2}", f"{n_agents - 1}")
    return {
        "prefilled": sum(one["prefilled"] for one in done),
        "tokens": sum(map(len, prompts.values())),
        "first_s": [round(one["first_s"], 3) for one in done],
        "exact": all(answers[name] == model.uncached(prompts[name], ANSWER) for name in checked),
    }


def edited(model: RandomModel, folder: Path, n_turns: int) -> Json:
    """A conversation of turns of 300 tokens; then some of its messages are sent again in other words, each with all
    that followed it."""
    dice, said = random.Random(28), list[int]()
    starts, tokens, prefilled, exact = [], 0, 0, True
    with closing(AgentCacheStore(folder, memory_max_bytes=0)) as store:
        for _ in range(n_turns):
            starts.append(len(said))
            prompt = [*said, *random_ids(dice, 300)]
            said = [*prompt, *turns(store, model, {"a": prompt})["answers"]["a"]]
        for number in (n_turns * 3 // 4, n_turns // 2, n_turns // 2):
            at = starts[number]
            prompt = [*said[:at], *random_ids(dice, 300), *said[at + 300 :]][: len(said) - ANSWER]
            done = turns(store, model, {"a": prompt})
            prefilled, tokens = prefilled + done["prefilled"], tokens + len(prompt)
            said = [*prompt, *done["answers"]["a"]]
            exact = exact and done["answers"]["a"] == model.uncached(prompt, ANSWER)
    return {"prefilled": prefilled, "tokens": tokens, "exact": exact}


def many(model: RandomModel, folder: Path, n_agents: int) -> Json:
    """Agents with one beginning, one after the other, in a store that has room for a fifth of them; bytes at the end,
    and how far the process has grown since a fifth of them had come."""
    dice = random.Random(29)
    system = random_ids(dice, COMMON)
    prefilled, rss, n_bytes, max_bytes = 0, 0.0, 0, 0
    with closing(AgentCacheStore(folder, memory_max_bytes=16 << 20)) as store:
        store.start_upkeep()
        for n in range(n_agents):
            if n == n_agents // 5:
                rss, max_bytes = rss_mib(os.getpid()), store.budget.total_bytes
                store.budget.max_bytes = max_bytes
            prefilled += turns(store, model, {f"{n}": [*system, *random_ids(dice, OWN)]})["prefilled"]
        store.budget.make_room()
        n_bytes = store.budget.total_bytes
    plain = COMMON + n_agents * OWN + (n_agents - 1) * (COMMON % BLOCK_TOKENS)
    return {
        "agents": n_agents,
        "prefilled": prefilled,
        "of_plain": round(prefilled / plain, 3),
        "tokens": n_agents * (COMMON + OWN),
        "max_bytes": max_bytes,
        "bytes": n_bytes,
        "rss_grown_bytes": int((rss_mib(os.getpid()) - rss) * 2**20),
    }


def served(name: str, folder: Path, n_agents: int) -> list[Json]:
    """First turns of agents, one after the other, of a worker and of mlx_lm.server: with one system prompt, and with a
    common beginning of their messages that nobody knows. The servers take turns."""
    dice, cells = random.Random(30), list[Json]()
    write_model(name, folder / "model", smollm2())
    servers = Servers(folder / "model", "float32", find_blas(), folder, n_agents, None)
    with servers.started("served") as (started, _):
        for case in ("system prompt", "unknown beginning"):
            common = _numbers(dice, COMMON // 5)
            found: dict[str, list[tuple[float, Answer]]] = {server: [] for server in started}
            for n in range(n_agents):
                own = _numbers(dice, OWN // 5)
                job = Job(own, 1, common) if case == "system prompt" else Job(f"{common} {own}", 1)
                for server in rotated(started, n):
                    began = time.perf_counter()
                    (answer,) = started[server].backlog(f"{case} {n}", [job])
                    found[server].append((time.perf_counter() - began, answer))
            cells += [_served_cell(name, server, case, those) for server, those in found.items()]
    return cells


def _served_cell(name: str, server: str, case: str, answers: list[tuple[float, Answer]]) -> Json:
    seconds = [round(one, 3) for one, _ in answers]
    return {
        "model": name,
        "server": server,
        "case": case,
        "tokens": sum(answer.n_prompt for _, answer in answers),
        "prefilled": sum(answer.n_prompt - (answer.n_cached or 0) for _, answer in answers),
        "first_s": seconds,
        "later_s": round(statistics.median(seconds[1:]), 3),
        "second_sooner": round(seconds[0] / seconds[1], 1),
        "sooner": round(seconds[0] / statistics.median(seconds[1:]), 1),
    }


def _numbers(dice: random.Random, n: int) -> str:
    """A text of about five tokens for each number."""
    return " ".join(f"{dice.randrange(1000, 10000)}" for _ in range(n))


def run(folder: Path, *, quick: bool) -> Json:
    cells, crowds = list[Json](), list[Json]()
    for kind in KINDS:
        model = RandomModel.make(kind)
        for case, measure in _cases(model, quick=quick).items():
            note(f"{kind}: {case}")
            found = measure(folder / f"{len(cells)}")
            cells.append({"model": kind, "case": case, **found})
        if kind != PLAIN:
            note(f"{kind}: many agents")
            crowds.append({"model": kind, **many(model, folder / kind, 10 if quick else 1000)})
    for cell in cells:
        plain = next(one for one in cells if one["model"] == PLAIN and one["case"] == cell["case"])
        cell["of_plain"] = round(cell["prefilled"] / plain["prefilled"], 3)
        times = cell.get("first_s", [])
        cell["sooner"] = round(times[0] / statistics.median(times[1:]), 1) if len(times) > 1 else None
    by_server = []
    for name in SERVED:
        (folder / name).mkdir()
        by_server += served(name, folder / name, 2 if quick else 4)
    verdict = {
        "all_tokens_equal": all(cell["exact"] for cell in cells),
        "all_prefill_5_percent_more_than_a_plain_model_at_most": all(
            one["of_plain"] <= MOST_MORE for one in (*cells, *crowds)
        ),
        "the_second_agents_first_token_comes_5_times_as_soon": all(
            one["second_sooner"] >= LEAST_SOONER for one in by_server if one["server"] == STOKER
        ),
        "a_full_store_keeps_its_limit_and_the_process_grows_by_50_mb_at_most": all(
            one["bytes"] <= one["max_bytes"] and one["rss_grown_bytes"] <= MOST_GROWN for one in crowds
        ),
    }
    return {"verdict": verdict, "cells": cells, "crowds": crowds, "served": by_server}


def _cases(model: RandomModel, *, quick: bool) -> dict[str, Callable[[Path], Json]]:
    cases: dict[str, Callable[[Path], Json]] = {}
    for n in (3,) if quick else (8, 32):
        cases[f"{n} agents at once"] = partial(crowd, model, n_agents=n, at_once=True, n_system=COMMON)
        cases[f"{n} agents, one by one"] = partial(crowd, model, n_agents=n, at_once=False, n_system=COMMON)
    n = 3 if quick else 8
    cases[f"{n} agents, one by one, no system prompt"] = partial(crowd, model, n_agents=n, at_once=False, n_system=0)
    cases["three edits of a conversation"] = partial(edited, model, n_turns=4 if quick else 12)
    return cases


CELLS = {
    "model": "{model}", "case": "{case}", "tokens in the prompts": "{tokens}", "prefilled": "{prefilled}",
    "by those of the plain model": "{of_plain}", "first token, times as soon": "{sooner}", "answers equal": "{exact}",
}  # fmt: skip


CROWDS = {
    "model": "{model}", "agents": "{agents}", "tokens in the prompts": "{tokens}", "prefilled": "{prefilled}",
    "by those of a plain model": "{of_plain}", "limit of the store": "{max_mb} MB", "in it at the end": "{mb} MB",
    "the process grew by": "{grown_mb} MB",
}  # fmt: skip

SERVERS = {
    "model": "{model}", "beginning": "{case}", "server": "{server}", "tokens in the prompts": "{tokens}",
    "prefilled": "{prefilled}", "first agent": "{first} s", "second agent": "{second} s", "later agents": "{later_s} s",
    "second, times as soon": "{second_sooner}",
}  # fmt: skip


def render(content: Json, results: Path) -> Report:
    others = [cell for cell in content["cells"] if cell["model"] != PLAIN]
    edits = [cell for cell in others if "edits" in cell["case"]]
    worst, worst_edit = (max(c["of_plain"] for c in group) for group in (others, edits))
    ours = [one for one in content["served"] if one["server"] == STOKER]
    sooner = min(one["second_sooner"] for one in ours)
    crowds = [
        one | {name: round(one[key] / 1e6, 1) for name, key in MEGABYTES.items()} for one in content["crowds"]
    ]  # fmt: skip
    by_server = [one | {"first": one["first_s"][0], "second": one["first_s"][1]} for one in content["served"]]
    summary = (
        f"Agents with a common beginning, known or not, and edited conversations prefill {worst} times the tokens of a "
        f"plain model at most. With models of about 130 M parameters, the second agent's first token comes {sooner} "
        "times as soon as the first one's, at least."
    )
    number = f"{worst} times a plain model's prefill at most, {worst_edit} with edits; {sooner} times as soon"
    tables = {"cells": columns(content["cells"], CELLS), "crowds": columns(crowds, CROWDS)}
    return Report("checkpoints", number, {"summary": summary, **tables, "served": columns(by_server, SERVERS)})


if __name__ == "__main__":
    main(__doc__ or "", "027", run, render)

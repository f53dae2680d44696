"""EXP-027, checkpoints: what do agents with a common beginning, and conversations edited in the middle, prefill?

Models of mlx-lm's own classes with random weights, one of each kind of cache, through the product's engine and store.
Run: ``python experiments/exp_027_checkpoints.py``.
"""

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
from common import Json, machine, note
from random_models import RandomModel, random_ids
from report import Report, columns, figure
from synthetic_cache import save_turn
from works import work

from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import GenerationWork

PLAIN: Final = "plain: llama"
KINDS: Final = (PLAIN, "window: gemma3_text", "hybrid: falcon_h1")
COMMON, OWN, ANSWER = 2000, 60, 4
MOST_MORE, LEAST_SOONER = 1.05, 5.0


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


def run(folder: Path, *, quick: bool) -> Json:
    device = machine()  # loads the BLAS library
    sizes = (3,) if quick else (8, 32)
    cells: list[Json] = []
    for kind in KINDS:
        model = RandomModel.make(kind)
        cases: list[tuple[str, Callable[[Path], Json]]] = []
        for n in sizes:
            cases.append((f"{n} agents at once", partial(crowd, model, n_agents=n, at_once=True, n_system=COMMON)))
            cases.append((f"{n} agents, one by one", partial(crowd, model, n_agents=n, at_once=False, n_system=COMMON)))
        n = min(8, *sizes)
        unknown = partial(crowd, model, n_agents=n, at_once=False, n_system=0)
        cases.append((f"{n} agents, one by one, no system prompt", unknown))
        cases.append(("three edits of a conversation", partial(edited, model, n_turns=4 if quick else 12)))
        for case, measure in cases:
            note(f"{kind}: {case}")
            found = measure(folder / f"{len(cells)}")
            spec = model.loaded.spec
            cells.append(
                {
                    "model": kind,
                    "case": case,
                    **found,
                    "state_bytes": spec.snapshot_bytes(COMMON),
                    "block_bytes": spec.bytes_per_block,
                }
            )
    for cell in cells:
        plain = next(one for one in cells if one["model"] == PLAIN and one["case"] == cell["case"])
        cell["of_plain"] = round(cell["prefilled"] / plain["prefilled"], 3)
        times = cell.get("first_s", [])
        cell["sooner"] = round(times[0] / statistics.median(times[1:]), 1) if len(times) > 1 else None
    others = [cell for cell in cells if cell["model"] != PLAIN]
    known = [cell for cell in others if "agents" in cell["case"] and "no system" not in cell["case"]]
    verdict = {
        "all_tokens_equal": all(cell["exact"] for cell in cells),
        "agents_prefill_5_percent_more_than_a_plain_model_at_most": all(c["of_plain"] <= MOST_MORE for c in known),
        "edits_prefill_5_percent_more_at_most": all(c["of_plain"] <= MOST_MORE for c in others if "edits" in c["case"]),
        "the_second_agents_first_token_comes_5_times_as_soon": all(
            cell["sooner"] >= LEAST_SOONER for cell in known if cell["sooner"] is not None
        ),
    }
    return {"machine": device, "verdict": verdict, "cells": cells}


# --- the report, from the results alone ---

CELLS = {
    "model": "{model}", "case": "{case}", "tokens in the prompts": "{tokens}", "prefilled": "{prefilled}",
    "by those of the plain model": "{of_plain}", "first token, times as soon": "{sooner}", "answers equal": "{exact}",
}  # fmt: skip


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    others = [cell for cell in content["cells"] if cell["model"] != PLAIN]
    agents = [c for c in others if "agents" in c["case"] and "no system" not in c["case"]]
    edits = [cell for cell in others if "edits" in cell["case"]]
    worst, worst_edit = max(c["of_plain"] for c in agents), max(c["of_plain"] for c in edits)
    sooner = min(cell["sooner"] for cell in agents if cell["sooner"] is not None)
    summary = "\n".join((
        f"Agents with a common beginning prefill {worst} times the tokens of a plain model at most; a later agent's "
        f"first token comes {sooner} times as soon as the first one's, at least.",
        f"Edited conversations prefill at most {worst_edit} times as many.",
    ))  # fmt: skip
    number = f"{worst} times a plain model's prefill with common beginnings, {worst_edit} with edits"
    return Report("checkpoints", number, {"summary": summary, "cells": columns(content["cells"], CELLS)})


def plot(content: Json, results: Path) -> None:
    with figure(content, results, "checkpoints", (10, 4)) as axes:
        cases = list(dict.fromkeys(cell["case"] for cell in content["cells"]))
        for number, kind in enumerate(KINDS):
            shares = [c["prefilled"] / c["tokens"] for c in content["cells"] if c["model"] == kind]
            axes.bar([place + 0.25 * number for place in range(len(cases))], shares, 0.25, label=kind)
        axes.set_xticks([place + 0.25 for place in range(len(cases))], cases, fontsize=6)
        axes.set(title="share of the prompts' tokens that is prefilled")
        axes.legend(fontsize=8)


if __name__ == "__main__":
    main(__doc__ or "", "027", run, render)

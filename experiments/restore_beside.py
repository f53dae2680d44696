"""EXP-006.2: the restores of five agents, beside each other and in turn, and what they do for five turns at once."""

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from bench import Bench, Prepared
from common import Json, note, percentiles, spread
from prompts import text_of
from restore_turns import ANSWER_TOKENS
from synthetic_cache import SavedAgent, smollm2_layers

from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import CompletedGeneration
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

AGENTS = 5


def five_restores(folder: Path, *, blocks: int, rounds: int) -> Json:
    """Five agents of SmolLM2's 30 layers: one alone, all in turn as a worker's loader does, all at once by threads."""
    spec, n_tokens = smollm2_layers(30), blocks * BLOCK_TOKENS
    samples: dict[str, list[float]] = {name: [] for name in ("alone", "each at once", "last in turn", "last at once")}
    with closing(AgentCacheStore(folder / "restores")) as store, ThreadPoolExecutor(AGENTS) as threads:
        agents = [SavedAgent.save(store, spec, n_tokens, seed=seed) for seed in range(AGENTS)]
        note(f"{AGENTS} restores of {blocks} blocks beside each other")
        for done in range(-2, rounds):
            taken: dict[str, list[float]] = {}
            begin = time.perf_counter()
            taken["alone"] = [_restored_ms(agents[done % AGENTS], n_tokens, begin)]
            for name, restores in (("in turn", map), ("at once", threads.map)):
                begin = time.perf_counter()
                ends = list(restores(partial(_restored_ms, n_tokens=n_tokens, begin=begin), agents))
                taken[f"last {name}"] = [max(ends)]
                taken[f"each {name}"] = ends
            if done >= 0:
                for name in samples:
                    samples[name] += taken[name]
    return {"agents": AGENTS, "blocks": blocks, "layers": 30,
            "mb": round(n_tokens * spec.bytes_per_token / 1e6, 1),
            "ms": {name: percentiles(values) for name, values in samples.items()}}  # fmt: skip


def _restored_ms(agent: SavedAgent, n_tokens: int, begin: float) -> float:
    """Milliseconds from `begin` until its cache is in the engine's memory, which is dropped then."""
    prefix = agent.restore(n_tokens)
    took = 1000 * (time.perf_counter() - begin)
    del prefix
    return took


def five_turns(bench: Bench, folder: Path, *, n_tokens: int, quick: bool) -> Json:
    """Five agents' turns through the engine, from their prompts to the last first token and to the last answer's end.

    As in a worker, one thread restores a turn after the other while the engine runs those that it has.
    """
    tokens = 3 if quick else ANSWER_TOKENS
    texts = {f"agent {n}": text_of(bench.encode, "English", n_tokens - n) for n in range(AGENTS)}
    taken: dict[str, list[Json]] = {"without": [], "restored": []}
    with closing(AgentCacheStore(folder)) as store, closing(bench.engine()) as engine:
        for number in range(1 if quick else 2):
            note(f"{AGENTS} turns without caches, {number + 1}")
            fields = {"max_tokens": tokens, "cache": "off" if number else "readwrite"}
            taken["without"].append(_turns(bench, store, engine, texts, fields))
            for _ in range(1 if quick else 3):
                fields = {"max_tokens": tokens, "cache": "read"}
                taken["restored"].append(_turns(bench, store, engine, texts, fields))
    found: Json = {"agents": AGENTS, "tokens": n_tokens, "answer_tokens": tokens}
    for name, ones in taken.items():
        found[name] = {key: spread([one[key] for one in ones]) for key in ("restored_s", "first_s", "total_s")}
    for key in ("first_s", "total_s"):
        without, restored = (found[name][key]["median"] for name in taken)
        found[f"{key.removesuffix('_s')}_speedup"] = round(without / restored, 1)
    found["same_tokens"] = all(one["ids"] == taken["without"][0]["ids"] for ones in taken.values() for one in ones)
    return found


def _turns(
    bench: Bench, store: AgentCacheStore, engine: Any, texts: Mapping[str, str], fields: Mapping[str, Any]
) -> Json:
    """Seconds until the last turn was restored, had its first token, and had ended."""
    running: dict[int, Prepared] = {}
    done: dict[int, CompletedGeneration] = {}
    first: dict[int, float] = {}

    def load(name: str) -> tuple[Prepared, float]:
        about = {"agent_id": name, "prompt": texts[name], **fields}
        turn = bench.prepare(store, about, beside_others=len(running) > len(done))
        return turn, time.perf_counter()

    begin = time.perf_counter()
    with ThreadPoolExecutor(1) as loader:
        waiting = deque(loader.submit(load, name) for name in texts)
        while waiting or len(done) < len(running):
            while waiting and (waiting[0].done() or len(done) == len(running)):
                turn, restored = waiting.popleft().result()
                running[engine.submit(turn.work)] = turn
            done.update({completion.uid: completion for completion in engine.step()})
            begun = {uid for uid, progress in engine.progress().items() if progress.tokens} | done.keys()
            first.update(dict.fromkeys(begun - first.keys(), time.perf_counter()))
    end = time.perf_counter()
    if fields["cache"] == "readwrite":
        for uid, turn in running.items():
            bench.save(store, turn, done[uid])
    elif fields["cache"] == "read" and any(turn.cached != len(turn.prompt.ids) - 1 for turn in running.values()):
        raise RuntimeError("not everything was restored")
    ids = {turn.request.agent_id: done[uid].generated_ids for uid, turn in running.items()}
    return {"restored_s": restored - begin, "first_s": max(first.values()) - begin, "total_s": end - begin, "ids": ids}

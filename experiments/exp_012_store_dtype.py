"""EXP-012, stored precision: how much disk do q8 and q4 blocks save, and what do they cost in time and quality?

Long prompts go through the engine once; each turn is saved into three stores, of ``--store-dtype`` native, q8 and q4.
From each restored cache a fixed continuation is scored and the engine generates a greedy one; both are compared with
the cache that was never on disk. Run: ``python experiments/exp_012_store_dtype.py``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import Bench, Prepared, main
from common import Json, difference, note
from prompts import text_of
from quality import Plan, change_of, log_likelihoods, mean_ratio
from report import Report, columns, percent, say

from stoker_worker.memory.admin.verify import verify_store
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import SequenceCache
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, StoreDtype

MODES: tuple[StoreDtype, ...] = ("native", "q8", "q4")
Q8_PERPLEXITY, Q4_PERPLEXITY = 0.01, 0.1
"""How much perplexity may change, either way; set before anything was measured."""


FULL = Plan(("English", "Python", "German", "JSON"), 800, 160, 8, 270, 24)
QUICK = Plan(("English",), 280, 12, 2, 262, 4)


@dataclass
class Mode:
    """A store of one precision, and the model as loaded with that option."""

    name: StoreDtype
    bench: Bench
    store: AgentCacheStore
    folder: Path

    def prefix(self, agent: str, text: str) -> SequenceCache:
        turn = self.prepare(agent, text)
        if turn.work.prefix is None or turn.restored.miss_reason is not None or turn.restored.source != "disk":
            raise RuntimeError(f"{agent} was not restored from the disk: {turn.restored}")
        return turn.work.prefix

    def prepare(self, agent: str, text: str, max_tokens: int = 1) -> Prepared:
        return self.bench.prepare(
            self.store, {"agent_id": agent, "prompt": text, "max_tokens": max_tokens, "cache": "read"}
        )


def save_everywhere(modes: Sequence[Mode], texts: dict[str, str]) -> dict[str, Any]:
    """Run each prompt once and save its turn into every store; return the engine's caches."""
    bench, caches = modes[0].bench, {}
    for agent, text in texts.items():
        note(f"prefill of {agent}")
        fields = {"agent_id": agent, "prompt": text, "max_tokens": 1}
        turns = [(mode, mode.bench.prepare(mode.store, fields)) for mode in modes]
        (done,) = bench.answers([turns[0][1].work])
        caches[agent] = done.cache
        for mode, turn in turns:
            mode.bench.save(mode.store, turn, done)
    return caches


def disk_bytes(modes: Sequence[Mode], agents: int, tokens: int) -> Json:
    """Bytes of whole stores: of the block files, and of everything."""
    found = {}
    for mode in modes:
        files = {path: path.stat().st_size for path in mode.folder.rglob("*") if path.is_file()}
        blocks = [size for path, size in files.items() if (mode.folder / "blocks") in path.parents]
        found[mode.name] = {
            "block_bytes_per_token": round(sum(blocks) / (len(blocks) * BLOCK_TOKENS), 1),
            "all_bytes_per_token": round(sum(files.values()) / tokens, 1),
        }
    native = found["native"]
    for row in found.values():
        for key in ("block_bytes_per_token", "all_bytes_per_token"):
            row[f"{key}_ratio"] = round(row[key] / native[key], 4)
    return {"agents": agents, "tokens": tokens, "modes": found}


def quality(modes: Sequence[Mode], agent: str, text: str, cache: Any, continuation: int) -> Json:
    """The continuation's likelihood after each mode's cache; `kept` is the engine's own, never on disk."""
    note(f"likelihoods of {agent}")
    bench = modes[0].bench
    n_prompt = len(bench.encode(text))
    whole = bench.encode(text_of(bench.encode, agent, n_prompt + continuation, seed=n_prompt))
    prompt = bench.encode(text)
    if whole[: n_prompt - 1] != prompt[: n_prompt - 1]:
        raise RuntimeError(f"{agent}: the longer text does not begin as the prompt does")
    kept = SequenceCache(n_prompt - 1, tuple((k[:, : n_prompt - 1], v[:, : n_prompt - 1]) for k, v in cache.layers))
    reference = log_likelihoods(bench, kept, whole)
    row: Json = {
        "agent": agent,
        "restored_tokens": n_prompt - 1,
        "scored_tokens": len(reference),
        "kept_perplexity": round(math.exp(-reference.mean()), 4),
        "modes": {},
    }
    for mode in modes:
        scores = log_likelihoods(mode.bench, mode.prefix(agent, text), whole)
        row["modes"][mode.name] = {**change_of(scores, reference), "identical": bool((scores == reference).all())}
    return row


def greedy(modes: Sequence[Mode], texts: dict[str, str], answer: int) -> Json:
    """Continuations of all agents in the engine, from each store, compared with those without any memory."""
    said: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in ("cold", *(mode.name for mode in modes)):
        note(f"greedy continuations, {name}")
        mode = next((mode for mode in modes if mode.name == name), modes[0])
        cache = "off" if name == "cold" else "read"
        asked = {"max_tokens": answer, "cache": cache}
        turns = mode.bench.serve(
            mode.store, [{"agent_id": one, "prompt": text, **asked} for one, text in texts.items()]
        )
        said[name] = {agent: completion.generated_ids for agent, (_, completion) in turns.items()}
    rows = {}
    for mode in modes:
        ends = [difference(said[mode.name][agent], said["cold"][agent]) for agent in texts]
        lengths = [len(said["cold"][agent]) for agent in texts]
        agree = [length if end is None else end for end, length in zip(ends, lengths, strict=True)]
        rows[mode.name] = {
            "identical": sum(end is None for end in ends),
            "first_differences": sorted(end for end in ends if end is not None),
            "share_of_tokens_before_the_first_difference": round(sum(agree) / sum(lengths), 3),
        }
    return {"continuations": len(texts), "tokens": answer, "modes": rows}


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    plan = QUICK if quick else FULL
    modes = [
        Mode(name, bench if name == "native" else bench.storing(name), AgentCacheStore(folder / name), folder / name)
        for name in MODES
    ]
    long = {kind: text_of(bench.encode, kind, plan.long) for kind in plan.scored}
    short = plan.greedy_texts(bench.encode)
    caches = save_everywhere(modes, long)
    scored = [quality(modes, kind, text, caches[kind], plan.continuation) for kind, text in long.items()]
    del caches
    save_everywhere(modes, short)
    tokens = sum(len(bench.encode(text)) + 1 for text in (*long.values(), *short.values()))
    sizes = disk_bytes(modes, len(long) + len(short), tokens)
    answers = greedy(modes, short, plan.answer)
    problems = [problem for mode in modes for problem in verify_store(mode.store.parts)]
    for mode in modes:
        mode.store.close()
    perplexity = {name: mean_ratio(row["modes"][name] for row in scored) for name in MODES}
    verdict = {
        "native_changes_nothing": all(row["modes"]["native"]["identical"] for row in scored)
        and answers["modes"]["native"]["identical"] == answers["continuations"],
        "q8_changes_perplexity_by_under_1_percent": abs(perplexity["q8"] - 1) < Q8_PERPLEXITY,
        "q4_changes_perplexity_by_under_10_percent": abs(perplexity["q4"] - 1) < Q4_PERPLEXITY,
        "stores_verify_clean": not problems,
    }
    return {"verdict": verdict, "sizes": sizes, "quality": scored, "perplexity_ratios": perplexity, "greedy": answers}


def render(content: Json, results: Path) -> Report:
    sizes, answers = content["sizes"], content["greedy"]
    share, ratios = sizes["modes"]["q8"]["block_bytes_per_token_ratio"], content["perplexity_ratios"]
    quality = [{**text, **found, "change": percent(found["perplexity_ratio"], 3)}
               for text in content["quality"] for found in _named(text["modes"])]  # fmt: skip
    means = ", ".join(f"{mode} {percent(ratio, 3)}" for mode, ratio in ratios.items())
    greedy = [{**row, "ends": ", ".join(map(str, row["first_differences"])) or "-"} for row in _named(answers["modes"])]
    number = f"q8: {100 * share:.1f} % of the bytes at {percent(ratios['q8'])} perplexity"
    return Report("stored precision", number, {
        "summary": "\n".join(_summary(content, mode) for mode in MODES[1:]),
        "sizes": say(sizes, "{agents} agents, {tokens} tokens.\n\n") + columns(_named(sizes["modes"]), SIZES),
        "quality": f"{columns(quality, QUALITY)}\n\nGeometric mean over the texts: {means}.",
        "greedy": columns(greedy, {
            "store": "{store}", f"the same, of {answers['continuations']}": "{identical}",
            "first difference at token": "{ends}",
            "share of tokens before it": "{share_of_tokens_before_the_first_difference}",
        }),
    })  # fmt: skip


def _summary(content: Json, mode: str) -> str:
    size = content["sizes"]["modes"][mode]
    most = max(row["modes"][mode]["most_change"] for row in content["quality"])
    return (
        f"{mode}: {100 * size['all_bytes_per_token_ratio']:.1f} % of native's bytes on disk; perplexity "
        f"{percent(content['perplexity_ratios'][mode])}, a token's log-likelihood by up to {most:.2f}; "
        f"{content['greedy']['modes'][mode]['identical']} of {content['greedy']['continuations']} greedy continuations "
        "are the same."
    )


SIZES = {
    "store": "{store}", "bytes per token, block files": "{block_bytes_per_token}",
    "of native": "{block_bytes_per_token_ratio}", "bytes per token, everything": "{all_bytes_per_token}",
    "everything, of native": "{all_bytes_per_token_ratio}",
}  # fmt: skip
QUALITY = {
    "text": "{agent}", "restored": "{restored_tokens}", "scored": "{scored_tokens}",
    "perplexity, cache never stored": "{kept_perplexity}", "store": "{store}",
    "change per token (mean)": "{mean_change:+.5f}", "(root mean square)": "{rms_change:.5f}",
    "(largest)": "{most_change:.4f}", "perplexity": "{change}",
}  # fmt: skip


def _named(modes: Json) -> list[Json]:
    return [{"store": mode, **found} for mode, found in modes.items()]


if __name__ == "__main__":
    main(__doc__ or "", "012", run, render)

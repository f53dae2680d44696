"""EXP-007, whole answers from a cache: how large is a token's cache, is the answer the same, and how much sooner is it?

The test of October 2025 that this project was given, done anew: bytes per token beside its 12 KB, the same prompts with
and without cache, greedy and seeded, and the time of a whole answer at 10 to 1,000 tokens of context beside
the speed-ups that it expects. Run: ``python experiments/exp_007_whole_answer.py``.
"""

import random
import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from bench import Bench, main
from common import Json, difference, in_turn, note, ratios, spread
from prompts import text_of
from random_models import RandomModel, random_ids
from report import Report, columns, yes
from timed_turns import COLD, DISK, RAM, Turns

from stoker_worker.memory.store import AgentCacheStore

SENTENCE: Final = "The fundamental principle of trust in AI systems is"
BASELINE: Final = f"{SENTENCE} that it must demonstrate"
"""The document's prompts."""
ANSWER_TOKENS = 30
"""As long as the answer that the document prints."""
ASKED_BYTES = 12 * 1024
ASKED = {10: 1.1, 100: 1.5, 1000: 3.0}
"""The least speed-up that the document expects, by tokens of context."""
SEEDED: Final = {"temperature": 0.8, "top_p": 0.95, "seed": 7}


def bytes_per_token(folder: Path, lengths: Sequence[int]) -> Json:
    """What Qwen2-0.5B's cache takes: by its layout, in the arrays that a turn hands over, and in the turn's files."""
    model = RandomModel.make("Qwen2-0.5B", "bfloat16")
    spec = model.loaded.spec
    layer = spec.layers[0]
    found: Json = {"layers": len(spec.layers), "kv_heads": layer.n_kv_heads, "head_dim": layer.key_dim}
    found |= {"dtype": spec.dtype, "by_layout": spec.bytes_per_token, "turns": []}
    for n in lengths:
        of_turn = folder / f"{n}"
        with closing(AgentCacheStore(of_turn)) as store:
            completion, _ = model.turn(store, random_ids(random.Random(n), n - 1), 1)
        assert completion.cache is not None
        arrays = sum(array.nbytes for pair in completion.cache.layers for array in pair)
        found["turns"].append({"tokens": n, "arrays": arrays, "files": file_bytes(of_turn)})
    return found


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def answers(bench: Bench, turns: Turns, lengths: Sequence[int], max_tokens: int) -> list[Json]:
    """Each prompt several times in each way, greedy and seeded; every answer is compared with the first."""
    texts = {"the document's": SENTENCE, "the document's, continued": BASELINE}
    texts |= {f"{n} tokens": text_of(bench.encode, "German", n) for n in lengths}
    found = []
    for name, text in texts.items():
        note(f"answers to {name}")
        row: Json = {"prompt": name, "tokens": len(bench.encode(text))}
        fields = {"agent_id": name, "prompt": text, "max_tokens": max_tokens}
        turns.remember(fields)
        for kind, options in (("greedy", {}), ("seeded", SEEDED)):
            said = [turns.run(source, {**fields, **options}).completion.generated_ids
                    for source in (COLD, DISK, RAM)]  # fmt: skip
            row[kind] = {"answers": len(said), "different": len(set(said))}
            row[kind]["first"] = bench.model.tokenizer.decode(said[0])
        reference = bench.uncached(bench.encode(text), max_tokens)
        greedy = turns.run(COLD, fields).completion.generated_ids[: len(reference)]  # mlx-lm ends at the model's token
        row["differs_from_mlx_lm_at"] = difference(greedy, reference)
        found.append(row)
    return found


def speed(bench: Bench, turns: Turns, n_tokens: int, *, rounds: int, max_tokens: int) -> Json:
    """The ways take turns, in an order that changes every round; ratios are taken within a round. The first run without
    a cache is the agent's first turn."""
    text = text_of(bench.encode, "English", n_tokens)
    fields = {"agent_id": f"{n_tokens}", "prompt": text, "max_tokens": max_tokens}
    runs: dict[str, list[Any]] = {COLD: [], DISK: [], RAM: []}
    for number, source in in_turn(list(runs), rounds):
        is_first = not number and source == COLD
        runs[source].append(turns.remember(fields) if is_first else turns.run(source, fields))
        note(f"{n_tokens} tokens, round {number + 1} of {rounds}: {source} {runs[source][-1].token_s[-1]:.2f} s")
    tokens = {run.completion.generated_ids for each in runs.values() for run in each}
    row: Json = {"tokens": len(bench.encode(text)), "generated": max_tokens, "answers_differ": len(tokens) - 1}
    for source, each in runs.items():
        row[source] = {"answer_s": spread([run.token_s[-1] for run in each]),
                       "restore_ms": spread([1000 * run.restore_s for run in each], digits=1)}  # fmt: skip
    for source in (DISK, RAM):
        seconds = ([run.token_s[-1] for run in runs[way]] for way in (COLD, source))
        row[source]["speedup"] = {f"{max_tokens}": ratios(*seconds)}
    waited = [run.token_s[-1] - run.token_s[0] for run in runs[DISK]]
    row["decode_ms"] = round(1000 * statistics.median(waited) / (max_tokens - 1), 1)
    return row


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    note("bytes per token")
    sizes = bytes_per_token(folder / "bytes", (9,) if quick else (9, 100))
    plan = {10: 1, 100: 1} if quick else {10: 5, 100: 5, 1000: 5}
    max_tokens = 6 if quick else ANSWER_TOKENS
    with closing(Turns(bench, folder)) as turns:
        same = answers(bench, turns, (20,) if quick else (258,), 4 if quick else 12)
        speeds = [speed(bench, turns, n, rounds=rounds, max_tokens=max_tokens) for n, rounds in plan.items()]
    by_length = {n: row[RAM]["speedup"][f"{max_tokens}"]["median"] for n, row in zip(plan, speeds, strict=True)}
    verdict = {
        "a_token_of_qwen2_0_5b_takes_12_kb": sizes["by_layout"] == ASKED_BYTES
        and all(turn["arrays"] == turn["tokens"] * ASKED_BYTES for turn in sizes["turns"]),
        "the_same_answer_with_and_without_cache": not any(row["answers_differ"] for row in speeds)
        and all(row[kind]["different"] == 1 for row in same for kind in ("greedy", "seeded")),
        "greedy_answers_are_mlx_lms": all(row["differs_from_mlx_lm_at"] is None for row in same),
        **{f"at_{n}_tokens_{least}_times": by_length.get(n, 0) >= least for n, least in ASKED.items()},
    }
    return {"verdict": verdict, "bytes": sizes, "answers": same, "speeds": speeds}


EXPECTED = {10: "1.1", 100: "1.5 to 2", 1000: "3 to 5"}
"""The document's own words, by tokens of context."""


def render(content: Json, results: Path) -> Report:
    rows = content["speeds"]
    long = rows[min(2, len(rows) - 1)]
    times = f"{_whole(long)['median']} times as fast at {long['tokens']} tokens of context"
    number = f"an answer of {long['generated']} tokens {times}"
    return Report("whole answers from a cache", number, {
        "summary": _summary(content), "bytes": _bytes(content["bytes"]), "answers": _answers(content["answers"]),
        "speeds": _speeds(rows),
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


SPEEDS = {
    "tokens of context": "{tokens}", "expected": "{expected}", "without cache, s": "{no cache[answer_s]}",
    "from disk, s": "{disk[answer_s]}", "from RAM, s": "{memory[answer_s]}", "disk: times as fast": "{of_disk}",
    "RAM: times as fast": "{of_ram}", "met": "{met}", "a further token, ms": "{decode_ms}",
}  # fmt: skip
ANSWERS = {
    "prompt": "{prompt}", "tokens": "{tokens}", "greedy": "{same[greedy]}", "as mlx-lm's": "{as_mlx_lms}",
    "seeded": "{same[seeded]}", "unlike the greedy one": "{unlike}",
}  # fmt: skip


def _answers(rows: list[Json]) -> str:
    shown = []
    for row in rows:
        same = {kind: f"{row[kind]['answers']} the same" if row[kind]["different"] == 1
                else f"{row[kind]['different']} DIFFERENT" for kind in ("greedy", "seeded")}  # fmt: skip
        unlike = yes(row["seeded"]["first"] != row["greedy"]["first"], "no")
        shown.append({**row, "same": same, "as_mlx_lms": row["differs_from_mlx_lm_at"] is None, "unlike": unlike})
    return columns(shown, ANSWERS)


def _speeds(rows: list[Json]) -> str:
    shown = []
    for row in rows:
        expected, n = EXPECTED.get(row["tokens"], ""), f"{row['generated']}"
        met = yes(_whole(row)["median"] >= ASKED[row["tokens"]], "no") if expected else ""
        of = {"of_disk": row["disk"]["speedup"][n], "of_ram": row["memory"]["speedup"][n]}
        shown.append({**row, "expected": expected, "met": met, **of})
    return columns(shown, SPEEDS)


if __name__ == "__main__":
    main(__doc__ or "", "007", run, render)

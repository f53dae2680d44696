"""EXP-018, ``--kv-bits 8``: what do keys and values in 8 bits save in the running batch, and what do they cost?

Two networks with the same weights, one of which makes 8-bit caches, prefill the same prompts in the engine. A fixed
continuation is scored on each one's own cache, and both generate greedy answers. Run:
``python experiments/exp_018_kv_bits.py``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench import Bench, main
from common import Json, difference, note
from prompts import text_of
from quality import Plan, change_of, log_likelihoods, mean_ratio
from report import Report, columns, percent, say
from works import work

from stoker_worker.ports import SequenceCache

MOST_PERPLEXITY = 0.01
"""How much perplexity may change, either way: the limit of q8 in EXP-012."""

LEAST_SEQUENCES = 1.8
"""Times as many sequences of 1,024 tokens in the same KV memory, for a cache of 16 bits."""

FULL = Plan(("English", "Python", "German", "JSON"), 400, 160, 6, 120, 16)
QUICK = Plan(("English",), 140, 100, 2, 60, 4)


def prefix(bench: Bench, ids: Sequence[int]) -> SequenceCache:
    """The engine's own cache of all tokens but the last."""
    (done,) = bench.answers([work(ids, 1, is_saved=True)])
    assert done.cache is not None
    n = len(ids) - 1
    return SequenceCache(n, tuple((keys[:, :n], values[:, :n]) for keys, values in done.cache.layers))


def likelihoods(benches: Mapping[str, Bench], kind: str, plan: Plan) -> Json:
    """How 8 bits change the log-likelihood of each token of a continuation; all attention reads 8 bits then."""
    note(f"likelihoods of {kind}")
    encode = benches["native"].encode
    ids = encode(text_of(encode, kind, plan.long + plan.continuation, seed=plan.long))
    scores = {name: log_likelihoods(bench, prefix(bench, ids[: plan.long]), ids) for name, bench in benches.items()}
    return {
        "text": kind, "prompt_tokens": plan.long, "scored_tokens": len(scores["native"]),
        "perplexity": round(math.exp(-scores["native"].mean()), 4), **change_of(scores["8 bits"], scores["native"]),
    }  # fmt: skip


def greedy(benches: Mapping[str, Bench], plan: Plan) -> Json:
    """Answers of both, and whether each 8-bit answer in a batch is the one that the sequence gives alone."""
    note("greedy answers")
    encode = benches["native"].encode
    works = [work(encode(text), plan.answer) for text in plan.greedy_texts(encode).values()]
    said = {name: [one.generated_ids for one in bench.answers(works)] for name, bench in benches.items()}
    alone = [benches["8 bits"].answers([one])[0].generated_ids for one in works]
    ends = [difference(*pair) for pair in zip(said["8 bits"], said["native"], strict=True)]
    return {
        "answers": len(works),
        "tokens": plan.answer,
        "as_native": sum(end is None for end in ends),
        "first_differences": sorted(end for end in ends if end is not None),
        "as_alone": sum(one == other for one, other in zip(said["8 bits"], alone, strict=True)),
    }


def capacity(benches: Mapping[str, Bench]) -> list[Json]:
    """KV memory of a sequence of 1,024 tokens as the engine prices it, for caches of 32 and of 16 bits."""
    from stoker_worker.engine.kv_memory import KVCost

    rows = []
    for dtype in ("float32", "bfloat16"):
        # Scales and biases have the cache's dtype, and the codes' bytes stay the same.
        native = replace(benches["native"].model.spec, dtype=dtype)
        quantised = benches["8 bits"].model.spec
        if dtype == "bfloat16":
            layers = [
                replace(x, key_dim=2 * x.key_dim, value_dim=2 * x.value_dim) if x.is_packed else x
                for x in quantised.layers
            ]
            quantised = replace(quantised, layers=tuple(layers), dtype=dtype)
        found = {}
        for name, spec in (("native", native), ("8 bits", quantised)):
            cost = KVCost(spec, 256, in_rows=True)
            found[name] = {
                "bytes_per_token": spec.bytes_per_token,
                "sequences": 2**33 // cost.block_bytes // cost.sequence_blocks(1024),
            }
        ratio = found["8 bits"]["sequences"] / found["native"]["sequences"]
        rows.append({"dtype": dtype, **found, "ratio": round(ratio, 3)})
    return rows


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    plan = QUICK if quick else FULL
    benches = {"native": bench, "8 bits": bench.in_8_bits()}
    scored = [likelihoods(benches, kind, plan) for kind in plan.scored]
    said, sizes = greedy(benches, plan), capacity(benches)
    ratio = mean_ratio(scored)
    verdict = {
        "perplexity_changes_by_under_1_percent": abs(ratio - 1) < MOST_PERPLEXITY,
        "1_8_times_the_sequences_of_a_16_bit_cache": sizes[-1]["ratio"] >= LEAST_SEQUENCES,
        "every_answer_in_a_batch_is_the_one_alone": said["as_alone"] == said["answers"],
    }
    return {
        "verdict": verdict,
        "likelihoods": scored,
        "perplexity_ratio": ratio,
        "greedy": said,
        "capacity": sizes,
    }


CAPACITY = {
    "cache": "{dtype}", "bytes per token": "{native[bytes_per_token]}", "in 8 bits": "{8 bits[bytes_per_token]}",
    "sequences in 8 GiB": "{native[sequences]}", "with 8 bits": "{8 bits[sequences]}", "ratio": "{ratio}",
}  # fmt: skip
LIKELIHOODS = {
    "text": "{text}", "prompt": "{prompt_tokens}", "scored": "{scored_tokens}", "perplexity": "{perplexity}",
    "change per token (mean)": "{mean_change:+.5f}", "(root mean square)": "{rms_change:.5f}",
    "(largest)": "{most_change:.4f}", "perplexity in 8 bits": "{change}",
}  # fmt: skip
GREEDY = (
    "{answers} answers of {tokens} tokens: {as_alone} are the ones that the sequence gives alone with 8 bits; "
    "{as_native} are those of the model's own precision (first differences at token: {ends})."
)


def render(content: Json, results: Path) -> Report:
    ratio, change = content["capacity"][-1]["ratio"], content["perplexity_ratio"]
    texts = [{**row, "change": percent(row["perplexity_ratio"], 3)} for row in content["likelihoods"]]
    ends = ", ".join(map(str, content["greedy"]["first_differences"])) or "none"
    number = f"beside a 16-bit cache {ratio} times the sequences at {percent(change)} perplexity"
    return Report("keys and values in 8 bits", number, {
        "summary": f"{ratio} times the sequences of a 16-bit cache at {percent(change)} perplexity.",
        "capacity": columns(content["capacity"], CAPACITY),
        "likelihoods": f"{columns(texts, LIKELIHOODS)}\n\nGeometric mean over the texts: {percent(change, 3)}.",
        "greedy": say({**content["greedy"], "ends": ends}, GREEDY),
    })  # fmt: skip


if __name__ == "__main__":
    main(__doc__ or "", "018", run, render)

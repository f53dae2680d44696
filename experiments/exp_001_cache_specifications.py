"""EXP-001, cache specifications: what do the caches of the four named models contain, and were the old documents right?

Each model is built from mlx-lm's own class with the true layers, K/V heads, head dims and windows, and random weights
in a small width. `read_cache_spec` reads its cache layout; then two turns go through engine and store, which
is closed and opened in between, and are compared with mlx-lm's uncached run. Run: ``python experiments/exp_001_*.py``.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from command import main
from common import Json, difference, note
from random_models import CONFIGS, RandomModel, random_ids
from report import Report, columns, say

from stoker_worker.memory.admin.verify import verify_store
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, LayerKind, ModelCacheSpec

TRUE = {
    "Gemma 3 12B": {"full": 8, "window": 40, "kv_heads": 8, "head_dim": 256, "window_tokens": 1024},
    "Llama 3.1 8B": {"full": 32, "window": 0, "kv_heads": 8, "head_dim": 128, "window_tokens": 0},
    "Qwen 2.5 7B": {"full": 28, "window": 0, "kv_heads": 4, "head_dim": 128, "window_tokens": 0},
    "Qwen1.5-MoE-A2.7B": {"full": 24, "window": 0, "kv_heads": 16, "head_dim": 128, "window_tokens": 0},
}
"""From each model's published config.json; Gemma 3 repeats five window layers and a full one, eight times."""


def facts(spec: ModelCacheSpec) -> Json:
    """The values compared with `TRUE`, read off the spec. Every layer must agree on heads and dims."""
    kinds = [layer.kind for layer in spec.layers]
    (shape,) = {(layer.n_kv_heads, layer.key_dim, layer.value_dim) for layer in spec.layers}
    heads, key_dim, value_dim = shape
    return {
        "full": kinds.count(LayerKind.FULL),
        "window": kinds.count(LayerKind.WINDOW),
        "kv_heads": heads,
        "head_dim": key_dim if key_dim == value_dim else (key_dim, value_dim),
        "window_tokens": max((layer.window_tokens for layer in spec.layers), default=0),
    }


def sizes(spec: ModelCacheSpec) -> Json:
    """Bytes in bfloat16; `8k_bytes` is the cache of 8,192 tokens, `naive` the same with every layer kept whole."""
    tokens = 32 * BLOCK_TOKENS
    naive = 2 * tokens * sum(layer.elements_per_token for layer in spec.layers)
    snapshot = spec.snapshot_bytes(tokens)
    return {
        "bytes_per_token": spec.bytes_per_token,
        "bytes_per_block": spec.bytes_per_block,
        "snapshot_bytes": snapshot,
        "bytes_at_8k": tokens * spec.bytes_per_token + snapshot,
        "naive_bytes_at_8k": naive,
    }


def one_model(name: str, folder: Path, *, quick: bool) -> Json:
    """Two turns of one agent; the store is reopened between them."""
    note(name)
    model, dice = RandomModel.make(name), random.Random(name)
    spec = replace(model.loaded.spec, dtype="bfloat16")
    window = facts(spec)["window_tokens"]
    first = random_ids(dice, 270 if quick or not window else window + 76)
    tokens = 3 if quick else 12
    turns, ids = [], list(first)
    for number in range(2):
        store = AgentCacheStore(folder / name)
        completion, cached = model.turn(store, ids, tokens)
        problems = list(verify_store(store.parts))
        store.close()
        wanted = model.uncached(ids, tokens)
        turns.append({
            "prompt": len(ids), "cached": cached, "generated": len(completion.generated_ids),
            "different_tokens": len(set(completion.generated_ids)),
            "differs_at": difference(completion.generated_ids, wanted), "verify": problems,
        })  # fmt: skip
        if number == 0:
            ids += [*completion.generated_ids, *random_ids(dice, 40)]
    found = facts(spec)
    return {
        "name": name,
        "class": CONFIGS[name]["model_type"],
        "read": found,
        "read_right": found == TRUE[name],
        "sizes": sizes(spec),
        "turns": turns,
        "all_cached": turns[1]["cached"] == turns[0]["prompt"] + turns[0]["generated"],
    }


def run(folder: Path, *, quick: bool) -> Json:
    names = ("Gemma 3 12B", "Qwen 2.5 7B") if quick else TRUE
    models = [one_model(name, folder, quick=quick) for name in names]
    verdict = {
        "every_specification_is_read_right": all(model["read_right"] for model in models),
        "every_turn_equals_the_uncached_run": all(t["differs_at"] is None for model in models for t in model["turns"]),
        "everything_saved_was_restored": all(model["all_cached"] for model in models),
        "stores_verify_clean": not any(t["verify"] for model in models for t in model["turns"]),
    }
    return {"verdict": verdict, "models": models}


def short_form(bench: object, folder: Path) -> Iterator[Json]:
    """A model with windows and one without, two turns each."""
    for name in ("Gemma 3 12B", "Qwen 2.5 7B"):
        found = one_model(name, folder, quick=True)
        exact = all(turn["differs_at"] is None and not turn["verify"] for turn in found["turns"])
        yield {"what": f"{name}: its caches as published, and two turns beside mlx-lm alone",
               "equal": exact and found["read_right"] and found["all_cached"]}  # fmt: skip


SPECIFICATIONS = {
    "model": "{name}", "class": "{class}", "full layers": "{read[full]}", "window layers": "{read[window]}",
    "K/V heads": "{read[kv_heads]}", "head dim": "{read[head_dim]}", "window": "{window}",
    "bytes per token": "{sizes[bytes_per_token]}", "KiB per block": "{kib}",
    "MiB per snapshot": "{mib[snapshot_bytes]:.0f}", "MiB at 8,192 tokens": "{mib[bytes_at_8k]:.0f}",
    "every layer kept whole, MiB": "{mib[naive_bytes_at_8k]:.0f}", "as published": "{read_right}",
}  # fmt: skip
TURNS = {
    "model": "{name}", "turn": "{turn}", "prompt": "{prompt}", "of it cached": "{cached}", "generated": "{generated}",
    "different tokens in it": "{different_tokens}", "equals uncached": "{equal}",
}  # fmt: skip


def render(content: Json, results: Path) -> Report:
    models = [
        {**m, "window": m["read"]["window_tokens"] or None, "kib": m["sizes"]["bytes_per_block"] // 1024,
         "mib": {name: n_bytes / 2**20 or None for name, n_bytes in m["sizes"].items()}}
        for m in content["models"]
    ]  # fmt: skip
    turns = [{**turn, "name": m["name"], "turn": n, "equal": turn["differs_at"] is None}
             for m in models for n, turn in enumerate(m["turns"], start=1)]  # fmt: skip
    summary = (
        f"{sum(m['read_right'] for m in models)} of {len(models)} models are read off correctly, and "
        f"{sum(turn['equal'] for turn in turns)} of {len(turns)} turns equal the uncached run."
    )
    number = say(models[0]["mib"], "Gemma 3 12B at 8,192 tokens: {bytes_at_8k:.0f} MiB, not {naive_bytes_at_8k:,.0f}")
    parts = {"summary": summary, "specifications": columns(models, SPECIFICATIONS), "turns": columns(turns, TURNS)}
    return Report("cache specifications", number, parts)


if __name__ == "__main__":
    main(__doc__ or "", "001", run, render)

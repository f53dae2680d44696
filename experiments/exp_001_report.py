"""EXP-001's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, columns, figure, say, table

CLAIMS = {
    "Gemma 3 12B": (
        ("8 K/V heads", lambda read: read["kv_heads"] == 8),
        ("8 global and 40 rotating layers (EXP-004's seed)", lambda read: (read["full"], read["window"]) == (8, 40)),
        ("48 rotating layers (EXP-003's seed)", lambda read: read["window"] == 48),
    ),
    "Llama 3.1 8B": (("4 K/V heads", lambda read: read["kv_heads"] == 4),),
    "Qwen 2.5 7B": (("4 K/V heads", lambda read: read["kv_heads"] == 4),),
    "Qwen1.5-MoE-A2.7B": (),  # "validate MoE structure"
}
"""The claims of the old documents, and whether the specification that was read agrees."""


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    models = content["models"]
    claims = [(m["name"], text, right(m["read"])) for m in models for text, right in CLAIMS[m["name"]]]
    exact = [turn["differs_at"] is None for model in models for turn in model["turns"]]
    summary = (
        f"{sum(m['read_right'] for m in models)} of {len(models)} models are read off correctly, and {sum(exact)} of "
        f"{len(exact)} turns equal the uncached run; {sum(not right for *_, right in claims)} claims of the old "
        "documents are wrong."
    )
    said = [(name, text, "right" if right else "wrong") for name, text, right in claims]
    number = say(_in_mib(models[0]), "Gemma 3 12B at 8,192 tokens: {bytes_at_8k:.0f} MiB, not {naive_bytes_at_8k:,.0f}")
    return Report("cache specifications", number, {
        "summary": summary,
        "specifications": _specifications(models),
        "claims": table(("model", "claim of the old documents", "finding"), said),
        "turns": _turns(models),
    })  # fmt: skip


def _specifications(models: list[Json]) -> str:
    rows = [
        {**m, "window": m["read"]["window_tokens"] or None, "kib": m["sizes"]["bytes_per_block"] // 1024,
         "mib": _in_mib(m)}
        for m in models
    ]  # fmt: skip
    return columns(rows, {
        "model": "{name}", "class": "{class}", "full layers": "{read[full]}", "window layers": "{read[window]}",
        "K/V heads": "{read[kv_heads]}", "head dim": "{read[head_dim]}", "window": "{window}",
        "bytes per token": "{sizes[bytes_per_token]}", "KiB per block": "{kib}",
        "MiB per snapshot": "{mib[snapshot_bytes]:.0f}", "MiB at 8,192 tokens": "{mib[bytes_at_8k]:.0f}",
        "every layer kept whole, MiB": "{mib[naive_bytes_at_8k]:.0f}", "as published": "{read_right}",
    })  # fmt: skip


def _in_mib(model: Json) -> Json:
    return {name: n_bytes / 2**20 or None for name, n_bytes in model["sizes"].items()}


def _turns(models: list[Json]) -> str:
    turns = [{**turn, "name": m["name"], "turn": n, "equal": turn["differs_at"] is None}
             for m in models for n, turn in enumerate(m["turns"], start=1)]  # fmt: skip
    return columns(turns, {
        "model": "{name}", "turn": "{turn}", "prompt": "{prompt}", "of it cached": "{cached}",
        "generated": "{generated}", "different tokens in it": "{different_tokens}", "equals uncached": "{equal}",
    })  # fmt: skip


def plot(content: Json, results: Path) -> None:
    tokens = [256 * n for n in range(1, 65)]
    with figure(content, results, "bytes", (7, 4.2), title="what an agent's cache takes") as axes:
        for number, model in enumerate(content["models"]):
            read, size = model["read"], model["sizes"]
            row = 4 * read["kv_heads"] * read["head_dim"] * read["window"]
            kept = [(n * size["bytes_per_token"] + min(n, read["window_tokens"]) * row) / 2**20 for n in tokens]
            axes.plot(tokens, kept, color=f"C{number}", label=model["name"])
            if read["window"]:
                whole = [n * size["naive_bytes_at_8k"] / 8192 / 2**20 for n in tokens]
                axes.plot(tokens, whole, color=f"C{number}", ls=":", label=f"{model['name']}, every layer kept whole")
        axes.set(xlabel="tokens of an agent", ylabel="MiB in bfloat16")
        axes.legend(fontsize=8)

"""EXP-001's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json, machine_lines, table, verdict_title

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


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_001_bytes.png")
    wrong = [(m["name"], text) for m in content["models"] for text, right in CLAIMS[m["name"]] if not right(m["read"])]
    parts = {
        "machine": machine_lines(content),
        "specifications": _specifications(content["models"]),
        "claims": _claims(content["models"]),
        "turns": _turns(content["models"]),
    }
    right = sum(model["read_right"] for model in content["models"])
    title = verdict_title(content, "cache specifications")
    count = len(content["models"])
    return f"{title}: {right} of {count} read right; {len(wrong)} old claims were wrong", parts


def _specifications(models: list[Json]) -> str:
    head = ("model", "class", "full layers", "window layers", "K/V heads", "head dim", "window", "bytes per token",
            "KiB per block", "MiB per snapshot", "MiB at 8,192 tokens", "every layer kept whole, MiB",
            "as published")  # fmt: skip
    rows = []
    for m in models:
        read, size = m["read"], m["sizes"]
        rows.append((m["name"], m["class"], read["full"], read["window"], read["kv_heads"], read["head_dim"],
                     read["window_tokens"] or "", size["bytes_per_token"], size["bytes_per_block"] // 1024,
                     _mib(size["snapshot_bytes"]) if size["snapshot_bytes"] else "", _mib(size["bytes_at_8k"]),
                     _mib(size["naive_bytes_at_8k"]), "yes" if m["read_right"] else "NO"))  # fmt: skip
    return table(head, rows)


def _claims(models: list[Json]) -> str:
    rows = [
        (m["name"], text, "right" if right(m["read"]) else "wrong") for m in models for text, right in CLAIMS[m["name"]]
    ]
    return table(("model", "claim of the old documents", "finding"), rows)


def _turns(models: list[Json]) -> str:
    head = ("model", "turn", "prompt", "of it cached", "generated", "different tokens in it", "equals uncached")
    rows = [
        (m["name"], n, t["prompt"], t["cached"], t["generated"], t["different_tokens"],
         "yes" if t["differs_at"] is None else f"NO, from token {t['differs_at']}")
        for m in models for n, t in enumerate(m["turns"], start=1)
    ]  # fmt: skip
    return table(head, rows)


def plot(content: Json, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    tokens = [256 * n for n in range(1, 65)]
    figure, axes = plt.subplots(figsize=(7, 4.2))
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
    figure.suptitle("EXP-001: what an agent's cache takes")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.0f}"

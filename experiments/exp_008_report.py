"""EXP-008's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json
from first_token_parts import PARTS
from report import Report, band, columns, figure, say, span, table, yes

PAPER = {
    "Gemma 3 12B": {1024: (3964, 475, 683), 2048: (7119, 495, 709), 4096: (15736, 577, 719)},
    "DeepSeek-Coder-V2-Lite 16B": {1024: (1043, 234, 345), 2048: (1737, 246, 368), 4096: (3970, 271, 366)},
    "Llama 3.1 8B": {1024: (2500, 260, 412), 2048: (4530, 274, 420), 4096: (10235, 290, 429)},
}
"""Milliseconds to the first token, cold, from disk and from RAM, by tokens: Table 3 of arXiv 2603.04428."""
_NAMES = {"no cache": "without cache", "disk": "disk", "disk, dropped": "disk, files not in memory", "memory": "RAM",
          "mlx-lm, no cache": "mlx-lm without cache", "mlx-lm, file": "mlx-lm's file",
          "mlx-lm, file dropped": "mlx-lm's file, not in memory", "one pass": "one pass"}  # fmt: skip


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    rows = content["lengths"]
    number = say(rows[-1], "at {tokens:,} tokens {speedup[disk][median]} times as fast; mlx-lm's own file "
                 "{speedup[mlx-lm, file][median]}")  # fmt: skip
    return Report("the first token from disk and from RAM", number, {
        "summary": _summary(rows), "first tokens": _first_tokens(rows), "speed-ups": _speedups(rows),
        "disk and ram": _disk_and_ram(rows), "parts": _parts(rows), "paper": _paper(rows),
    })  # fmt: skip


def _summary(rows: list[Json]) -> str:
    ours, theirs = (
        ", ".join(f"{row['speedup'][name]['median']} at {row['tokens']}" for row in rows)
        for name in ("disk", "mlx-lm, file")
    )
    ratios = [row["disk_over_ram"]["median"] for row in rows]
    return "\n".join((
        f"From disk the first token comes so many times as fast as without a cache, by tokens: {ours}.",
        f"With mlx-lm's own file, against mlx-lm's own prefill: {theirs}.",
        say({**rows[-1]["first_token_ms"], "tokens": rows[-1]["tokens"]}, (
            "At {tokens} tokens it takes {disk[median]:.0f} ms from disk, {memory[median]:.0f} from RAM, "
            "{mlx-lm, file[median]:.0f} with mlx-lm's file; one pass of the model alone takes {one pass[median]:.0f}."
        )),
        f"Disk takes {min(ratios)} to {max(ratios)} times as long as RAM (targets: at least 1, at most 1.15).",
    ))  # fmt: skip


def _first_tokens(rows: list[Json]) -> str:
    head = ("tokens", "MB", *(f"{title}, ms" for title in _NAMES.values()))
    lines = [(row["tokens"], row["mb"], *(span(row["first_token_ms"][name]) for name in _NAMES)) for row in rows]
    return table(head, lines)


def _speedups(rows: list[Json]) -> str:
    names = [name for name in _NAMES if name in rows[0]["speedup"]]
    lines = [
        (row["tokens"], *(span(row["speedup"][name]) for name in names),
         yes(row["speedup"]["disk"]["median"] > row["speedup"]["mlx-lm, file"]["median"], "no"))
        for row in rows
    ]  # fmt: skip
    return table(("tokens", *(_NAMES[name] for name in names), "disk above mlx-lm's file"), lines)


def _disk_and_ram(rows: list[Json]) -> str:
    loading = [
        {source: row["parts_ms"][source]["memory"] + row["parts_ms"][source]["fill"] for source in ("disk", "memory")}
        for row in rows
    ]
    return columns([{**row, "loading": one} for row, one in zip(rows, loading, strict=True)], {
        "tokens": "{tokens}", "disk / RAM": "{disk_over_ram}", "one copy of the bytes, ms": "{copy_ms}",
        "memory and fill: disk, ms": "{loading[disk]:.1f}", "RAM, ms": "{loading[memory]:.1f}",
        "MB read from the disk after dropping: stoker": "{read_from_disk_mb[disk, dropped][median]}",
        "mlx-lm": "{read_from_disk_mb[mlx-lm, file dropped][median]}",
    })  # fmt: skip


def _parts(rows: list[Json]) -> str:
    lines = [
        (row["tokens"], _NAMES[source], *(row["parts_ms"][source][name] for name in PARTS))
        for row in rows
        for source in ("disk", "memory")
    ]
    return table(("tokens", "from", *PARTS), lines)


def _paper(rows: list[Json]) -> str:
    def line(name: str, n: int, cold: float, disk: float, ram: float) -> tuple[str | int, ...]:
        return name, n, *(f"{ms:.0f}" for ms in (cold, disk, ram)), f"{cold / disk:.1f}", f"{cold / ram:.1f}"

    lines = [line(name, n, *found) for name, by_tokens in PAPER.items() for n, found in by_tokens.items()]
    for row in rows:
        found = (row["first_token_ms"][name]["median"] for name in ("no cache", "disk", "memory"))
        lines.append(line("here", row["tokens"], *found))
    return table(("model", "tokens", "cold, ms", "disk, ms", "RAM, ms", "disk: times as fast", "RAM"), lines)


def plot(content: Json, results: Path) -> None:
    rows = content["lengths"]
    tokens = [row["tokens"] for row in rows]
    with figure(content, results, "first_token", (11, 4), panels=(1, 2)) as (left, right):
        for name in ("no cache", "mlx-lm, no cache", "mlx-lm, file", "disk", "memory", "one pass"):
            band(left, tokens, [row["first_token_ms"][name] for row in rows], label=_NAMES[name])
        for name in ("disk", "memory", "mlx-lm, file"):
            right.plot(tokens, [row["speedup"][name]["median"] for row in rows], marker="o", label=_NAMES[name])
        for model, by_tokens in PAPER.items():
            right.plot(list(by_tokens), [cold / disk for cold, disk, _ in by_tokens.values()], linestyle=":",
                       color="grey", label=f"the paper's, disk: {model}")  # fmt: skip
        left.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="ms to the first token")
        right.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="times as fast as its own cold start")
        for axes in (left, right):
            axes.set_xticks(tokens, [str(n) for n in tokens])
            axes.minorticks_off()
            axes.legend(fontsize=7)

"""EXP-006's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json, machine_lines, table, verdict_title

GEMMA_3_12B_BYTES_PER_TOKEN = 48 * 8 * (256 + 256) * 2
"""48 layers, 8 K/V heads of 256, 16 bit, every layer kept whole: what the seed's target case would hold."""


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_006_scaling.png")
    parts = {
        "summary": _summary(content),
        "machine": machine_lines(content),
        "targets": _targets(content),
        "arithmetic": _arithmetic(content),
        "reconstruct": _cells(content),
        "other ways": _others(content),
        "scaling": _scaling(content),
        "padded": _padded(content["padded"]),
        "library": _library(content["library"]),
        "direct": _direct(content["direct"]),
    }
    title = verdict_title(content, "cache reconstruction")
    met = sum(cell["reconstruct_ms"]["p95"] < target for cell, target in _with_target(content))
    floors = [cell["used_copy_ms"]["p50"] / target for cell, target in _with_target(content)]
    floor = f"one bare copy of the bytes takes {min(floors):.1f} to {max(floors):.1f} times what they allow"
    return f"{title}: {met} of {len(floors)} latency targets met; {floor}", parts


def _with_target(content: Json) -> list[tuple[Json, float]]:
    by = {(cell["blocks"], cell["layers"]): cell for cell in content["cells"]}
    return [(by[t["blocks"], t["layers"]], t["target_ms"]) for t in content["targets"]]


def _summary(content: Json) -> str:
    pairs, last = _with_target(content), max(content["cells"], key=lambda cell: cell["bytes"])
    met = sum(cell["reconstruct_ms"]["p95"] < target for cell, target in pairs)
    beyond = sum(cell["fresh_copy_ms"]["p50"] >= target for cell, target in pairs)
    used = sum(cell["used_copy_ms"]["p50"] >= target for cell, target in pairs)
    lines = [
        f"{met} of the seed's {len(pairs)} latency targets are met here. {beyond} of them lie below one copy of the "
        f"bytes into fresh memory, {used} even below one copy into memory already in use: on this machine no restore "
        "could meet those.",
        f"{last['blocks']} blocks of {last['layers']} layers ({last['bytes'] / 1e6:.0f} MB): p95 "
        f"{_ms(last['reconstruct_ms']['p95'])} ms; one copy of the bytes alone {_ms(last['used_copy_ms']['p50'])} ms "
        f"(used memory), {_ms(last['fresh_copy_ms']['p50'])} ms (fresh memory).",
    ]
    project = [cell for cell in content["cells"] if (cell["blocks"], cell["layers"]) == (32, 30)]
    for cell in project:
        c = cell["copies"]
        lines.append(
            "The project's own target, at most 1.5 copies into fresh memory at 32 blocks of 30 layers: "
            f"{c['median']:.2f} (median of {c['n']} rounds; {c['min']:.2f} to {c['max']:.2f}); counted in copies "
            f"into used memory, {cell['used_copies']['median']:.2f}."
        )
    first, row = content["direct"][0], content["direct"][-1]
    lines.append(
        f"SmolLM2's first token from the restored cache came {first['speedup']} times as fast as without it at "
        f"{first['tokens']} tokens, and {row['speedup']} times as fast at {row['tokens']}."
    )
    return "\n".join(lines)


def _targets(content: Json) -> str:
    head = ("blocks x layers", "MB", "target p95, ms", "measured p95, ms", "met", "floor: copy into used memory, ms",
            "copy into fresh memory, ms", "can be met here")  # fmt: skip
    rows = []
    for cell, target in _with_target(content):
        fresh, used = cell["fresh_copy_ms"]["p50"], cell["used_copy_ms"]["p50"]
        possible = "not by any copy" if used >= target else "only into used memory" if fresh >= target else "yes"
        p95 = cell["reconstruct_ms"]["p95"]
        rows.append((f"{cell['blocks']} x {cell['layers']}", _mb(cell), target, _ms(p95),
                     "yes" if p95 < target else "no", _ms(used), _ms(fresh), possible))  # fmt: skip
    return table(head, rows)


def _arithmetic(content: Json) -> str:
    given = content["given_gb_s"]
    head = ("blocks x layers", "cache", "MB", "target, ms", *(f"at {rate} GB/s, ms" for rate in given))
    rows = []
    for item in content["targets"]:
        kinds = [("this shape, 32 bit", item["bytes"]), ("this shape, 16 bit", item["bytes"] // 2)]
        if (item["blocks"], item["layers"]) == (32, 48):
            kinds.append(("Gemma 3 12B, 16 bit", 32 * 256 * GEMMA_3_12B_BYTES_PER_TOKEN))
        for name, n_bytes in kinds:
            least = [2 * n_bytes / (rate * 1e9) * 1e3 for rate in given]
            cells = [f"{_ms(ms)}{'' if ms < item['target_ms'] else ' (no)'}" for ms in least]
            rows.append(
                (f"{item['blocks']} x {item['layers']}", name, f"{n_bytes / 1e6:.1f}", item["target_ms"], *cells)
            )
    return table(head, rows)


def _cells(content: Json) -> str:
    head = ("blocks", "layers", "MB", "n", "mean, ms", "p50", "p95", "p99", "of p50: store", "of p50: into MLX",
            "copy, fresh, p50", "copy, used, p50", "fresh copies: median (least to most)", "used copies",
            "page faults")  # fmt: skip
    rows = []
    for c in content["cells"]:
        r, copies = c["reconstruct_ms"], c["copies"]
        rows.append((c["blocks"], c["layers"], _mb(c), r["n"], *(_ms(r[k]) for k in ("mean", "p50", "p95", "p99")),
                     *(_ms(c[k]["p50"]) for k in ("store_ms", "caches_ms", "fresh_copy_ms", "used_copy_ms")),
                     f"{copies['median']:.2f} ({copies['min']:.2f} to {copies['max']:.2f})",
                     f"{c['used_copies']['median']:.2f}", f"{c['page_faults']['median']:.0f}"))  # fmt: skip
    return table(head, rows)


def _others(content: Json) -> str:
    names = ("mean", "p50", "p95", "p99")
    head = ("blocks", "layers", "MB", "n", *(f"extract {name}, ms" for name in names),
            *(f"round trip {name}, ms" for name in names))  # fmt: skip
    rows = [
        (c["blocks"], c["layers"], _mb(c), c["extract_ms"]["n"],
         *(_ms(c[way][name]) for way in ("extract_ms", "round_trip_ms") for name in names))
        for c in content["cells"]
    ]  # fmt: skip
    return table(head, rows)


def _scaling(content: Json) -> str:
    fit, leak = content["fit"], content["leak"]
    resident = ", ".join(f"{mb:.0f}" for mb in leak["resident_mb"])
    return (
        f"Over all {len(content['cells'])} cells the median is {fit['at_zero_ms']} ms + {fit['ms_per_mb']} ms per MB "
        f"(r2 {fit['r2']}); a power law through them has the exponent {fit['exponent']} (1 is linear).\n"
        f"{leak['rounds']} reconstructions of {leak['blocks']} blocks of {leak['layers']} layers ({leak['cell_mb']} MB "
        f"each): the process held {resident} MB at the start, the quarters and the end; growth {leak['growth_mb']} MB."
    )


def _padded(padded: Json) -> str:
    rows = [
        (name, *(_ms(padded[key][k]) for k in ("mean", "p50", "p95", "p99")), padded[key]["n"])
        for name, key in (("612 tokens: two blocks and a tail", "blocks_ms"), ("768 tokens: padded", "padded_ms"))
    ]
    ratio = padded["ratio"]
    said = (
        f"Blocks took {ratio['median']:.2f} of the padded layout's time (median of {ratio['n']} pairs; "
        f"{ratio['min']:.2f} to {ratio['max']:.2f}); the bytes are {padded['bytes_ratio']:.2f} of its bytes."
    )
    return f"{table(('layout', 'mean, ms', 'p50', 'p95', 'p99', 'n'), rows)}\n\n{said}"


def _library(library: Json) -> str:
    ways = {"library": "`save_file`", "mapped": "`safe_open`", "whole": "`load`"}
    head = ("blocks", "MB", "step", "own, ms", "library, ms", "library / own: median (least to most)", "n")
    lines = []
    for row in library["rows"]:
        for name, ratio in row["of_own"].items():
            step, way = name.split(", ")
            lines.append((row["blocks"], row["mb"], f"{step}: {ways[way]}", _ms(row["ms"][f"{step}, own"]["median"]),
                          _ms(row["ms"][name]["median"]), _span(ratio), ratio["n"]))  # fmt: skip
    when = f"Measured on {library['date']}, load average at the start {library['load_average_at_start']}."
    return f"{table(head, lines)}\n\n{when}"


def _direct(rows: list[Json]) -> str:
    head = ("tokens", "MB", "prefill, s", "runs", "from cache, s", "runs", "of which store, ms", "ratio", "same token")
    lines = [
        (r["tokens"], r["mb"], _span(r["cold_s"]), r["cold_s"]["n"], _span(r["warm_s"]), r["warm_s"]["n"],
         _span(r["store_ms"]), f"{r['speedup']}x", "yes" if r["same_token"] else "NO")
        for r in rows
    ]  # fmt: skip
    return table(head, lines)


def plot(content: Json, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cells = sorted(content["cells"], key=lambda cell: cell["bytes"])
    fit = content["fit"]
    figure, both = plt.subplots(1, 2, figsize=(11, 4.5))
    for axes, scale in zip(both, ("linear", "log"), strict=True):
        for n_layers in sorted({cell["layers"] for cell in cells}):
            own = [cell for cell in cells if cell["layers"] == n_layers]
            mb, p50 = [c["bytes"] / 1e6 for c in own], [c["reconstruct_ms"]["p50"] for c in own]
            above = [max(0.0, c["reconstruct_ms"]["p95"] - c["reconstruct_ms"]["p50"]) for c in own]
            axes.errorbar(
                mb, p50, yerr=[[0.0] * len(own), above], fmt="o", ms=4, label=f"{n_layers} layers, p50 to p95"
            )
        mb = [cell["bytes"] / 1e6 for cell in cells]
        axes.plot(mb, [cell["fresh_copy_ms"]["p50"] for cell in cells], color="grey", label="one copy, fresh memory")
        axes.plot(
            mb, [cell["used_copy_ms"]["p50"] for cell in cells], color="grey", ls="--", label="one copy, used memory"
        )
        line = [fit["at_zero_ms"] + fit["ms_per_mb"] * x for x in mb]
        if scale == "linear":
            axes.plot(mb, line, color="black", lw=1, label=f"{fit['ms_per_mb']:.2f} ms per MB, r2 {fit['r2']:.3f}")
        targets = [(t["bytes"] / 1e6, t["target_ms"]) for t in content["targets"]]
        axes.plot(*zip(*targets, strict=True), "kx", label="the seed's targets (p95)")
        axes.set(xscale=scale, yscale=scale, xlabel="MB of cache", ylabel="ms")
    both[0].legend(fontsize=8)
    figure.suptitle(f"EXP-006 on {content['machine']['device']}: blocks in the page cache to evaluated caches")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _mb(cell: Json) -> str:
    return f"{cell['bytes'] / 1e6:.1f}"


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _span(value: Json) -> str:
    return f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"

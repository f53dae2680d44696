"""EXP-010's tables and plot, made from its results alone."""

from pathlib import Path

from common import Json, machine_lines, table, verdict_title

TARGETS = {"engine": 0.97, "pipeline": 0.95}


def render(content: Json, results: Path) -> tuple[str, dict[str, str]]:
    plot(content, results / "exp_010_throughput.png")
    machine = f"{machine_lines(content)} Load average at the end {content['load_average_at_end']}."
    parts = {"summary": _summary(content), "machine": machine, "ratios": _ratios(content["loads"])}
    title = verdict_title(content, "throughput against a bare loop")
    worst = f"engine {content['worst_engine_ratio']} at worst, pipeline {content['worst_pipeline_ratio']}"
    return f"{title}: {worst}", parts


def _summary(content: Json) -> str:
    lines = []
    for who, target in TARGETS.items():
        rows = [row for row in content["loads"] if f"{who}_ratio" in row]
        met = [row for row in rows if row[f"{who}_ratio"]["median"] >= target]
        least = min(rows, key=lambda row: row[f"{who}_ratio"]["median"])
        lines.append(
            f"The {who} reaches its {target} in {len(met)} of {len(rows)} loads; the least is "
            f"{_span(least[f'{who}_ratio'])} ({least['name']})."
        )
    same = all(row[key] for row in content["loads"] for key in row if key.endswith("_same_text"))
    lines.append("All gave the same text." if same else "NOT all gave the same text.")
    return "\n".join(lines)


def _ratios(rows: list[Json]) -> str:
    head = ("load", "tokens", "bare, tokens/s", "engine, tokens/s", "pipeline, tokens/s", "engine / bare",
            "pipeline / bare", "pipeline without saves / bare", "same text")  # fmt: skip
    lines = []
    for row in rows:
        same = all(row[key] for key in row if key.endswith("_same_text"))
        speeds = [_span(row.get(f"{who}_tokens_per_s")) for who in ("bare", "engine", "pipeline")]
        ratios = [_span(row.get(f"{who}_ratio")) for who in ("engine", "pipeline", "unsaved")]
        lines.append((row["name"], row["generated"], *speeds, *ratios, "yes" if same else "NO"))
    return table(head, lines)


def plot(content: Json, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in content["loads"] if "pipeline_ratio" in row]
    places = [row["places"] for row in rows]
    figure, (speed, ratio) = plt.subplots(1, 2, figsize=(11, 4.2))
    for who, color in (("bare", "grey"), ("engine", "C0"), ("pipeline", "C1")):
        speed.plot(places, [row[f"{who}_tokens_per_s"]["median"] for row in rows], "o-", color=color, label=who)
        if who in TARGETS:
            values = [row[f"{who}_ratio"] for row in rows]
            middle = [value["median"] for value in values]
            ends = [[v["median"] - v["min"] for v in values], [v["max"] - v["median"] for v in values]]
            ratio.errorbar(places, middle, yerr=ends, fmt="o-", color=color, capsize=3, label=f"{who}, least to most")
            ratio.axhline(TARGETS[who], color=color, ls=":", label=f"target {TARGETS[who]}")
    speed.set(xscale="log", xlabel="rows in the batch", ylabel="generated tokens/s")
    ratio.set(xscale="log", xlabel="rows in the batch", ylabel="of a bare loop's speed")
    for axes in (speed, ratio):
        axes.set_xticks(places, [str(n) for n in places])
        axes.minorticks_off()
        axes.legend(fontsize=8)
    figure.suptitle(f"EXP-010 on {content['machine']['device']}: {content['machine']['model']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _span(value: Json | None) -> str:
    return f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})" if value else ""

"""EXP-010's table and plot, made from its results alone."""

from pathlib import Path

from common import Json
from report import Report, columns, figure, say, short

TARGETS = {"engine": 0.97, "pipeline": 0.95}
RATIOS = {
    "load": "{name}", "tokens": "{generated}", "bare, tokens/s": "{bare_tokens_per_s:.3g}",
    "engine, tokens/s": "{engine_tokens_per_s:.3g}", "pipeline, tokens/s": "{pipeline_tokens_per_s:.3g}",
    "engine / bare": "{engine_ratio:.3g}", "pipeline / bare": "{pipeline_ratio:.3g}",
    "pipeline without saves / bare": "{unsaved_ratio:.3g}", "same text": "{same}",
}  # fmt: skip
KEPT = {
    "process_and_server": "Process, server and wire keep {median} of the engine's speed",
    "saves": "Saves keep {median} of the speed without them",
}


def render(content: Json, results: Path) -> Report:
    plot(content, results)
    rows = [{**row, "same": same_text(row)} for row in content["loads"]]
    number = say(content, "at worst engine {worst_engine_ratio}, pipeline {worst_pipeline_ratio} of a bare loop")
    parts = {"summary": _summary(content, rows), "ratios": columns(rows, RATIOS)}
    return Report("throughput against a bare loop", number, parts)


def same_text(load: Json) -> bool:
    return all(load[key] for key in load if key.endswith("_same_text"))


def _summary(content: Json, rows: list[Json]) -> str:
    lines = []
    for who, target in TARGETS.items():
        found = {row["name"]: row[f"{who}_ratio"] for row in rows if f"{who}_ratio" in row}
        met = [ratio for ratio in found.values() if ratio["median"] >= target]
        name, least = min(found.items(), key=lambda item: item[1]["median"])
        lines.append(
            f"The {who} reaches its {target} in {len(met)} of {len(found)} loads; the least is {short(least)} ({name})."
        )
    middle = " (the middle half of {n} rounds: {middle_half[0]} to {middle_half[1]})."
    lines += [say(content["kept_by"][name], said + middle) for name, said in KEPT.items()]
    lines.append("All gave the same text." if all(row["same"] for row in rows) else "NOT all gave the same text.")
    return "\n".join(lines)


def plot(content: Json, results: Path) -> None:
    rows = [row for row in content["loads"] if "pipeline_ratio" in row]
    places = [row["places"] for row in rows]
    with figure(content, results, "throughput", (11, 4.2), panels=(1, 2)) as (speed, ratio):
        for who, color in (("bare", "grey"), ("engine", "C0"), ("pipeline", "C1")):
            speed.plot(places, [row[f"{who}_tokens_per_s"]["median"] for row in rows], "o-", color=color, label=who)
        for who, color in (("engine", "C0"), ("pipeline", "C1")):
            values = [row[f"{who}_ratio"] for row in rows]
            middle = [value["median"] for value in values]
            ends = [[abs(value[end] - value["median"]) for value in values] for end in ("min", "max")]
            ratio.errorbar(places, middle, yerr=ends, fmt="o-", color=color, capsize=3, label=f"{who}, least to most")
            ratio.axhline(TARGETS[who], color=color, ls=":", label=f"target {TARGETS[who]}")
        speed.set(xscale="log", xlabel="rows in the batch", ylabel="generated tokens/s")
        ratio.set(xscale="log", xlabel="rows in the batch", ylabel="of a bare loop's speed")
        for axes in (speed, ratio):
            axes.set_xticks(places, [str(n) for n in places])
            axes.minorticks_off()
            axes.legend(fontsize=8)

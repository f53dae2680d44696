"""The pages made of figures: one of each machine, their table in `docs/figures/`, and the README's part. No MLX.

``python experiments/figures_page.py [FIGURES.json ...]`` adds these to `docs/figures/`, and writes all pages anew from
the JSON files there and in `results/`.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from common import HERE, Json
from report import columns, filled, machine_line, say, short, table

ROOT = HERE.parent
FIGURES = ROOT / "docs" / "figures"

HEADLINES = {
    "full batch": "tokens per second of a full batch, as a multiple of mlx-lm's own loop",
    "second turn": "the first token of agents' second turns, so many times as soon with their memory as without",
    "restore": "the first token of a long history, so many times as soon restored from disk as prefilled",
}
"""The figures that one would quote."""
_RATIO = {"ratio (least to most)": "{ratio:.3g}", "rounds": "{ratio[n]}", "first side": "{here}",
          "second side": "{there}"}  # fmt: skip
_RATIOS = {"part": "{link}", "compared": "{what}", **_RATIO, "asked": "{asked}", "exact": "{equal}"}
_CHECKS = {"part": "{link}", "checked": "{what}", "found": "{found}", "asked": "{asked}", "exact": "{equal}"}


def page(content: Json) -> str:
    facts, failed = content["machine"], [part for part in content["parts"] if part["status"] != "done"]
    device, rows = facts.get("device", facts["cpu"]), list(_rows(content["parts"]))
    sections = [
        f"# {facts.get('model', 'no model')} on {facts['cpu'] if device == 'CPU' else device}, {content['date']}",
        *([content["options"]["note"]] if content["options"]["note"] else []),
        *(["This is a virtual machine: its GPU is shared."] if facts.get("virtual") else []),
        *(["**Other programs kept the machine busy when it began: do not trust these times.**"]
          if facts["load_average_at_start"] > facts["cores"] else []),
        *(["A CPU's figures are no substitute for a Mac's."] if device == "CPU" else []),
        columns(_headlines(content), {"figure": "{figure}", **_RATIO, "exact": "{equal}"}),
        f"**{_exactness(content)}**",
        f"{machine_line(content)} Computed in {facts.get('dtype', 'no dtype')}; stoker {content['stoker']}.",
        "## Ratios",
        "A ratio is how many times as long the first side takes as the second (*in time*), or how many times as fast "
        "it is (*in speed*): the median of rounds in which both sides take turns. *Exact*: both sides gave the same "
        "tokens, or the check passed.",
        columns((row for row in rows if "ratio" in row), _RATIOS),
        "## Checks",
        columns((row for row in rows if "ratio" not in row), _CHECKS),
        *(["## Failed, stopped or not run", columns(failed, {
            "part": "{name}", "what": "{title}", "how it ended": "{status}", "after, s": "{s}", "reason": "{error}"})]
          if failed else []),
        "## Heat",
        "\n".join(f"- {when}: {'; '.join(lines) or 'not applicable'}" for when, lines in content["thermal"].items()),
    ]  # fmt: skip
    return "\n\n".join(sections) + "\n"


def _exactness(content: Json) -> str:
    checked = [row for part in content["parts"] for row in part["rows"] if "equal" in row]
    wrong = [row["what"] for row in checked if not row["equal"]]
    said = f"{len(checked) - len(wrong)} of {len(checked)} comparisons are exact."
    return f"{said} Not exact: {'; '.join(wrong)}." if wrong else said


def _headlines(content: Json) -> Iterator[Json]:
    found = {row["headline"]: row for row in _rows(content["parts"]) if row.get("headline")}
    for name, figure in HEADLINES.items():
        row = found.get(name, {"what": "not measured"})
        yield {**row, "figure": f"{figure} ({row['what']})"}


def _rows(parts: Iterable[Json]) -> Iterator[Json]:
    for part in parts:
        for row in part["rows"]:
            ends = {"here": "first", "there": "second"}
            sides = {name: f"{short(row[side])} {row['unit']}" for name, side in ends.items() if side in row}
            yield {**row, **sides, "link": f"EXP-{part['name']}" if part["name"].isdigit() else part["name"]}


def title_of_row(row: Json) -> str:
    """A row in a line."""
    told = [say(row, "{ratio:.3g}"), row.get("found", ""), "NOT EXACT" if row.get("equal") is False else ""]
    return f"{row['what']}: {' '.join(filter(None, told)) or 'exact'}"


# --- the table of machines, and the README ---


def all_figures(folder: Path = FIGURES) -> dict[str, Json]:
    """By name, the newest first."""
    files = sorted(folder.glob("*.json"), reverse=True)
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def machines(figures: dict[str, Json]) -> str:
    rows = []
    for name, content in figures.items():
        facts, found = content["machine"], {row.get("headline"): row for row in _headlines(content)}
        device = facts.get("device", "CPU")
        shown = f"{facts['cpu']}, {facts['cores']} cores" if device in ("CPU", facts["cpu"]) else device
        virtual = ", virtual" if facts.get("virtual") else ""
        model = f"{facts.get('model')}, {facts.get('dtype')}"
        ratios = [say(found.get(key, {}), "{ratio:.3g}") for key in HEADLINES]
        checked = [row["equal"] for part in content["parts"] for row in part["rows"] if "equal" in row]
        machine = f"[{shown}, {facts['ram_gb']} GB{virtual}]({name}.md)"
        exact = f"{sum(checked)} of {len(checked)}"
        rows.append((content["date"], machine, facts["os"], model, *ratios, exact))
    return table(("date", "machine", "system", "model", *HEADLINES, "exact"), rows)


def measured(figures: dict[str, Json], results: Path) -> str:
    """The README's table: the newest Mac's, and until there is one, that of the experiments on a CPU."""
    for name, content in figures.items():
        facts = content["machine"]
        if facts["os"].startswith("macOS") and not facts.get("virtual"):
            head = f"{facts['model']} in {facts['dtype']} on {facts['cpu']}, {facts['ram_gb']} GB"
            rows = [(say(row, "{figure}"), say(row, "{ratio:.3g}, exact: {equal}")) for row in _headlines(content)]
            said = f"{head} ({content['date']}, [all figures](docs/figures/{name}.md)): median, least and most."
            return f"{said}\n\n{table(('figure', 'result'), rows)}"
    return _of_the_cpu(results)


def _of_the_cpu(results: Path) -> str:
    known, restart, throughput = (
        json.loads((results / f"exp_{number}_results.json").read_text(encoding="utf-8"))
        for number in ("003", "014", "010")
    )
    longest, ratio = known["timing"][-1], restart["rounds"]["ratio"]
    rows = (
        (f"how soon does the first token come when {longest['prompt_tokens']} tokens of history are in the store?",
         f"{longest['speedup']} times as soon as without ([EXP-003](experiments/EXP-003-cache-injection.md))"),
        ("how long does a round of turns take after a restart?",
         f"{ratio['SIGTERM']['median']} times a round without one, {ratio['SIGKILL']['median']} after a `kill -9` "
         "([EXP-014](experiments/EXP-014-restart.md))"),
        ("how much of a bare mlx-lm loop's speed remains?",
         f"at worst {throughput['worst_engine_ratio']} in the engine and {throughput['worst_pipeline_ratio']} in the "
         "whole worker; 0.97 and 0.95 were asked ([EXP-010](experiments/EXP-010-throughput.md))"),
    )  # fmt: skip
    said = (
        "Ratios of SmolLM2-135M in float32 on two Linux CPU cores, both sides in turn in one run; no substitute for a "
        "Mac's."
    )
    return f"{said}\n\n{table(('question', 'result'), rows)}"


def written(root: Path, figures: dict[str, Json], results: Path) -> Iterator[tuple[Path, str]]:
    """The pages that depend on figures, with their new text."""
    for path, parts in (
        (root / "docs" / "figures" / "README.md", {"machines": machines(figures)}),
        (root / "README.md", {"measured": measured(figures, results)}),
    ):
        yield path, filled(path.read_text(encoding="utf-8"), parts)
    for name, content in figures.items():
        yield root / "docs" / "figures" / f"{name}.md", page(content)


def name_of(content: Json) -> str:
    """Date, device and model: of the files in `docs/figures/`."""
    facts = content["machine"]
    device = facts["cpu"] if facts.get("device", "CPU") == "CPU" else facts["device"]
    return re.sub(r"[^a-z0-9.]+", "-", f"{content['date']} {device} {facts.get('model', '')}".lower()).strip("-")


def main(files: Sequence[str]) -> None:
    for file in files:
        text = Path(file).read_text(encoding="utf-8")
        (FIGURES / f"{name_of(json.loads(text))}.json").write_text(text, encoding="utf-8")
    for path, text in written(ROOT, all_figures(), HERE / "results"):
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

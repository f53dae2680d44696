"""The one form of all reports: title with what was found, machine, tables, plots and the index, all made from an
experiment's results. A report is prose with parts between marks; only title and parts are written here."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Json
from source import is_of_another_script, is_older

SECTIONS = ("Question", "Source", "Method", "Machine and versions", "Results", "Conclusion",
            "What it changed in the product", "Limits")  # fmt: skip
"""The headings of every report, in this order; above them stands the summary."""

_SOFTWARE = {
    "python": "Python", "mlx": "mlx", "mlx_lm": "mlx-lm", "blas": "BLAS:", "sqlite": "SQLite", "rq": "rq",
    "redis_py": "redis-py", "server": "server",
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What an experiment's results say.

    Attributes:
        name: of the experiment, for the title.
        number: what was found, in a few figures: for the title and the index.
        parts: the text between the marks of each name. Unless given, `machine` is the line about the machine, and
            `checks` the table of targets.
    """

    name: str
    number: str
    parts: Mapping[str, str]


# --- texts ---


def written(text: str, content: Json, report: Report) -> str:
    """A report's text with its title and its parts anew."""
    _, newline, rest = text.partition("\n")
    parts = {"machine": machine_line(content) + _of_which_script(content), "checks": _checks(content), **report.parts}
    return filled(f"{_title(content, report)}{newline}{rest}", parts)


def filled(text: str, parts: Mapping[str, str]) -> str:
    """The text with other parts between its marks.

    Raises:
        ValueError: the text has not each of these marks once.
    """
    for name, part in parts.items():
        begin, end = f"<!-- from results: {name} -->\n", f"<!-- end: {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}{part}\n{end}{rest.split(end)[1]}"
    return text


def indexed(index: str, content: Json, number: str) -> str:
    """The index with the date, the number of targets met and what was found by this experiment anew.

    Raises:
        ValueError: it has no row of this experiment.
    """
    row = re.compile(rf"^(\| \[{content['experiment']}\]\([^)]*\) \|) [\d-]* ?(\| .*? \|) .*$", re.MULTILINE)
    text, n = row.subn(lambda old: f"{old[1]} {content['date']} {old[2]} {_met(content)} | {number} |", index)
    if n != 1:
        raise ValueError(f"the index has {n} rows of {content['experiment']}")
    return text


def _title(content: Json, report: Report) -> str:
    device = content["machine"].get("device")
    where = {None: "without a model", "CPU": "on a CPU, not on Metal"}.get(device, f"on {device}")
    if is_older(*_run(content)):
        where += "; older than its code"
    return f"# {content['experiment']}, {report.name}: {report.number} ({_met(content)} targets met; {where})"


def _of_which_script(content: Json) -> str:
    if not is_of_another_script(*_run(content)):
        return ""
    return " The script has changed since this run: sizes in the method may be newer than the tables."


def _run(content: Json) -> tuple[str, str | None]:
    """The experiment's number, and the commit of its run."""
    return content["experiment"].removeprefix("EXP-"), content.get("source", {}).get("commit")


def _met(content: Json) -> str:
    held = _targets(content).values()
    return f"{sum(held)} of {len(held)}"


def _targets(content: Json) -> dict[str, bool]:
    return {name: held for name, held in content["verdict"].items() if name != "passed"}


def machine_line(content: Json) -> str:
    facts = content["machine"]
    device = f"Device: {facts['device']}; " if "device" in facts else ""
    memory = f", {facts['ram_gb']} GB" if "ram_gb" in facts else ""
    virtual = ", a virtual machine" if facts.get("virtual") else ""
    software = ", ".join(f"{name} {facts[key]}" for key, name in _SOFTWARE.items() if key in facts)
    line = (
        f"{content['date']}, {'quick' if content['quick'] else 'full'} run, {content['wall_s']} s. "
        f"{device}{facts['cpu']}, {facts['cores']} cores{memory}{virtual}; {facts['os']}; {software}; "
        f"load average at the start {facts['load_average_at_start']}."
    )
    if "model" in facts:
        cache = f"cache {facts['cache_dtype']}, {facts['cache_bytes_per_token']} bytes per token"
        line += f" Model: {facts['model']}, {cache}."
    if "load_average_at_end" in content:
        line += f" Load average at the end {content['load_average_at_end']}."
    return line + _commit(content.get("source", {}))


def _commit(source: Json) -> str:
    if not source.get("commit"):
        return " The commit was not recorded."
    return f" Commit {source['commit'][:12]}{', with changes' if source['dirty'] else ''}."


# --- parts ---


class _Shown(dict[str, Any]):
    """Results in a template, where `{speed:.3g}` shows a whole `spread`, and a missing value shows nothing."""

    def __getitem__(self, name: str) -> Any:
        found = self.get(name)
        if isinstance(found, dict):
            return _Shown(found)
        if isinstance(found, float):
            return _Number(found)
        return _Nothing() if found is None else yes(found) if isinstance(found, bool) else found

    def __format__(self, form: str) -> str:
        return span(self, form=form)


class _Number(float):
    """A float whose three significant digits have no exponent."""

    def __format__(self, form: str) -> str:
        return super().__format__(".0f" if form == ".3g" and abs(self) >= 1000 else form)


class _Nothing(_Shown):
    def __getitem__(self, name: str) -> Any:
        return self

    def __format__(self, form: str) -> str:
        return ""


def say(found: Json, template: str) -> str:
    """A text with results: `{speed}` is a value by its name (a `spread` as its median, least and most; `NO` for false),
    `{speed[median]:.2f}` a value in a value, with a format of Python's."""
    return template.format_map(_Shown(found))


def columns(rows: Iterable[Json], texts: Mapping[str, str]) -> str:
    """A table with a line for each of `rows`: the heads of its columns, and a template (see `say`) for each."""
    return table(tuple(texts), [tuple(say(row, text) for text in texts.values()) for row in rows])


def listed(found: Json, head: tuple[str, str], texts: Mapping[str, str]) -> str:
    """A table with a line for each of `texts`: what it is and its value, both templates (see `say`)."""
    return table(head, [(say(found, name), say(found, text)) for name, text in texts.items()])


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def span(found: Json, unit: str = "", form: str = "") -> str:
    """A `spread`: its median, least and most, with a format of Python's for each."""
    median, least, most = (format(_Number(found[name]) if form else found[name], form)
                           for name in ("median", "min", "max"))  # fmt: skip
    return f"{median}{unit} ({least} to {most})"


def short(found: Json) -> str:
    """As `span`, with three significant digits."""
    return span(found, form=".3g")


def percent(ratio: float, digits: int = 2) -> str:
    """The change that a ratio means."""
    return f"{100 * (ratio - 1):+.{digits}f} %"


def yes(flag: bool, no: str = "NO") -> str:
    return "yes" if flag else no


def _checks(content: Json) -> str:
    """The targets, and which of them were met."""
    return table(("target", "met"), [(_spelt(name), yes(held, "**no**")) for name, held in _targets(content).items()])


def _spelt(name: str) -> str:
    """`at_most_1_5_copies` as "at most 1.5 copies"."""
    return re.sub(r"\b(\d) (\d+)\b", r"\1.\2", name.replace("_", " "))


# --- plots ---


@contextmanager
def figure(
    content: Json, results: Path, name: str, size: tuple[float, float], *, panels: tuple[int, int], **options: Any
) -> Iterator[Any]:
    """The axes of a plot of `size` inches, in rows and columns as `panels` tells. It is saved as `exp_NNN_NAME.png`
    afterwards, with a legend where there are several names. `options`: others of `pyplot.subplots`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    drawn, axes = plt.subplots(*panels, figsize=size, **options)
    yield axes
    for one in drawn.axes:
        if len(one.get_legend_handles_labels()[1]) > 1:
            one.legend(fontsize=8)
    facts = content["machine"]
    model = f": {facts['model']}" if "model" in facts else ""
    drawn.suptitle(f"{content['experiment']} on {facts.get('device', facts['cpu'])}{model}")
    drawn.tight_layout()
    drawn.savefig(results / f"exp_{content['experiment'][4:]}_{name}.png", dpi=120, metadata={"Software": None})
    plt.close(drawn)


def lines(axes: Any, places: Sequence[float], found: Mapping[str, Sequence[float]], **options: Any) -> None:
    """A line for each name."""
    for name, values in found.items():
        axes.plot(places, values, label=name, **options)

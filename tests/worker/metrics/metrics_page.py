"""Writes the table of `docs/metrics.md` from the declaration: `python -m tests.worker.metrics.metrics_page`."""

from pathlib import Path

from stoker_worker.metrics.declared import DECLARED, Metric

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
BEGIN, END = "<!-- the table is written by tests/worker/metrics/metrics_page.py -->\n", "<!-- end of the table -->\n"


def table() -> str:
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|", *map(_line, DECLARED)]
    return "\n".join(lines) + "\n"


def _line(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    if metric.values:
        labels += ": " + ", ".join(metric.values)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def page_with_table() -> str:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table())

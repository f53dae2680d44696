"""A table of ready texts, and how tables show a duration: for the commands and for the dashboard's pages. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from stoker_shared.text import printable


@dataclass(frozen=True)
class Table:
    """`numbers`: the columns that are aligned on the right."""

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: range

    def text(self) -> str:
        """Lines with columns two spaces apart, the heading in capitals. Control characters are escaped."""
        rows = [[name.upper() for name in self.heading], *([printable(cell) for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [
                cell.rjust(width) if index in self.numbers else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def duration(seconds: float | None) -> str:
    """A short text: ``42 s``, ``3 min``, ``5 h`` or ``12 d``; ``-`` for ``None``."""
    if seconds is None:
        return "-"
    for unit, size, until in (("s", 1, 120), ("min", 60, 120 * 60), ("h", 3600, 48 * 3600)):
        if seconds < until:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"

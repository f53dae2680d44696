"""Shows a batch's progress on stderr: a bar on a terminal, else a line every few seconds.

Owns the last line of the terminal while a batch runs: all other lines go through `report`, which redraws the bar.
"""

import time
from collections import deque
from typing import Final, Self

import click

from stoker.batch.collecting import Tally
from stoker.wait_line import WaitLine
from stoker_shared.text import printable

_LINE_EVERY_S: Final = 5.0
_DRAW_EVERY_S: Final = 0.2
_RATE_OVER_S: Final = 30.0
_BAR_CHARACTERS: Final = 20


class Progress:
    """`total` is the number of requests in the batch; `quiet` shows nothing."""

    def __init__(self, total: int, tally: Tally, *, quiet: bool = False) -> None:
        self._total = total
        self._tally = tally
        self._quiet = quiet
        self._line = WaitLine(quiet=quiet)
        self._shown_at = float("-inf")
        self._samples: deque[tuple[float, int, int]] = deque()
        self._paused_at: tuple[int, int, str | None] | None = None  # the counts and the note of the last line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.erase()

    def report(self, line: str) -> None:
        """Print a line that is not overwritten."""
        if not self._quiet:
            self._line.erase()
            click.echo(printable(line, lines=True), err=True)

    def show(self, n_succeeded: int, n_failed: int, note: str | None = None) -> None:
        """Show the counts, at most a few times a second. `note` is the reason for a pause, if there is one."""
        now = time.monotonic()
        if self._quiet or now < self._shown_at + (_DRAW_EVERY_S if self._line.draws else _LINE_EVERY_S):
            return
        self._shown_at = now
        text = self._text(now, n_succeeded, n_failed, note)
        if self._line.draws:
            self._draw((n_succeeded + n_failed) / max(1, self._total), text)
        elif not note or (n_succeeded, n_failed, note) != self._paused_at:
            click.echo(text, err=True)
        self._paused_at = (n_succeeded, n_failed, note)

    def _draw(self, part: float, text: str) -> None:
        """On a narrow terminal, first the bar is omitted, then the end of the text."""
        n_done = int(part * _BAR_CHARACTERS)
        bar = f"[{'#' * n_done}{'-' * (_BAR_CHARACTERS - n_done)}] {100 * part:3.0f} %  "
        self._line.draw((bar if len(bar) + len(text) <= self._line.room else "") + text)

    def _text(self, now: float, n_succeeded: int, n_failed: int, note: str | None) -> str:
        tally, waiting = self._tally, self._total - n_succeeded - n_failed
        parts = [f"{n_succeeded:,} done", f"{n_failed:,} failed", f"{waiting:,} waiting", *([note] if note else [])]
        self._samples.append((now, tally.completion_tokens, tally.n_answers))
        while len(self._samples) > 2 and self._samples[0][0] < now - _RATE_OVER_S:
            self._samples.popleft()
        since, tokens, answers = self._samples[0]
        if now > since and not note:
            parts.append(f"{(tally.completion_tokens - tokens) / (now - since):,.0f} tokens/s")
        if tally.prompt_tokens:
            parts.append(f"{100 * tally.cached_tokens / tally.prompt_tokens:.0f} % cached")
        if tally.n_answers > answers and waiting and not note:
            parts.append(f"{_duration(waiting * (now - since) / (tally.n_answers - answers))} left")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

"""How far a batch is, for people: a bar on a terminal, else a line every few seconds. Writes to stderr.

click's bar and not rich's: click is here already, and the producer side stays light.
"""

import sys
import time
from collections import deque
from types import TracebackType
from typing import Any, Final, Self

import click

from stoker.batch.collecting import Tally

_LINE_EVERY_S: Final = 5.0
_DRAW_EVERY_S: Final = 0.2
_RATE_OVER_S: Final = 30.0


class Progress:
    """
    Args:
        total: requests in the batch.
        quiet: show nothing.
    """

    def __init__(self, total: int, tally: Tally, *, quiet: bool = False) -> None:
        self._total = total
        self._tally = tally
        self._quiet = quiet
        self._bar: Any = None
        self._shown_at = float("-inf")
        self._samples: deque[tuple[float, int, int]] = deque()
        if not quiet and sys.stderr.isatty():
            self._bar = click.progressbar(
                length=total, file=sys.stderr, show_eta=False, show_percent=True, item_show_func=lambda text: text
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(error_type, error, traceback)

    def show(self, n_succeeded: int, n_failed: int, note: str | None = None) -> None:
        """Where it is now; drawn at most a few times a second.

        Args:
            note: why nothing goes on, if so.
        """
        now = time.monotonic()
        if self._quiet or now < self._shown_at + (_DRAW_EVERY_S if self._bar is not None else _LINE_EVERY_S):
            return
        self._shown_at = now
        text = self._text(now, n_succeeded, n_failed, note)
        if self._bar is None:
            click.echo(text, err=True)
        else:
            self._bar.pos = min(n_succeeded + n_failed, self._total)
            self._bar.update(0, text)

    def _text(self, now: float, n_succeeded: int, n_failed: int, note: str | None) -> str:
        tally, waiting = self._tally, self._total - n_succeeded - n_failed
        parts = [f"{n_succeeded:,} done", f"{n_failed:,} failed", f"{waiting:,} waiting"]
        self._samples.append((now, tally.completion_tokens, tally.n_answers))
        while len(self._samples) > 2 and self._samples[0][0] < now - _RATE_OVER_S:
            self._samples.popleft()
        since, tokens, answers = self._samples[0]
        if now > since:
            parts.append(f"{(tally.completion_tokens - tokens) / (now - since):,.0f} tokens/s")
        if tally.prompt_tokens:
            parts.append(f"{100 * tally.cached_tokens / tally.prompt_tokens:.0f} % cached")
        if tally.n_answers > answers and waiting:
            parts.append(f"{_duration(waiting * (now - since) / (tally.n_answers - answers))} left")
        return ", ".join(parts + ([note] if note else []))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

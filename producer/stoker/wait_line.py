"""The last line on a terminal, drawn on stderr again and again; `shown_wait` shows in it what a command waits for.

Nothing is drawn if stderr is not a terminal. `shown_wait` draws on a thread of its own, until its block ends.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Final

import click

from stoker_shared.errors import StokerError
from stoker_shared.text import printable

_ERASE_LINE: Final = "\r\x1b[2K"
_SILENT_S: Final = 2.0
_DRAW_EVERY_S: Final = 1.0


class WaitLine:
    """Draws nothing if `quiet`, or if stderr is not a terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.draws = not quiet and sys.stderr.isatty()

    @property
    def room(self) -> int:
        """Characters that fit; more would wrap."""
        return shutil.get_terminal_size().columns - 1

    def draw(self, text: str) -> None:
        """Show this text in place of the one before, cut off at the terminal's width."""
        if self.draws:
            click.echo(_ERASE_LINE + printable(text)[: self.room], nl=False, err=True)

    def erase(self) -> None:
        if self.draws:
            click.echo(_ERASE_LINE, nl=False, err=True)


@contextmanager
def shown_wait(look: Callable[[], str], *, quiet: bool = False) -> Iterator[None]:
    """Show the text of `look` once the block has taken some seconds. `look` is called each second on another thread."""
    line, is_over = WaitLine(quiet=quiet), Event()
    if not line.draws:
        yield
        return
    thread = Thread(target=_draw, args=(line, look, is_over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(timeout=1.0)  # a look may be waiting for a server that is away
        line.erase()


def _draw(line: WaitLine, look: Callable[[], str], is_over: Event) -> None:
    began, pause_s = time.monotonic(), _SILENT_S
    while not is_over.wait(pause_s):
        pause_s = _DRAW_EVERY_S
        try:
            text = look()
        except StokerError as error:
            text = str(error)
        if not is_over.is_set():
            line.draw(f"waiting {time.monotonic() - began:.0f} s: {text}")

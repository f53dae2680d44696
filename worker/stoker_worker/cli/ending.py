"""How a command of `stoker-worker` ends: by one line for an error that an operator can mend, and quietly."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Final

import click

from stoker_shared.errors import StokerError
from stoker_shared.text import printable
from stoker_worker.cli.log_lines import is_journal, prefixed

MISSING: Final = "the worker's packages are missing ({}); install them with: pip install 'stoker[worker]'"


@contextmanager
def late_signals_ignored() -> Iterator[None]:
    """Python restores the default handlers at its exit: a late signal would make a clean stop look like a crash."""
    try:
        yield
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)


@contextmanager
def cleaned_up_when_terminated() -> Iterator[None]:
    """SIGTERM ends the process as Ctrl-C does: what the command opened and made is closed and removed. Main thread."""
    before = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """An error that an operator can mend becomes one line; anything else is a bug and keeps its traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise _ErrorLine(MISSING.format(error.name)) from error
    except StokerError as error:
        raise _ErrorLine(f"{type(error).__name__}: {error}") from error


class _ErrorLine(click.ClickException):
    """In the journal, an error by its priority too: it is the line that tells why a service does not start."""

    def show(self, file: IO[Any] | None = None) -> None:
        line = printable(f"Error: {self.format_message()}", lines=True)
        click.echo(prefixed(line, logging.ERROR) if is_journal() else line, file=file, err=True)

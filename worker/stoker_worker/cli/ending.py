"""How a command of `stoker-worker` ends: by one line for an error that an operator can mend, and quietly."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from stoker_shared.errors import StokerError
from stoker_shared.text import printable

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
        raise click.ClickException(MISSING.format(error.name)) from error
    except StokerError as error:
        raise click.ClickException(printable(f"{type(error).__name__}: {error}", lines=True)) from error

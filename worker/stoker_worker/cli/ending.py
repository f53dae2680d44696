"""Ends the commands of `stoker-worker`: an error that an operator can mend is one line, and a stop is quiet."""

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
    """Ignore signals from the end of the context on. Python's exit restores the default handlers: a late signal would
    make a clean stop look like a crash."""
    try:
        yield
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)


@contextmanager
def cleaned_up_when_terminated() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the process as Ctrl-C does, so that the command cleans up. A signal that is ignored,
    as SIGHUP is under `nohup`, stays ignored. Main thread."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {signum: handler for signum in signals if (handler := signal.getsignal(signum)) != signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turn an error that an operator can mend into one line; any other is a bug and keeps its traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.ClickException(MISSING.format(error.name)) from error
    except (StokerError, PermissionError) as error:
        raise click.ClickException(printable(f"{type(error).__name__}: {error}", lines=True)) from error

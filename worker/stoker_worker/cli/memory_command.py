"""Makes one command of `stoker-worker memory`: the common options, the handling of errors, the output as JSON.

With ``--json``, stdout is exactly one JSON value, also for an error: ``{"error": {"type": …, "message": …}}``. (A list
of agents is printed while it is read: an error in its midst cuts it off.) Exit codes: 0 done, 1 failed or `verify`
found a problem, 2 wrong usage.
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from stoker_shared.environment import require_known_variables
from stoker_shared.errors import StokerError
from stoker_shared.text import printable

_MISSING = "the worker's packages are missing ({}); install them with: pip install 'stoker[worker]'"


def command(run: Callable[..., None]) -> click.Command:
    """A command with the two common options and the handling of errors."""

    @functools.wraps(run)
    def reporting(as_json: bool, store: Path, **options: Any) -> None:
        try:
            require_known_variables()
        except ValueError as error:  # with a misspelt STOKER_STORE it would open another store
            raise click.UsageError(str(error)) from None
        try:
            run(store=store.expanduser(), as_json=as_json, **options)
        except BrokenPipeError:  # as of `head`; click ends quietly
            raise
        except (StokerError, OSError, ModuleNotFoundError) as error:
            message = _MISSING.format(error.name) if isinstance(error, ModuleNotFoundError) else str(error)
            if not as_json:
                raise click.ClickException(printable(f"{type(error).__name__}: {message}", lines=True)) from error
            click.echo(json.dumps({"error": {"type": type(error).__name__, "message": message}}))
            sys.exit(1)

    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else."),
        click.option("--store", type=click.Path(path_type=Path), default="~/.stoker", envvar="STOKER_STORE",
                     show_default=True, show_envvar=True, help="Folder of the agents' memory."),
    ):  # fmt: skip
        reporting = option(reporting)
    name = run.__name__.rstrip("_")
    return click.command(name=name)(reporting)


def say(as_json: bool, values: dict[str, Any], words: str) -> None:
    """Print the result of a command: `values` as JSON, or `words`."""
    click.echo(json.dumps(values) if as_json else printable(words, lines=True))

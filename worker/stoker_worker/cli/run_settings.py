"""The settings from a command's options, and what is wrong with them in one line. Reads; starts nothing."""

from typing import TYPE_CHECKING, Any

import click
from pydantic import ValidationError

if TYPE_CHECKING:
    from stoker_worker.settings import SettingsInForce, WorkerSettings


def settings_from(options: dict[str, Any]) -> "WorkerSettings":
    """As `settings_of`, for a worker that is to be started.

    Raises:
        click.UsageError: as `settings_of`; or there is no model.
    """
    settings = settings_of(options).settings
    if settings.model is None and settings.engine == "mlx":
        raise click.UsageError("--model is missing (or --engine scripted); `stoker-worker config` shows what is set")
    return settings


def settings_of(options: dict[str, Any]) -> "SettingsInForce":
    """
    Args:
        options: of `run`, by parameter name; ``None`` for one that was not given.

    Raises:
        click.UsageError: one is not valid, a ``STOKER_*`` variable or a name in the file is unknown.
    """
    from stoker_worker.settings import settings_in_force

    try:
        return settings_in_force(options)
    except ValidationError as error:
        problems = "; ".join(": ".join([*map(str, e["loc"]), e["msg"]]) for e in error.errors())
        raise click.UsageError(problems) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error

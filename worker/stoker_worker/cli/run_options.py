"""The options of `stoker-worker run` and `config`: made from the settings, and read into them."""

from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import click
from pydantic import ValidationError

from stoker_shared.help_layout import LaidOutCommand, options_under
from stoker_worker.cli.ending import errors_in_one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic.fields import FieldInfo

    from stoker_worker.settings import Option, WorkerSettings


class SettingsCommand(LaidOutCommand):
    """A command whose options are the settings. They are made on demand, because the settings' module loads packages
    that other commands do not need."""

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        with errors_in_one_line():
            return [*_setting_options(), *super().get_params(context)]


@cache
def _setting_options() -> list[click.Parameter]:
    from stoker_worker.settings import Option, WorkerSettings

    @click.command
    def holder() -> None: ...

    for name, field in WorkerSettings.model_fields.items():
        for option in field.metadata:
            if isinstance(option, Option):
                _decorator(name, field, option)(holder)
    return holder.params


def _decorator(name: str, field: "FieldInfo", option: "Option") -> Any:
    names = option.names or (f"--{name.replace('_', '-')}",)
    attributes: dict[str, Any] = {"help": option.help, "default": None, "metavar": option.metavar}
    if option.is_repeatable:
        attributes |= {"multiple": True, "callback": _joined}
    elif field.annotation is bool:
        attributes["is_flag"] = True
    else:
        attributes["type"] = _type_of(field)
    return options_under(option.heading)(*names, name, **attributes)


def _joined(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
    return ",".join(values) or None


def _type_of(field: "FieldInfo") -> Any:
    kind = field.annotation
    if get_origin(kind) in (Union, UnionType):  # `X | None`
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return click.Choice([str(choice) for choice in get_args(kind)])
    bounds: dict[str, Any] = {}
    for constraint in field.metadata:
        bounds |= {name: getattr(constraint, name) for name in ("ge", "gt", "le") if hasattr(constraint, name)}
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le")
    if kind is int:
        return click.IntRange(low, high)
    if kind is float:
        return click.FloatRange(low, high, min_open="gt" in bounds)
    return click.Path(path_type=Path) if kind is Path else str


def settings_from(options: dict[str, Any]) -> "WorkerSettings":
    """As `settings_of`, for a worker that is to be started. Raises `click.UsageError` also if there is no model."""
    settings, _ = settings_of(options)
    if settings.model is None and settings.engine == "mlx":
        raise click.UsageError("--model is missing (or --engine scripted); `stoker-worker config` shows what is set")
    return settings


def settings_of(options: dict[str, Any]) -> "tuple[WorkerSettings, Mapping[str, str]]":
    """As `settings_in_force`, from the options of `run` by parameter name; its errors become `click.UsageError`."""
    from stoker_worker.settings import settings_in_force

    try:
        return settings_in_force(options)
    except ValidationError as error:
        problems = "; ".join(": ".join([*map(str, e["loc"]), e["msg"]]) for e in error.errors())
        raise click.UsageError(problems) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error

"""`stoker-worker config`: prints the settings in force and where each comes from. Options and output only."""

import json
import re
from typing import Any

import click

from stoker_shared.help_layout import examples, options_under
from stoker_worker.cli.ending import errors_in_one_line
from stoker_worker.cli.run_options import SettingsCommand, settings_of


@click.command(
    cls=SettingsCommand,
    epilog=examples(
        "stoker-worker config",
        "stoker-worker config --config worker.toml --max-batch 8    # as `run` would start with them",
    ),
)
@options_under("Output")("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def config(context: click.Context, /, as_json: bool, **options: Any) -> None:
    """Print all settings that `run` would have, and whether an option, a variable or the file set them."""
    with errors_in_one_line():
        settings, origins = settings_of(options)
    values = {name: _as_text(value) for name, value in settings.shown().items()}
    if as_json:
        click.echo(json.dumps({name: {"value": values[name], "from": origins[name]} for name in values}))
        return
    defaults = {option.name: _default_as_read(option) for option in context.command.get_params(context)}
    rows = [
        (name, defaults.get(name, "") or "-" if value in {None, ""} else str(value), origins[name])
        for name, value in values.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        click.echo(f"{name.ljust(widths[0])}  {value.ljust(widths[1])}  {origin}".rstrip())


def _as_text(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _default_as_read(option: click.Parameter) -> str:
    """The default in the option's help; empty if it has none."""
    found = re.search(r"\[([^]]*)\]$", getattr(option, "help", None) or "")
    return found[1] if found else ""

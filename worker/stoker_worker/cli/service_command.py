"""`stoker-worker service`: the worker as a service of this user. Options and output only."""

import os
import re
import sys
from typing import TYPE_CHECKING

import click

from stoker_shared.help_layout import LaidOutGroup, examples
from stoker_worker.cli.ending import errors_in_one_line
from stoker_worker.cli.run_settings import settings_from

if TYPE_CHECKING:
    from stoker_worker.service.manager import ServiceManager


def _checked_name(context: click.Context, parameter: click.Parameter, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise click.BadParameter("must be letters, digits, - _ .")
    return name


_name = click.option(
    "--name", default="stoker-worker", show_default=True, callback=_checked_name,
    help="Of the service: another one for a second worker.",
)  # fmt: skip


@click.group(
    cls=LaidOutGroup,
    sections={"Service": ("install", "uninstall", "status", "logs")},
    epilog=examples(
        "stoker-worker service install --print -- --model mlx-community/Qwen3-4B-4bit --redis embedded",
        "stoker-worker service install -- --model mlx-community/Qwen3-4B-4bit --redis embedded",
        "stoker-worker service logs --follow",
    ),
)
def service() -> None:
    """Run the worker as a service: launchd on a Mac, systemd on Linux."""


@service.command()
@_name
@click.option("--print", "only_print", is_flag=True, help="Print the service's file and change nothing.")
@click.argument("run_options", metavar="-- [OPTIONS OF run]", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def install(context: click.Context, name: str, only_print: bool, run_options: tuple[str, ...]) -> None:
    """Install and start the service; repeat it to change the options.

    It runs `stoker-worker run` with these options, in this folder, with the variables PATH, PYTHONPATH, STOKER_* and
    HF_* of now. A worker that crashes is started again; one that was told to stop is not.
    """
    from stoker_worker.service.here import manager_here
    from stoker_worker.service.unit import worker_unit

    group = context.find_root().command
    assert isinstance(group, click.Group)
    with errors_in_one_line():
        with group.commands["run"].make_context("run", list(run_options)) as run_context:
            settings = settings_from(run_context.params)
        unit = worker_unit(name, run_options, grace_s=settings.grace_s)
        if only_print:
            click.echo(manager_here().text(unit), nl=False)
        else:
            manager_here().install(unit, click.echo)


@service.command()
@_name
def uninstall(name: str) -> None:
    """Stop the service, its running jobs first, and remove it. The store stays."""
    from stoker_worker.service.here import manager_here

    manager = manager_here()
    with errors_in_one_line():
        if _is_installed(manager, name):
            manager.uninstall(name, click.echo)


@service.command()
@_name
def status(name: str) -> None:
    """Whether it runs: exit code 0; 3 if it does not, 4 if it is not installed."""
    from stoker_worker.service.here import manager_here
    from stoker_worker.service.manager import NOT_INSTALLED

    manager = manager_here()
    with errors_in_one_line():
        code = manager.status(name, click.echo) if _is_installed(manager, name) else NOT_INSTALLED
    sys.exit(code)


@service.command()
@_name
@click.option("-n", "--lines", type=click.IntRange(min=0), default=100, show_default=True, help="So many last ones.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until Ctrl-C.")
def logs(name: str, lines: int, follow: bool) -> None:
    """Print the end of the service's log."""
    from stoker_worker.service.here import manager_here

    with errors_in_one_line():
        command = manager_here().logs_command(name, lines=lines, follow=follow)
    os.execvp(command[0], command)


def _is_installed(manager: "ServiceManager", name: str) -> bool:
    if manager.path(name).exists():
        return True
    click.echo(f"{name} is not installed")
    return False

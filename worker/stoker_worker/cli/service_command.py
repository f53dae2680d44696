"""`stoker-worker service`: the worker as a service of this user. Options and output only."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from stoker_shared.help_layout import LaidOutGroup, examples
from stoker_worker.cli.ending import errors_in_one_line
from stoker_worker.cli.run_options import settings_from


def _checked_name(context: click.Context, parameter: click.Parameter, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise click.BadParameter("must be letters, digits, - _ .")
    return name


@contextmanager
def _refused_in_one_line() -> Iterator[None]:
    """As `errors_in_one_line`, also for a folder that cannot be written: some installers make LaunchAgents as root."""
    from stoker_worker.service import ServiceRefused

    with errors_in_one_line():
        try:
            yield
        except OSError as error:
            raise ServiceRefused(str(error)) from error


def _say(line: str) -> None:
    """Print a line about a step. `head` may have ended and closed the pipe: the steps go on without their lines."""
    try:
        click.echo(line)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_name = click.option(
    "--name", default="stoker-worker", show_default=True, callback=_checked_name,
    help="Name of the service; a second worker needs another one.",
)  # fmt: skip


@click.group(
    cls=LaidOutGroup,
    sections={"Service": ("install", "uninstall", "logs")},
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
def install(context: click.Context, /, *, name: str, only_print: bool, run_options: tuple[str, ...]) -> None:
    """Install and start the service; repeat it to change the options.

    It runs `stoker-worker run` with these options, in this folder, with the variables HOME, PATH, PYTHONPATH,
    XDG_CACHE_HOME, STOKER_*, HF_*, AWS_* and those of proxies and certificates, as they are now. A worker that crashes
    is started again; one that was told to stop is not.
    """
    from stoker_worker.service import manager_here, worker_unit

    group = context.find_root().command
    assert isinstance(group, click.Group)
    with _refused_in_one_line():
        with group.commands["run"].make_context("run", list(run_options)) as run_context:
            settings = settings_from(run_context.params)
        manager, unit = manager_here(), worker_unit(name, run_options, grace_s=settings.grace_s)
        if only_print:
            click.echo(manager.text(unit), nl=False)
        else:
            manager.install(unit, _say)
            if "AWS_SESSION_TOKEN" in unit.environment:
                click.echo("AWS_SESSION_TOKEN will expire, and the service with it: use a key that lasts", err=True)


@service.command()
@_name
def uninstall(name: str) -> None:
    """Stop the service, its running jobs first, and remove it. The store stays."""
    from stoker_worker.service import manager_here

    manager = manager_here()
    with _refused_in_one_line():
        if manager.path(name).exists():
            manager.uninstall(name, _say)
        else:
            click.echo(f"{name} is not installed")


@service.command()
@_name
@click.option("-n", "--lines", type=click.IntRange(min=0), default=100, show_default=True, help="How many last lines.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until Ctrl-C.")
def logs(name: str, lines: int, follow: bool) -> None:
    """Print the end of the service's log."""
    from stoker_worker.service import manager_here

    with errors_in_one_line():
        command = manager_here().logs_command(name, lines=lines, follow=follow)
    os.execvp(command[0], command)

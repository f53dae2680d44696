"""`stoker-worker service`: the worker as a service of this user or this machine. Options and output only."""

import os
import re
from typing import TYPE_CHECKING

import click

from stoker_shared.help_layout import LaidOutGroup, examples
from stoker_worker.cli.ending import errors_in_one_line
from stoker_worker.cli.run_options import settings_from

if TYPE_CHECKING:
    from stoker_worker.service import ServiceManager


def _checked_name(context: click.Context, parameter: click.Parameter, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise click.BadParameter("must be letters, digits, - _ .")
    return name


_name = click.option(
    "--name", default="stoker-worker", show_default=True, callback=_checked_name,
    help="Name of the service; a second worker needs another one.",
)  # fmt: skip
_system = click.option(
    "--system", "is_system", is_flag=True,
    help="A service of the machine: it runs from boot on, without a login. Needs root.",
)  # fmt: skip


@click.group(
    cls=LaidOutGroup,
    sections={"Service": ("install", "uninstall", "logs")},
    epilog=examples(
        "stoker-worker service install --print -- --model mlx-community/Qwen3-4B-4bit --redis embedded",
        "stoker-worker service install -- --model mlx-community/Qwen3-4B-4bit --redis embedded",
        "sudo stoker-worker service install --system -- --model ~/models/mine --redis embedded    # from boot on",
        "stoker-worker service logs --follow",
    ),
)
def service() -> None:
    """Run the worker as a service: launchd on a Mac, systemd on Linux."""


@service.command()
@_name
@_system
@click.option("--user", metavar="NAME", help="User that a --system service runs as.  [who calls sudo]")
@click.option("--print", "only_print", is_flag=True, help="Print the service's file and change nothing.")
@click.argument("run_options", metavar="-- [OPTIONS OF run]", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def install(
    context: click.Context,
    /,
    *,
    name: str,
    is_system: bool,
    user: str | None,
    only_print: bool,
    run_options: tuple[str, ...],
) -> None:
    """Install and start the service; repeat it to change the options.

    It runs `stoker-worker run` with these options, in this folder, with the variables PATH, PYTHONPATH, STOKER_* and
    HF_* of now. A worker that crashes is started again; one that was told to stop is not. A Redis URL with a password
    goes into a file of its own.
    """
    from stoker_worker.service import account_of, manager_here, require_root, worker_unit

    group = context.find_root().command
    assert isinstance(group, click.Group)
    if user is not None and not is_system:
        raise click.UsageError("--user is of a --system service; another one runs as its own user")
    with errors_in_one_line():
        account = account_of(user) if is_system else None
        manager = manager_here(is_system=is_system)
        if account is not None:  # `~` and the file of settings are the worker's, not root's
            os.environ["HOME"] = account.pw_dir
        with group.commands["run"].make_context("run", list(run_options)) as run_context:
            settings = settings_from(run_context.params)
        url_file = manager.redis_url_file(name)
        unit = worker_unit(name, run_options, url_file, grace_s=settings.grace_s, account=account)
        if only_print:
            click.echo(manager.text(unit), nl=False)
            return
        if is_system:
            require_root()
        manager.install(unit, click.echo)
        if unit.redis_url:
            click.echo(f"the Redis URL with its password is in {url_file}")
        if is_system and "HF_TOKEN" in os.environ:
            click.echo("HF_TOKEN is left out, because every user could read it: use `hf auth login` as that user")


@service.command()
@_name
@_system
def uninstall(name: str, is_system: bool) -> None:
    """Stop the service, its running jobs first, and remove it. The store stays."""
    from stoker_worker.service import manager_here, require_root

    manager = manager_here(is_system=is_system)
    with errors_in_one_line():
        if is_system:
            require_root()
        if _is_installed(manager, name):
            manager.uninstall(name, click.echo)


@service.command()
@_name
@_system
@click.option("-n", "--lines", type=click.IntRange(min=0), default=100, show_default=True, help="So many last ones.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until Ctrl-C.")
def logs(name: str, is_system: bool, lines: int, follow: bool) -> None:
    """Print the end of the service's log."""
    from stoker_worker.service import manager_here

    with errors_in_one_line():
        command = manager_here(is_system=is_system).logs_command(name, lines=lines, follow=follow)
    os.execvp(command[0], command)


def _is_installed(manager: "ServiceManager", name: str) -> bool:
    if manager.path(name).exists():
        return True
    click.echo(f"{name} is not installed")
    return False

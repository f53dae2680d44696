"""`stoker-worker memory`: look at agents' memory from a shell, and tidy it. Words only; the logic is in `memory/`.

With ``--json``, stdout is exactly one JSON value, also for an error: ``{"error": {"type": …, "message": …}}``. Exit
codes: 0 done, 1 it could not be done or `verify` found something, 2 the command is wrong.
"""

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker_shared.environment import require_known_variables
from stoker_shared.errors import AgentNotFound, StokerError
from stoker_shared.help_layout import LaidOutGroup

if TYPE_CHECKING:
    from stoker_worker.memory.access import StoreAccess
    from stoker_worker.memory.census import AgentEntry

_MISSING = "the worker's packages are missing ({}); install them with: pip install 'stoker[worker]'"


def _command(run: Callable[..., None]) -> click.Command:
    """A command of the group, with its two options and its way to fail."""

    @functools.wraps(run)
    def reporting(as_json: bool, store: Path, **options: Any) -> None:
        try:
            require_known_variables()
        except ValueError as error:  # with a misspelt STOKER_STORE it would look at another store
            raise click.UsageError(str(error)) from None
        try:
            run(store=store.expanduser(), as_json=as_json, **options)
        except (StokerError, OSError, ModuleNotFoundError) as error:
            message = _MISSING.format(error.name) if isinstance(error, ModuleNotFoundError) else str(error)
            if not as_json:
                raise click.ClickException(f"{type(error).__name__}: {message}") from error
            click.echo(json.dumps({"error": {"type": type(error).__name__, "message": message}}))
            sys.exit(1)

    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else."),
        click.option("--store", type=click.Path(path_type=Path), default="~/.stoker", envvar="STOKER_STORE",
                     show_default=True, show_envvar=True, help="Folder of the agents' memory."),
    ):  # fmt: skip
        reporting = option(reporting)
    name = run.__name__.rstrip("_")
    return memory.command(name=name)(reporting)


@click.group(
    cls=LaidOutGroup,
    sections={
        "Look, also beside a running worker": ("ls", "show", "verify"),
        "Change, with the worker stopped": ("fork", "rollback", "rm", "export", "import", "gc"),
    },
)
def memory() -> None:
    """Look at the agents' memory, and tidy it."""


@_command
def ls(store: Path, as_json: bool) -> None:
    """List every agent: its newest version, its size, when it was used, whether it can be read."""
    from stoker_worker.memory.access import look_at
    from stoker_worker.memory.census import take_census, users_of
    from stoker_worker.memory.summary import AgentSummary

    entries = take_census(look_at(store))
    users = users_of(entries)
    agents = [AgentSummary.of(entry, users) for entry in entries]
    if as_json:
        click.echo(json.dumps([asdict(agent) for agent in agents]))
    else:
        from stoker_worker.memory_tables import print_agents

        print_agents(agents)


@_command
@click.argument("agent")
@click.option("--text", is_flag=True, help="The conversation too.")
def show(store: Path, as_json: bool, agent: str, text: bool) -> None:
    """Show AGENT: its versions, and with --text its conversation."""
    from stoker_worker.memory.access import look_at
    from stoker_worker.memory.census import take_census, users_of
    from stoker_worker.memory.summary import AgentSummary, versions_of

    access = look_at(store)
    entries = take_census(access)
    entry = _entry_of(access, entries, agent)
    summary, versions = AgentSummary.of(entry, users_of(entries)), versions_of(access, entry)
    transcript = entry.state.version.transcript
    if as_json:
        shown: dict[str, Any] = {"agent": asdict(summary), "versions": [asdict(version) for version in versions]}
        if text:
            messages = transcript.messages if transcript else None
            said = None if messages is None else [message.as_template_input() for message in messages]
            shown |= {"messages": said, "text": transcript.text if transcript else None}
        click.echo(json.dumps(shown))
        return
    from stoker_worker.memory_tables import print_agents, print_conversation, print_versions

    print_agents([summary])
    click.echo()
    print_versions(versions)
    if text:
        print_conversation(transcript)


@_command
def verify(store: Path, as_json: bool) -> None:
    """Read all of the store and name what is not as it was written."""
    from stoker_worker.memory.access import look_at

    problems = look_at(store).verify()
    _say(as_json, {"problems": problems}, "\n".join(problems) or "everything is as it was written")
    if problems:
        sys.exit(1)


@_command
@click.option("--dry-run", is_flag=True, help="Only name what would be removed.")
def gc(store: Path, as_json: bool, dry_run: bool) -> None:
    """Remove blocks that no agent uses, and files that a crash left."""
    from stoker_worker.memory.access import hold
    from stoker_worker.memory.gc import collect

    with hold(store, clear=False) as access:
        found = collect(access, dry_run=dry_run)
    for folder in () if as_json else found.unreadable:
        click.echo(f"{folder} cannot be read: what it used counts as unused, and is computed again", err=True)
    verb = "would remove" if dry_run else "removed"
    words = (
        f"{verb} {found.blocks} blocks ({found.block_bytes} bytes)"
        f" and {found.temp_files} temp files ({found.temp_bytes} bytes)"
    )
    _say(as_json, asdict(found) | {"unreadable": [str(x) for x in found.unreadable], "dry_run": dry_run}, words)


@_command
@click.argument("agent")
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm(store: Path, as_json: bool, agent: str, yes: bool) -> None:
    """Forget AGENT: its conversation, and every block that only it used."""
    from stoker_worker.memory.access import hold, look_at
    from stoker_worker.memory.removal import remove_agent

    if as_json and not yes:
        raise click.UsageError("--json needs --yes")
    if not look_at(store).agent(agent).path.is_dir():
        raise AgentNotFound(f"there is no agent {agent!r}")
    if not yes:  # asked without the lock: a worker may start meanwhile
        click.confirm(f"Remove agent {agent!r} and its conversation for good?", abort=True, err=True)
    with hold(store) as access:
        removed = remove_agent(access, agent)
    words = f"removed {agent!r} and {removed.blocks} blocks ({removed.block_bytes} bytes)"
    shared = f"; {removed.shared_blocks} more are in use by others" if removed.shared_blocks else ""
    _say(as_json, {"agent_id": agent, **asdict(removed)}, words + shared)


@_command
@click.argument("agent")
@click.argument("new_agent")
def fork(store: Path, as_json: bool, agent: str, new_agent: str) -> None:
    """Make NEW_AGENT, which goes on from where AGENT is.

    It has AGENT's conversation and its cache. It has none of the jobs' results: those jobs were AGENT's.
    """
    from stoker_worker.memory.access import hold
    from stoker_worker.memory.fork import fork_agent

    with hold(store) as access:
        made = fork_agent(access, agent, new_agent)
    words = f"{new_agent!r} goes on from {agent!r}: {made.tokens} tokens, without the results of its jobs"
    values = {"agent_id": new_agent, "forked_from": agent, "version": made.version, "tokens": made.tokens}
    _say(as_json, values, words)


@_command
@click.argument("agent")
@click.option("--to", "version", type=click.IntRange(1), help="Which version, else the one before the newest.")
def rollback(store: Path, as_json: bool, agent: str, version: int | None) -> None:
    """Take AGENT back to an earlier version: that becomes its newest one.

    Nothing is lost: this is a version of its own, and the one it leaves can be gone back to likewise.
    """
    from stoker_worker.memory.access import hold
    from stoker_worker.memory.rollback import roll_back

    with hold(store) as access:
        back = roll_back(access, agent, version)
    words = f"{agent!r} is at version {back.version}, as it was at version {back.to_version}: {back.tokens} tokens"
    _say(as_json, back.model_dump(mode="json", exclude={"job_id", "action"}), words)


@_command
@click.argument("agent")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--with-blocks", is_flag=True, help="Also its cache, so that nothing has to be computed again.")
def export(store: Path, as_json: bool, agent: str, file: Path, with_blocks: bool) -> None:
    """Write AGENT into a new FILE: conversation, results, tail, snapshots."""
    from stoker_worker.memory.access import hold
    from stoker_worker.memory.export import export_agent

    with hold(store) as access:
        done = export_agent(access, agent, file, with_blocks=with_blocks)
    words = f"{file}: {agent!r} at version {done.version}, {done.blocks} blocks, {done.n_bytes} bytes"
    _say(as_json, {"agent_id": agent, "file": str(file), **asdict(done)}, words)


@_command
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--as", "new_id", metavar="NEWID", help="Another id than the one in the file.")
@click.option("--with-blocks", is_flag=True, help="Take its blocks too. Agents share blocks: only from who you trust.")
def import_(store: Path, as_json: bool, file: Path, new_id: str | None, with_blocks: bool) -> None:
    """Take the agent in FILE into the store."""
    from stoker_worker.memory.access import hold
    from stoker_worker.memory.importer import import_agent

    with hold(store) as access:
        done = import_agent(access, file, new_id=new_id, with_blocks=with_blocks)
    left_out = f"; {done.blocks_left_out} in the file were not taken (--with-blocks)" if done.blocks_left_out else ""
    _say(as_json, asdict(done), f"{done.agent_id!r} at version {done.version}, {done.blocks} new blocks{left_out}")


def _entry_of(access: "StoreAccess", entries: "list[AgentEntry]", agent_id: str) -> "AgentEntry":
    """Also an agent whose own records do not say any more who it is."""
    folder = access.agent(agent_id).path
    for entry in entries:
        if entry.folder == folder:
            return entry
    raise AgentNotFound(f"there is no agent {agent_id!r}")


def _say(as_json: bool, values: dict[str, Any], words: str) -> None:
    click.echo(json.dumps(values) if as_json else words)

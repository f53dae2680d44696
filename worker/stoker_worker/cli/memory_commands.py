"""`stoker-worker memory`: inspect and tidy agents' memory from a shell. Options and output only.

With ``--json``, stdout is exactly one JSON value, also for an error: ``{"error": {"type": …, "message": …}}``. Exit
codes: 0 done, 1 failed or `verify` found a problem, 2 wrong usage.
"""

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from stoker_shared.environment import require_known_variables
from stoker_shared.errors import AgentNotFound, StokerError
from stoker_shared.help_layout import LaidOutGroup

_MISSING = "the worker's packages are missing ({}); install them with: pip install 'stoker[worker]'"


def _command(run: Callable[..., None]) -> click.Command:
    """Add a command to the group, with the two common options and the handling of errors."""

    @functools.wraps(run)
    def reporting(as_json: bool, store: Path, **options: Any) -> None:
        try:
            require_known_variables()
        except ValueError as error:  # with a misspelt STOKER_STORE it would open another store
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
        "Read, also beside a running worker": ("ls", "show", "verify"),
        "Change, with the worker stopped": ("fork", "rollback", "rm", "export", "import", "gc"),
    },
)
def memory() -> None:
    """Inspect and tidy the agents' memory."""


@_command
def ls(store: Path, as_json: bool) -> None:
    """List every agent: newest version, size, last use, state."""
    from stoker_worker.memory.access import look_at
    from stoker_worker.memory.agent_index import read_agent_index, users_of
    from stoker_worker.memory.summary import AgentSummary

    entries = read_agent_index(look_at(store))
    users = users_of(entries)
    agents = [AgentSummary.of(entry, users) for entry in entries]
    if as_json:
        click.echo(json.dumps([asdict(agent) for agent in agents]))
    else:
        from stoker_worker.cli.memory_tables import print_agents

        print_agents(agents)


@_command
@click.argument("agent")
@click.option("--text", is_flag=True, help="The conversation too.")
def show(store: Path, as_json: bool, agent: str, text: bool) -> None:
    """Show AGENT and its versions; with --text, its conversation too."""
    from stoker_worker.memory.access import look_at
    from stoker_worker.memory.agent_index import read_agent_index, users_of
    from stoker_worker.memory.summary import AgentSummary, versions_of

    access = look_at(store)
    entries = read_agent_index(access)
    folder = access.agent(agent).path  # its name is enough for an agent without a readable record
    entry = next((entry for entry in entries if entry.folder == folder), None)
    if entry is None:
        raise AgentNotFound(f"there is no agent {agent!r}")
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
    from stoker_worker.cli.memory_tables import print_agents, print_conversation, print_versions

    print_agents([summary])
    click.echo()
    print_versions(versions)
    if text:
        print_conversation(transcript)


@_command
def verify(store: Path, as_json: bool) -> None:
    """Read the whole store and list every file that is damaged or out of place."""
    from stoker_worker.memory.access import look_at

    problems = look_at(store).verify()
    _say(as_json, {"problems": problems}, "\n".join(problems) or "everything is as it was written")
    if problems:
        sys.exit(1)


@_command
@click.option("--dry-run", is_flag=True, help="Only count what would be removed.")
def gc(store: Path, as_json: bool, dry_run: bool) -> None:
    """Remove blocks that no agent uses, and the leftovers of crashes."""
    from stoker_worker.memory.access import hold
    from stoker_worker.memory.gc import collect

    with hold(store, clear=False) as access:
        found = collect(access, dry_run=dry_run)
    for folder in () if as_json else found.unreadable:
        click.echo(f"{folder} cannot be read: its blocks count as unused, and are computed again", err=True)
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
    """Remove AGENT: its conversation, and every block that only it used."""
    from stoker_worker.memory.access import hold, look_at
    from stoker_worker.memory.gc import remove_agent

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
    """Make NEW_AGENT, which continues from AGENT.

    It gets AGENT's conversation and cache, but not the results of AGENT's jobs.
    """
    from stoker_worker.memory.access import hold
    from stoker_worker.memory.fork import fork_agent

    with hold(store) as access:
        made = fork_agent(access, agent, new_agent)
    words = f"{new_agent!r} continues from {agent!r}: {made.tokens} tokens, without the results of its jobs"
    values = {"agent_id": new_agent, "forked_from": agent, "version": made.version, "tokens": made.tokens}
    _say(as_json, values, words)


@_command
@click.argument("agent")
@click.option("--to", "version", type=click.IntRange(1), help="Which version; default: the one before the newest.")
def rollback(store: Path, as_json: bool, agent: str, version: int | None) -> None:
    """Take AGENT back to an earlier version, as its next version.

    Nothing is lost: another rollback can return to the version before this one.
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
@click.option("--with-blocks", is_flag=True, help="Its blocks too, so that nothing is computed again.")
def export(store: Path, as_json: bool, agent: str, file: Path, with_blocks: bool) -> None:
    """Write AGENT to a new FILE: conversation, results, tail, snapshots."""
    from stoker_worker.memory.access import hold
    from stoker_worker.memory.archive import export_agent

    with hold(store) as access:
        done = export_agent(access, agent, file, with_blocks=with_blocks)
    words = f"{file}: {agent!r} at version {done.version}, {done.blocks} blocks, {done.n_bytes} bytes"
    _say(as_json, {"agent_id": agent, "file": str(file), **asdict(done)}, words)


@_command
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--as", "new_id", metavar="NEWID", help="Import it under this id.")
@click.option("--with-blocks", is_flag=True, help="Its blocks too. Agents share them: trust the source.")
def import_(store: Path, as_json: bool, file: Path, new_id: str | None, with_blocks: bool) -> None:
    """Import the agent in FILE."""
    from stoker_worker.memory.access import hold
    from stoker_worker.memory.importer import import_agent

    with hold(store) as access:
        done = import_agent(access, file, new_id=new_id, with_blocks=with_blocks)
    left_out = f"; {done.blocks_left_out} in the file were not imported (--with-blocks)" if done.blocks_left_out else ""
    _say(as_json, asdict(done), f"{done.agent_id!r} at version {done.version}, {done.blocks} new blocks{left_out}")


def _say(as_json: bool, values: dict[str, Any], words: str) -> None:
    click.echo(json.dumps(values) if as_json else words)

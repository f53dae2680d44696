"""`stoker-worker memory`: inspect and tidy agents' memory from a shell. The group, and the commands that change agents.

Options and output only; `memory_command` handles what all commands have in common.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

from stoker_shared.errors import AgentNotFound, SharedStoreAway
from stoker_shared.help_layout import LaidOutGroup
from stoker_shared.text import seconds_of
from stoker_worker.cli.memory_command import command, say
from stoker_worker.cli.memory_reading import ls, show, verify
from stoker_worker.cli.memory_transfer import export, import_
from stoker_worker.cli.rescue_commands import backup, restore, salvage

_TELL_S: Final = 2.0
"""Between two lines about how far a command has come."""

_waiting = click.option("--wait", is_flag=True, help="Wait until no job of the agent runs, instead of refusing.")


@command
@click.option("--dry-run", is_flag=True, help="Only count what would be removed.")
@click.option("--shared", "url", metavar="URL", help="Of this shared store, instead of the store of this machine.")
@click.option("--max-bytes", type=click.IntRange(min=0), help="With --shared: what may be left of caches.")
@click.option("--unused-for", metavar="DURATION", help="With --shared: caches of agents unused for so long: 30d, 12h.")
def gc(
    store: Path, as_json: bool, dry_run: bool, *, url: str | None, max_bytes: int | None, unused_for: str | None
) -> None:
    """Remove blocks that no agent uses, and the leftovers of crashes.

    Beside a running worker, blocks and files younger than 10 minutes stay; in a shared store those younger than a day.
    """
    would = "would remove" if dry_run else "removed"
    if url is not None:
        _gc_there(url, as_json, would, max_bytes=max_bytes, unused_for=unused_for)
        return
    if max_bytes is not None or unused_for is not None:
        raise click.UsageError("--max-bytes and --unused-for need --shared")
    from stoker_worker.memory.admin.gc import collect
    from stoker_worker.memory.store_parts import opened

    with opened(store) as parts:
        found = collect(parts, dry_run=dry_run)
    words = (
        f"{would} {found.blocks} unused blocks ({found.block_bytes} bytes),"
        f" {found.orphans} files that belong to no agent ({found.orphan_bytes} bytes)"
        f" and {found.temp_files} temp files ({found.temp_bytes} bytes)"
    )
    say(as_json, asdict(found) | {"dry_run": dry_run}, words)


def _gc_there(url: str, as_json: bool, would: str, *, max_bytes: int | None, unused_for: str | None) -> None:
    from stoker_worker.memory.replica.bucket import Bucket, BucketAway
    from stoker_worker.memory.replica.collecting import collect_there

    try:
        unused_s = None if unused_for is None else seconds_of(unused_for)
    except ValueError as error:
        raise click.UsageError(f"--unused-for: {error}") from None
    dry_run = would != "removed"
    try:
        found = collect_there(Bucket(url), max_bytes=max_bytes, unused_s=unused_s, dry_run=dry_run)
    except BucketAway as error:
        raise SharedStoreAway(str(error)) from error
    words = (
        f"{would} {found.files} files ({found.bytes} bytes), with the caches of {found.agents} agents;"
        f" {found.left_bytes} bytes of caches are left"
    )
    say(as_json, asdict(found) | {"dry_run": dry_run}, words)


@command
@click.argument("agent")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_waiting
def rm(store: Path, as_json: bool, agent: str, yes: bool, wait: bool) -> None:
    """Remove AGENT: its conversation, and every block that only it used."""
    from stoker_worker.memory.agent_changes import exists, forget_agent
    from stoker_worker.memory.locks import working_on
    from stoker_worker.memory.replica.shared_replica import opened_with_shared

    if as_json and not yes:
        raise click.UsageError("--json needs --yes")
    with opened_with_shared(store) as (parts, look):
        look(agent)
        if not exists(parts, agent):
            raise AgentNotFound(f"there is no agent {agent!r}")
        if not yes:
            click.confirm(f"Remove agent {agent!r} and its conversation for good?", abort=True, err=True)
        with working_on(store, agent, wait=wait):
            look(agent)
            removed = forget_agent(parts, agent)
    if not removed.existed:  # any more
        raise AgentNotFound(f"there is no agent {agent!r}")
    words = f"removed {agent!r} and {removed.blocks} blocks ({removed.block_bytes} bytes)"
    shared = f"; {removed.shared_blocks} more are in use by others" if removed.shared_blocks else ""
    say(as_json, removed.model_dump(include={"agent_id", "blocks", "block_bytes", "shared_blocks"}), words + shared)


@command
@click.argument("agent")
@click.argument("new_agent")
@_waiting
def fork(store: Path, as_json: bool, agent: str, new_agent: str, wait: bool) -> None:
    """Make NEW_AGENT, which continues from AGENT.

    It gets AGENT's conversation and cache, but not the results of AGENT's jobs.
    """
    from stoker_worker.memory.agent_changes import fork_agent
    from stoker_worker.memory.locks import working_on
    from stoker_worker.memory.replica.shared_replica import opened_with_shared

    with opened_with_shared(store) as (parts, look), working_on(store, new_agent, wait=wait):
        look(agent)
        look(new_agent)
        made = fork_agent(parts, agent, new_agent)
    words = f"{new_agent!r} continues from {agent!r}: {made.tokens} tokens, without the results of its jobs"
    values = {"agent_id": new_agent, "forked_from": agent, "version": made.version, "tokens": made.tokens}
    say(as_json, values, words)


@command
@click.argument("agent")
@click.option("--to", "version", type=click.IntRange(1), help="Which version; default: the one before the newest.")
@_waiting
def rollback(store: Path, as_json: bool, agent: str, version: int | None, wait: bool) -> None:
    """Take AGENT back to an earlier version, as its next version.

    Nothing is lost: another rollback can return to the version before this one.
    """
    from stoker_worker.memory.agent_changes import roll_back
    from stoker_worker.memory.locks import working_on
    from stoker_worker.memory.replica.shared_replica import opened_with_shared

    with opened_with_shared(store) as (parts, look), working_on(store, agent, wait=wait):
        look(agent)
        back = roll_back(parts, agent, version)
    words = f"{agent!r} is at version {back.version}, as it was at version {back.to_version}: {back.tokens} tokens"
    say(as_json, back.model_dump(mode="json", exclude={"job_id", "action"}), words)


@command
@click.argument("url")
def share(store: Path, as_json: bool, url: str) -> None:
    """Put the agents of this store into the shared store at URL, so that its worker can use it.

    Agents that are there already are compared, so another call goes on after an interruption. No worker may run.
    """
    from contextlib import closing

    from stoker_worker.memory.locks import StoreLock
    from stoker_worker.memory.replica.bucket import Bucket, BucketAway
    from stoker_worker.memory.replica.sharing import Shared
    from stoker_worker.memory.replica.sharing import share as share_store
    from stoker_worker.memory.store_parts import opened
    from stoker_worker.periodic import Periodic

    is_due = Periodic(_TELL_S).is_due

    def tell(done: Shared) -> None:
        if is_due() and not as_json:
            click.echo(f"{done.agents + done.n_refused} agents", err=True)

    with closing(StoreLock(store)), opened(store) as parts:
        try:
            done = share_store(parts, Bucket(url), on_page=tell)
        except BucketAway as error:
            raise SharedStoreAway(str(error)) from error
    words = f"{done.agents} agents of {store} are in {url}; {done.put} were put there"
    if done.n_refused:
        why = "".join(f"\n  {agent_id!r}: {reason}" for agent_id, reason in done.refused.items())
        words += (
            f"; {done.n_refused} are not, so no worker starts with it yet (export and rm them here, and import them"
            f" with another id afterwards):{why}"
        )
    say(as_json, asdict(done), words)
    if done.n_refused:
        sys.exit(1)


@click.group(
    cls=LaidOutGroup,
    sections={
        "Read": ("ls", "show", "verify"),
        "Change": ("fork", "rollback", "rm", "export", "import", "gc", "share"),
        "Back up and rescue": ("backup", "restore", "salvage"),
    },
)
def memory() -> None:
    """Inspect and tidy the agents' memory, also beside a running worker (except for restore and salvage)."""


for _each in (ls, show, verify, gc, rm, fork, rollback, export, import_, share, backup, restore, salvage):
    memory.add_command(_each)

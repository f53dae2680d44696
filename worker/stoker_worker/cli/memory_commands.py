"""`stoker-worker memory`: the commands for agents' memory. Options and output only.

With ``--json``, a command prints one JSON value to stdout, also for an error: ``{"error": {"type": …, "message": …}}``.
Only wrong usage prints nothing there, and an error cuts off what `ls` prints, because it prints while it reads. Exit
codes: 0 done, 1 failed or problems found (`verify`, `backup`, `share`), 2 wrong usage.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from stoker_shared.environment import require_known_variables
from stoker_shared.errors import AgentNotFound, SharedStoreAway, StokerError, StoreUnusable
from stoker_shared.help_layout import LaidOutGroup
from stoker_shared.text import printable, seconds_of
from stoker_worker.cli.ending import MISSING, cleaned_up_when_terminated
from stoker_worker.cli.run_options import settings_of

if TYPE_CHECKING:
    from stoker_worker.memory.admin.listing import Sort

_PAGE: Final = 50
_MOST_NAMED: Final = 50
_TELL_S: Final = 2.0
"""Pause between two lines about the progress of a command."""


def command(run: Callable[..., None]) -> click.Command:
    """Make a command, with the two common options and the handling of errors."""

    @functools.wraps(run)
    def reporting(as_json: bool, store: Path | None, **options: Any) -> None:
        try:
            require_known_variables()
        except ValueError as error:  # with a misspelt STOKER_STORE it would open another store
            raise click.UsageError(str(error)) from None
        try:
            "".join(value for value in options.values() if isinstance(value, str)).encode()
        except UnicodeEncodeError:
            raise click.UsageError("the arguments must be UTF-8") from None
        if store is None:
            store = settings_of({})[0].store
        try:
            run(store=store.expanduser(), as_json=as_json, **options)
        except BrokenPipeError:  # the reader, such as `head`, has ended; click ends quietly
            raise
        except (StokerError, OSError, ModuleNotFoundError) as error:
            message = MISSING.format(error.name) if isinstance(error, ModuleNotFoundError) else str(error)
            if not as_json:
                raise click.ClickException(printable(f"{type(error).__name__}: {message}", lines=True)) from error
            click.echo(json.dumps({"error": {"type": type(error).__name__, "message": message}}))
            sys.exit(1)

    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else."),
        click.option("--store", type=click.Path(path_type=Path), envvar="STOKER_STORE", show_envvar=True,
                     help="As for `run`.  [~/.stoker]"),
    ):  # fmt: skip
        reporting = option(reporting)
    name = run.__name__.rstrip("_")
    return click.command(name=name)(reporting)


def say(as_json: bool, values: dict[str, Any], words: str) -> None:
    """Print the result of a command: `values` as JSON, or `words`."""
    click.echo(json.dumps(values) if as_json else printable(words, lines=True))


@command
@click.option("--limit", type=click.IntRange(1), help=f"Most agents.  [{_PAGE}; with --json all]")
@click.option("--offset", type=click.IntRange(0), default=0, help="Leave out so many first.")
@click.option("--all", "is_all", is_flag=True, help="Every agent.")
@click.option(
    "--sort", type=click.Choice(["used", "size", "turns", "name"]), default="used", show_default=True,
    help="Last used first; largest first; most turns first; by name.",
)  # fmt: skip
@click.option("--match", metavar="GLOB", help="Agents whose id matches, as in 'night-*'.")
@click.option("--sessions", is_flag=True, help="The conversations that sessions keep caches of, instead of agents.")
def ls(
    *,
    store: Path,
    as_json: bool,
    limit: int | None,
    offset: int,
    is_all: bool,
    sort: "Sort",
    match: str | None,
    sessions: bool,
) -> None:
    """List the agents: newest version, size, last use, state."""
    from stoker_worker.memory.admin.listing import Page, count_agents, list_agents
    from stoker_worker.memory.database_file import open_database, refused_if_damaged

    if is_all and limit is not None:
        raise click.UsageError("--all has no --limit")
    page = Page(sort, match, limit or (None if is_all or as_json else _PAGE), offset, sessions)
    with closing(open_database(store)) as database, refused_if_damaged(store):
        agents = list_agents(database.snapshot, page)
        if as_json:
            comma = "["
            for some in filter(None, agents):
                click.echo(comma + ", ".join(map(json.dumps, some)), nl=False)
                comma = ", "
            click.echo("]" if comma != "[" else "[]")
            return
        from stoker_worker.cli.memory_tables import print_list

        n_shown = print_list(agents, of="session" if sessions else "agent")
        with database.snapshot() as connection:
            n_all = count_agents(connection, page)
    if n_shown < n_all:
        more = f"; --offset {offset + n_shown} for more" if offset + n_shown < n_all else ""
        click.echo(f"{n_shown} of {n_all} {'conversations' if sessions else 'agents'}{more}; --all for all", err=True)


@command
@click.argument("agent")
@click.option("--text", is_flag=True, help="The conversation too.")
def show(store: Path, as_json: bool, agent: str, text: bool) -> None:
    """Show AGENT and its versions; with --text, its conversation too."""
    from stoker_worker.memory.agent_changes import naming
    from stoker_worker.memory.store_parts import opened
    from stoker_worker.memory.summary import AgentSummary, versions_of
    from stoker_worker.memory.transcripts import read_agent

    with opened(store) as parts, naming(agent), parts.database.snapshot() as connection:
        state = read_agent(connection, agent)
        if state.row is None:
            raise AgentNotFound(f"there is no agent {agent!r}")
        summary, versions = AgentSummary.of(connection, state), versions_of(connection, state.row)
    transcript = state.version.transcript
    if as_json:
        shown: dict[str, Any] = {"agent": asdict(summary), "versions": [asdict(version) for version in versions]}
        if text:
            messages = transcript.messages if transcript else None
            said = None if messages is None else [message.as_template_input() for message in messages]
            shown |= {"messages": said, "text": transcript.text if transcript else None}
        click.echo(json.dumps(shown))
        return
    from stoker_worker.cli.memory_tables import print_agent, print_conversation, print_versions

    print_agent(summary)
    click.echo()
    print_versions(versions)
    if text:
        print_conversation(transcript)


@command
def verify(store: Path, as_json: bool) -> None:
    """Read the whole store and list every file that is damaged or out of place."""
    from stoker_worker.memory.admin.verify import verify_store
    from stoker_worker.memory.store_parts import opened

    problems = []
    with opened(store) as parts:
        for problem in verify_store(parts):
            problems.append(problem)
            if not as_json:
                click.echo(printable(problem))
    if as_json:
        click.echo(json.dumps({"problems": problems}))
    elif not problems:
        click.echo("everything is as it was written")
    if problems:
        sys.exit(1)


@command
@click.argument("agent")
@click.argument("file", type=click.Path(path_type=Path))
def export(store: Path, as_json: bool, agent: str, file: Path) -> None:
    """Write the conversation of AGENT to a new FILE.

    Its caches, its older versions and the answers to its jobs are left out.
    """
    from stoker_worker.memory.admin.archive import export_agent
    from stoker_worker.memory.store_parts import opened

    with opened(store) as parts:
        done = export_agent(parts, agent, file)
    words = f"{file}: {agent!r} at version {done.version}, {done.n_bytes} bytes"
    say(as_json, {"agent_id": agent, "file": str(file), **asdict(done)}, words)


@command
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--as", "new_id", metavar="NEWID", help="Import it under this id.")
def import_(store: Path, as_json: bool, file: Path, new_id: str | None) -> None:
    """Import the agent in FILE."""
    from stoker_worker.memory.admin.archive import import_agent
    from stoker_worker.memory.replica.shared_replica import opened_with_shared

    with opened_with_shared(store) as parts:
        done = import_agent(parts, file, new_id=new_id)
    say(as_json, asdict(done), f"{done.agent_id!r} at version {done.version}")


@command
@click.argument("file", type=click.Path(path_type=Path))
def backup(store: Path, as_json: bool, file: Path) -> None:
    """Copy every agent to a new FILE, also while the worker runs.

    The cache files are left out: they save time, and are made anew. A damaged conversation is named and copied as it
    is; the exit code is then 1.
    """
    from stoker_worker.memory.admin.backup import back_up
    from stoker_worker.memory.store_parts import opened

    with cleaned_up_when_terminated(), opened(store) as parts:  # a half copy has the conversations, too
        done = back_up(parts, file)
    words = f"{file}: {done.agents} agents, {done.n_bytes} bytes"
    say(as_json, {"file": str(file), **asdict(done)}, "\n".join([words, *done.problems]))
    if done.problems:
        sys.exit(1)


@command
@click.argument("backup", type=click.Path(path_type=Path))
def restore(store: Path, as_json: bool, backup: Path) -> None:
    """Put BACKUP in the place of the store's database. The worker must be stopped.

    The database that was there is kept beside it.
    """
    from stoker_worker.memory.admin.backup import restore as put_back
    from stoker_worker.memory.summary import iso

    done = put_back(store, backup)
    newest = iso(done.newest_use) if done.newest_use else None
    when = f", last used {newest.replace('T', ' ')}" if newest else ""
    words = f"{done.agents} agents{when}, and {done.blocks} blocks of their cache{_kept(done.kept)}"
    say(as_json, asdict(done), words)


@command
def salvage(store: Path, as_json: bool) -> None:
    """Take over every agent that is whole from a damaged database, and name the others. The worker must be stopped.

    The damaged database is kept beside the new one.
    """
    from stoker_worker.memory.admin.salvage import salvage as take_over

    done = take_over(store)
    whole = f"{done.whole} agents are whole; {done.blocks} blocks of their cache are there{_kept(done.kept)}"
    to_do = "'append' is refused until 'memory rollback --to N' or a turn with context='full'"
    refused = _named(f"whose newest version is not proved ({to_do})", done.refused)
    lost = _named("of which no version can be read ('append' is refused until a turn with context='full')", done.lost)
    say(as_json, asdict(done), "\n".join([whole, *refused, *lost]))


def _named(what: str, agents: dict[str, str]) -> Iterator[str]:
    if agents:
        yield f"{len(agents)} {'agent' if len(agents) == 1 else 'agents'} {what}:"
        yield from (f"  {agent_id!r}: {reason}" for agent_id, reason in islice(agents.items(), _MOST_NAMED))
    if len(agents) > _MOST_NAMED:
        yield f"  and {len(agents) - _MOST_NAMED} more; --json names all"


def _kept(path: str | None) -> str:
    return f"; the database that was there is kept as {path}" if path else ""


_waiting = click.option("--wait", is_flag=True, help="Wait until no job of the agent runs, instead of refusing.")


@command
@click.option("--shared", "url", metavar="URL", required=True, help="The shared store.")
@click.option("--dry-run", is_flag=True, help="Only count what would be removed.")
@click.option("--max-bytes", type=click.IntRange(min=0), help="Remove caches until so many bytes of them are left.")
@click.option("--unused-for", metavar="DURATION", help="Also remove caches of agents unused for so long: 30d, 12h.")
def gc(store: Path, as_json: bool, url: str, *, dry_run: bool, max_bytes: int | None, unused_for: str | None) -> None:
    """Remove from a shared store the cache files that no agent uses and that are at least a day old.

    In its own store, a worker does so by itself.
    """
    from stoker_worker.memory.replica.bucket import Bucket, BucketAway
    from stoker_worker.memory.replica.collecting import collect_there

    try:
        unused_s = None if unused_for is None else seconds_of(unused_for)
    except ValueError as error:
        raise click.UsageError(f"--unused-for: {error}") from None
    try:
        found = collect_there(Bucket(url), max_bytes=max_bytes, unused_s=unused_s, dry_run=dry_run)
    except BucketAway as error:
        raise SharedStoreAway(str(error)) from error
    words = (
        f"{'would remove' if dry_run else 'removed'} {found.files} files ({found.bytes} bytes), with the caches of"
        f" {found.agents} agents; {found.left_bytes} bytes of caches are left"
    )
    say(as_json, asdict(found) | {"dry_run": dry_run}, words)


@command
@click.argument("agent", required=False)
@click.option("--session", metavar="ID", help="Remove the caches of this session instead.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_waiting
def rm(store: Path, as_json: bool, agent: str | None, *, session: str | None, yes: bool, wait: bool) -> None:
    """Remove AGENT: its conversation, and every block that only it used."""
    if (agent is None) == (session is None):
        raise click.UsageError("name an agent, or a session with --session")
    if agent is None:
        _rm_session(store, as_json, str(session))
        return
    from stoker_worker.memory.agent_changes import exists, forget_agent, look
    from stoker_worker.memory.locks import working_on
    from stoker_worker.memory.replica.shared_replica import opened_with_shared

    if as_json and not yes:
        raise click.UsageError("--json needs --yes")
    with opened_with_shared(store) as parts:
        look(parts, agent)
        if not exists(parts, agent):
            raise AgentNotFound(f"there is no agent {agent!r}")
        if not yes:
            click.confirm(f"Remove agent {agent!r} and its conversation for good?", abort=True, err=True)
        with working_on(store, agent, wait=wait):
            look(parts, agent)
            removed = forget_agent(parts, agent)
    if not removed.existed:  # any more
        raise AgentNotFound(f"there is no agent {agent!r}")
    words = f"removed {agent!r} and {removed.blocks} blocks ({removed.block_bytes} bytes)"
    shared = f"; {removed.shared_blocks} more are in use by others" if removed.shared_blocks else ""
    say(as_json, removed.model_dump(include={"agent_id", "blocks", "block_bytes", "shared_blocks"}), words + shared)


def _rm_session(store: Path, as_json: bool, session: str) -> None:
    """Remove a session without asking, because it has no conversation to lose."""
    from stoker_worker.memory.sessions import remove_session
    from stoker_worker.memory.store_parts import opened

    with opened(store) as parts:
        n_conversations, n_blocks = remove_session(parts, session)
    words = f"removed the caches of {n_conversations} conversations of session {session!r}, and {n_blocks} blocks"
    say(as_json, {"session": session, "conversations": n_conversations, "blocks": n_blocks}, words)


@command
@click.argument("agent")
@click.argument("new_agent")
@_waiting
def fork(store: Path, as_json: bool, agent: str, new_agent: str, wait: bool) -> None:
    """Make NEW_AGENT, which continues from AGENT.

    It gets AGENT's conversation and cache, but not the results of AGENT's jobs.
    """
    from stoker_worker.memory.agent_changes import fork_agent, look
    from stoker_worker.memory.locks import working_on
    from stoker_worker.memory.replica.shared_replica import opened_with_shared

    with opened_with_shared(store) as parts, working_on(store, new_agent, wait=wait):
        look(parts, agent)
        look(parts, new_agent)
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
    from stoker_worker.memory.agent_changes import look, roll_back
    from stoker_worker.memory.locks import working_on
    from stoker_worker.memory.replica.shared_replica import opened_with_shared

    with opened_with_shared(store) as parts, working_on(store, agent, wait=wait):
        look(parts, agent)
        back = roll_back(parts, agent, version)
    words = f"{agent!r} is at version {back.version}, as it was at version {back.to_version}: {back.tokens} tokens"
    say(as_json, back.model_dump(mode="json", exclude={"job_id", "action"}), words)


@command
@click.argument("url")
def share(store: Path, as_json: bool, url: str) -> None:
    """Put the agents of this store into the shared store at URL, so that its worker can use it.

    Agents that are there already are compared, so another call goes on after an interruption. No worker may run.
    """
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

    if not store.exists():  # the lock would make the folder
        raise StoreUnusable(f"there is no store at {store}")
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
    """Inspect and tidy the agents' memory, also beside a running worker (except for share, restore and salvage)."""


for _each in (ls, show, verify, gc, rm, fork, rollback, export, import_, share, backup, restore, salvage):
    memory.add_command(_each)

"""`stoker-worker memory ls | show | verify`: looks at the agents' memory. Options and output only."""

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker_shared.errors import AgentNotFound
from stoker_shared.text import printable
from stoker_worker.cli.memory_command import command

if TYPE_CHECKING:
    from stoker_worker.memory.admin.listing import Sort


_PAGE = 50


@command
@click.option("--limit", type=click.IntRange(1), help=f"Most agents.  [{_PAGE}; with --json all]")
@click.option("--offset", type=click.IntRange(0), default=0, help="Leave out so many first.")
@click.option("--all", "is_all", is_flag=True, help="Every agent.")
@click.option(
    "--sort", type=click.Choice(["used", "size", "turns", "name"]), default="used", show_default=True,
    help="Last used first; largest first; most turns first; by name.",
)  # fmt: skip
@click.option("--match", metavar="GLOB", help="Agents whose id matches, as in 'night-*'.")
def ls(
    *, store: Path, as_json: bool, limit: int | None, offset: int, is_all: bool, sort: "Sort", match: str | None
) -> None:
    """List the agents: newest version, size, last use, state."""
    from stoker_worker.memory.admin.listing import Page, count_agents, list_agents
    from stoker_worker.memory.database_file import open_database, refused_if_damaged

    if is_all and limit is not None:
        raise click.UsageError("--all has no --limit")
    page = Page(sort, match, limit or (None if is_all or as_json else _PAGE), offset)
    with closing(open_database(store)) as database, refused_if_damaged(store):
        agents = list_agents(database.snapshot, page)
        if as_json:
            comma = "["
            for some in filter(None, agents):
                click.echo(comma + ", ".join(some), nl=False)
                comma = ", "
            click.echo("]" if comma != "[" else "[]")
            return
        from stoker_worker.cli.memory_tables import print_list

        n_shown = print_list(agents)
        with database.snapshot() as connection:
            n_all = count_agents(connection, page)
    if n_shown < n_all:
        more = f"; --offset {offset + n_shown} for more" if offset + n_shown < n_all else ""
        click.echo(f"{n_shown} of {n_all} agents{more}; --all for all", err=True)


@command
@click.argument("agent")
@click.option("--text", is_flag=True, help="The conversation too.")
def show(store: Path, as_json: bool, agent: str, text: bool) -> None:
    """Show AGENT and its versions; with --text, its conversation too."""
    from stoker_worker.memory.store_parts import opened
    from stoker_worker.memory.summary import AgentSummary, versions_of
    from stoker_worker.memory.transcripts import read_agent

    with opened(store) as parts, parts.database.snapshot() as connection:
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

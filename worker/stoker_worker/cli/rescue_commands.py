"""`stoker-worker memory backup | restore | salvage`: before and after damage. Options and output only."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Final

import click

from stoker_worker.cli.memory_command import command, say

_MOST_NAMED: Final = 50


@command
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--list", "names", type=click.Path(path_type=Path), help="List the cache files in this new file.")
def backup(store: Path, as_json: bool, file: Path, names: Path | None) -> None:
    """Copy every agent to a new FILE, also while the worker runs.

    The cache files are left out: they save time, and are made anew. A damaged conversation is named and copied as it
    is; the exit code is then 1.
    """
    from stoker_worker.memory.admin.backup import back_up
    from stoker_worker.memory.store_parts import opened

    with opened(store) as parts:
        done = back_up(parts, file, names=names)
    left_out = " and ".join(f"{x.files} files of {x.folder}/ ({x.n_bytes} bytes)" for x in done.left_out)
    words = f"{file}: {done.agents} agents, {done.n_bytes} bytes, without {left_out}"
    say(as_json, {"file": str(file), **asdict(done)}, "\n".join([words, *done.problems]))
    if done.problems:
        sys.exit(1)


@command
@click.argument("backup", type=click.Path(path_type=Path))
def restore(store: Path, as_json: bool, backup: Path) -> None:
    """Put BACKUP in the place of the store's database. The worker must be stopped.

    The database that was there is kept beside it.
    """
    from stoker_worker.memory.admin.restore import restore as put_back

    done = put_back(store, backup)
    newest = done.newest_use and datetime.fromtimestamp(done.newest_use, UTC).isoformat(" ", "seconds")
    when = f", last used {newest}" if newest else ""
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

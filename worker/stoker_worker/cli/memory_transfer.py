"""`stoker-worker memory export | import`: carries agents from store to store. Options and output only."""

from dataclasses import asdict
from pathlib import Path

import click

from stoker_worker.cli.memory_command import command, say


@command
@click.argument("agent")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--with-blocks", is_flag=True, help="Its blocks too, so that nothing is computed again.")
def export(store: Path, as_json: bool, agent: str, file: Path, with_blocks: bool) -> None:
    """Write AGENT to a new FILE: its versions, tail and snapshots, but not the answers to its jobs."""
    from stoker_worker.memory.admin.export import export_agent
    from stoker_worker.memory.store_parts import opened

    with opened(store) as parts:
        done = export_agent(parts, agent, file, with_blocks=with_blocks)
    words = f"{file}: {agent!r} at version {done.version}, {done.blocks} blocks, {done.n_bytes} bytes"
    say(as_json, {"agent_id": agent, "file": str(file), **asdict(done)}, words)


@command
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--as", "new_id", metavar="NEWID", help="Import it under this id.")
@click.option("--with-blocks", is_flag=True, help="Its blocks too. Agents share them: trust the source.")
def import_(store: Path, as_json: bool, file: Path, new_id: str | None, with_blocks: bool) -> None:
    """Import the agent in FILE."""
    from stoker_worker.memory.admin.importer import import_agent
    from stoker_worker.memory.replica.shell import opened_with_shared

    with opened_with_shared(store) as (parts, look):
        done = import_agent(parts, file, new_id=new_id, with_blocks=with_blocks, look=look)
    left_out = f"; {done.blocks_left_out} in the file were not imported (--with-blocks)" if done.blocks_left_out else ""
    say(as_json, asdict(done), f"{done.agent_id!r} at version {done.version}, {done.blocks} new blocks{left_out}")

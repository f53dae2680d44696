"""Exports an agent to a file (see `archive`), also beside a worker that runs it. Changes nothing in the store.

The answers to its jobs stay behind: they are for the jobs of this store's queue.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stoker_shared.durable_file import draft_of
from stoker_shared.errors import AgentMemoryError
from stoker_worker.memory import turn_table
from stoker_worker.memory.admin.archive import AGENT_NAME, PIECE_NAMES, ArchivedAgent, ArchivedTurn, ArchiveWriter
from stoker_worker.memory.admin.cache_check import check_block, check_piece
from stoker_worker.memory.agent_changes import naming, readable
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.turn_parts import chain_of
from stoker_worker.ports import AgentVersion


@dataclass(frozen=True)
class Exported:
    """The new file: the agent's version, how many blocks, and its size."""

    version: int
    blocks: int
    n_bytes: int


def export_agent(parts: StoreParts, agent_id: str, target: Path, *, with_blocks: bool = False) -> Exported:
    """Write the agent's versions, tail and snapshots to a new file, mode 0600, and with `with_blocks` its blocks. Cache
    that is damaged, or that goes meanwhile, is left out: it only saves time.

    Raises:
        AgentNotFound: there is no such agent.
        AgentMemoryError: `target` exists.
        AgentTranscriptUnreadable: its transcript is damaged, or lacks its last turn.
        OSError: it could not be written; there is no file.
    """
    if target.exists():
        raise AgentMemoryError(f"{target} exists already")
    n_blocks = 0
    with (
        draft_of(target) as draft,
        open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file,
        closing(ArchiveWriter(file)) as archive,
        ExitStack() as opened,
    ):
        with naming(agent_id), parts.database.snapshot() as connection:
            state = readable(connection, agent_id)
            version, row = state.version, state.row
            assert row is not None  # it is readable
            pieces = {name: opened.enter_context(piece) for name, piece in _pieces(parts, version)}
            turns = connection.execute("SELECT turns FROM agents WHERE number = ?", (row.number,)).fetchone()[0]
            head = ArchivedAgent(agent_id=agent_id, version=version.number, head=version.head.hex(), turns=turns)
            archive.add(AGENT_NAME, head.model_dump_json().encode())
            for record, can_return in turn_table.read_history(connection, row):
                if can_return:
                    archive.add(ArchivedTurn.name(record.version), ArchivedTurn.encode(record))
        for name, piece in pieces.items():
            archive.add_file(name, piece)
        for path in _blocks(parts, version) if with_blocks else ():
            with suppress(FileNotFoundError), path.open("rb") as block:
                archive.add_file(path.relative_to(parts.path).as_posix(), block)
                n_blocks += 1
    return Exported(version.number, n_blocks, target.stat().st_size)


def _pieces(parts: StoreParts, version: AgentVersion) -> Iterator[tuple[str, IO[bytes]]]:
    """The version's tail and snapshots that are whole; open, so that they outlast the agent's next turn."""
    paths = parts.pieces.paths(version.agent_id, version.number)
    for place, (name, path) in enumerate(zip(PIECE_NAMES, paths, strict=True)):
        with suppress(Damaged, FileNotFoundError):
            check_piece(path, version, place - 1 if place else None)
            yield name, path.open("rb")


def _blocks(parts: StoreParts, version: AgentVersion) -> Iterator[Path]:
    """The version's blocks from its first one on, as far as they are whole: no block is of use without those before."""
    if version.cache is None or version.transcript is None:
        return
    chain = chain_of(version.cache, version.transcript.token_ids)
    with suppress(Damaged, FileNotFoundError):
        for address in chain.addresses:
            path = parts.blocks.path_of(chain.model, address)
            check_block(path, address)
            yield path

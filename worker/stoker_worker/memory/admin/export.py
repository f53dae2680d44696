"""Exports an agent to a file (see `archive`), also beside a worker that runs it. Changes nothing in the store.

The answers to its jobs stay behind: they are for the jobs of this store's queue.
"""

import tarfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stoker_shared.durable_file import draft_of, write_new
from stoker_shared.errors import AgentMemoryError
from stoker_worker.memory import transcripts
from stoker_worker.memory.admin.archive import AGENT_NAME, ArchivedAgent, ArchivedTurn, add
from stoker_worker.memory.admin.cache_check import PIECE_NAMES, files_of
from stoker_worker.memory.agent_changes import naming, readable
from stoker_worker.memory.database import Damaged
from stoker_worker.memory.store_parts import StoreParts


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
    with draft_of(target) as draft, ExitStack() as opened:
        write_new(draft, ())
        archive = opened.enter_context(tarfile.open(draft, "w", format=tarfile.USTAR_FORMAT))
        pieces: dict[str, IO[bytes]] = {}
        with naming(agent_id), parts.database.snapshot() as connection:
            state = readable(connection, agent_id)
            version, row = state.version, state.row
            assert row is not None  # it is readable
            files = files_of(parts, version)
            for name in PIECE_NAMES:  # open, so that they outlast the agent's next turn
                path, check = files.pop(name)
                with suppress(Damaged, FileNotFoundError):
                    check(path)
                    pieces[name] = opened.enter_context(path.open("rb"))
            texts = [
                (f"turns/{record.version:08d}.json", ArchivedTurn.encode(record))
                for record, can_return in transcripts.read_history(connection, row)
                if can_return
            ]
            turns = connection.execute("SELECT turns FROM agents WHERE number = ?", (row.number,)).fetchone()[0]
        head = ArchivedAgent(agent_id=agent_id, version=version.number, head=version.head, turns=turns)
        for name, text in ((AGENT_NAME, head.model_dump_json().encode()), *texts):  # the target may be slow
            add(archive, name, text)
        for name, piece in pieces.items():
            add(archive, name, piece)
        with suppress(Damaged, FileNotFoundError):  # no block is of use without those before it
            for name, (path, check) in files.items() if with_blocks else ():
                check(path)
                with path.open("rb") as block:
                    add(archive, name, block)
                n_blocks += 1
    return Exported(version.number, n_blocks, target.stat().st_size)

"""Writes one agent into a file of its own (see `archive`). The store must be held; it is not changed."""

import os
from dataclasses import dataclass
from pathlib import Path

from stoker_shared.errors import AgentMemoryError
from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.archive import PIECE_NAMES, ArchiveWriter
from stoker_worker.memory.census import newest_blocks


@dataclass(frozen=True)
class Exported:
    """What the file holds; `n_bytes` is its size."""

    version: int
    blocks: int
    n_bytes: int


def export_agent(store: StoreAccess, agent_id: str, target: Path, *, with_blocks: bool = False) -> Exported:
    """Write the agent's records, HEAD, tail and snapshots to a new file, mode 0600, and with `with_blocks` its blocks.

    Raises:
        AgentMemoryError: there is no such agent, or `target` exists.
        AgentTranscriptUnreadable: nobody can be sure of its transcript.
        OSError: it could not be written; there is no file.
    """
    state = store.readable(agent_id)
    if target.exists():
        raise AgentMemoryError(f"{target} exists already")
    folder = store.agent(agent_id)
    version = state.version.number
    blocks = sorted(newest_blocks(state, store.blocks.path_of)) if with_blocks else []
    blocks = [path for path in blocks if path.exists()]
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            archive = ArchiveWriter(file)
            archive.add("HEAD", state.head)
            for number in (n for n in folder.read_records() if n <= version):
                path = folder.record_path(number)
                archive.add_file(path.name, path)
            for name, path in zip(PIECE_NAMES, folder.piece_paths(version), strict=True):
                if path.exists():
                    archive.add_file(name, path)
            for path in blocks:
                archive.add_file(path.relative_to(store.path).as_posix(), path)
            archive.close()
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    store.files.flush(target.absolute().parent)
    return Exported(version, len(blocks), target.stat().st_size)

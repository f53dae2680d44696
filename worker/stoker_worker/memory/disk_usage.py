"""Measures a store's files and folders: allocated bytes, as `du` counts them. Reads only; any thread.

It leaves out files that are not part of the store's format (``redis/``), and files that are just being written.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STORE_PARTS: Final = (
    "lock",
    "store.json",
    "model-digests.json",
    "model-proofs.json",
    "agents",
    "blocks",
    "forgotten",
    "tmp",
)
_PIECES: Final = ("tail-", "snapshot-")
_RECORD_NAME: Final = re.compile(r"\d{8,}\.json")


@dataclass(frozen=True)
class FolderUse:
    """One agent's folder, in allocated bytes.

    Attributes:
        kept_bytes: of the folder itself, the records and HEAD: never evicted.
        piece_bytes: of the tail and the snapshots.
        settled: records up to this version never change again; `settled_bytes` of `kept_bytes` are theirs.
    """

    kept_bytes: int
    piece_bytes: int
    settled: int = 0
    settled_bytes: int = 0


NOTHING: Final = FolderUse(0, 0)


def allocated_bytes(path: Path | os.DirEntry[str]) -> int | None:
    """Of one file, or of a folder without its content; ``None`` when it is not there."""
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_blocks * 512


def agent_use(folder: Path, before: FolderUse = NOTHING) -> FolderUse | None:
    """Of an agent's folder; ``None`` when it is not there. Settled records of `before` are not measured again."""
    kept, pieces = allocated_bytes(folder), 0
    if kept is None:
        return None
    records = {}
    for entry in entries_of(folder):
        version = int(entry.name[:-5]) if _RECORD_NAME.fullmatch(entry.name) else None
        if version is not None and version <= before.settled:
            continue
        n_bytes = allocated_bytes(entry) or 0
        if version is not None:
            records[version] = n_bytes
        elif entry.name.startswith(_PIECES):
            pieces += n_bytes
        else:
            kept += n_bytes
    newest = max(records, default=0)  # perhaps not committed: the next save may replace it
    settled_bytes = before.settled_bytes + sum(n_bytes for version, n_bytes in records.items() if version < newest)
    kept += before.settled_bytes + sum(records.values())
    return FolderUse(kept, pieces, max(before.settled, newest - 1), settled_bytes)


def pieces_in(folder: Path) -> list[Path]:
    """The tail and the snapshots in an agent's folder."""
    return [Path(entry.path) for entry in entries_of(folder) if entry.name.startswith(_PIECES)]


def store_parts(store: Path) -> Iterator[Path]:
    """Every file and folder of a store; of the agents' folders not the content (see `agent_use`)."""
    yield store
    yield from (store / name for name in STORE_PARTS)
    yield from _below(store / "blocks")
    yield from _below(store / "forgotten")
    for entry in _entries(store / "agents"):
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from (Path(agent.path) for agent in entries_of(Path(entry.path)))


def agent_folders(agents: Path) -> list[Path]:
    """Every entry at the place of an agent's folder, sorted. Raises `OSError` when `agents` cannot be read."""
    halves = [Path(entry.path) for entry in _entries(agents) if entry.is_dir(follow_symlinks=False)]
    return sorted(Path(entry.path) for half in halves for entry in entries_of(half))


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder; none when it cannot be read: one agent's folder must not stop work on the others."""
    try:
        return _entries(folder)
    except OSError:
        return []


def _below(folder: Path) -> Iterator[Path]:
    for path, folders, names in os.walk(folder):  # follows no links
        yield from (Path(path, name) for name in (*folders, *names))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []

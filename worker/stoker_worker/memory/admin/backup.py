"""Copies a store's database to one file, beside a running worker. Cache files stay out: they only save time."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from stoker_shared.durable_file import draft_of, write_new
from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.connection import Connection, translated
from stoker_worker.memory.database_file import HOW_TO_GO_ON
from stoker_worker.memory.store_parts import StoreParts

_PAGES: Final = 2048
"""Copied in one step; between two steps an interrupt ends the copy."""
CACHE_FOLDERS: Final = ("blocks", "pieces")


@dataclass(frozen=True)
class LeftOut:
    """The cache files in a folder of the store. `n_bytes`: allocated."""

    folder: str
    files: int
    n_bytes: int


@dataclass(frozen=True)
class Backup:
    """`n_bytes`: of the file."""

    agents: int
    n_bytes: int
    left_out: tuple[LeftOut, ...]


def back_up(store: StoreParts, file: Path, *, names: Path | None = None) -> Backup:
    """Write the newest state of every agent, as of now, to a new file (mode 0600): whole, or not there.

    Args:
        names: also write the path of each cache file, relative to the store, on a line of this new file.

    Raises:
        FileExistsError: one of the files exists.
        OSError: it could not be written.
        StoreUnusable: the database is damaged; the message explains how to go on.
    """
    for path in (file, names):
        if path is not None and path.exists():
            raise FileExistsError(f"{path} exists")
    left_out = tuple(_left_out(store.path, folder) for folder in CACHE_FOLDERS)
    if names is not None:
        with draft_of(names) as draft:
            paths = (path for folder in CACHE_FOLDERS for path, _ in cache_files(store.path / folder))
            write_new(draft, (f"{path.relative_to(store.path)}\n".encode() for path in paths))
    with draft_of(file) as draft:
        write_new(draft, ())
        with store.database.snapshot() as source, closing(sqlite3.connect(draft, isolation_level=None)) as target:
            agents: int = source.execute("SELECT count(*) FROM agents").fetchone()[0]
            copy_database(source, target)
        with closing(connect_to_copy(draft)) as copy:
            if problem := integrity_problem(copy):
                raise StoreUnusable(f"{store.database.path} is damaged: {problem}; {HOW_TO_GO_ON}")
        return Backup(agents, draft.stat().st_size, left_out)


def copy_database(source: Connection, target: sqlite3.Connection) -> None:
    """Copy all pages. `source` is in a transaction that has read: so no writer makes the copy begin again.

    Raises:
        sqlite3.Error: it could not be copied.
    """
    assert isinstance(source, sqlite3.Connection)
    target.execute("PRAGMA journal_mode=OFF")  # it is synced when it is whole
    target.execute("PRAGMA synchronous=OFF")
    source.backup(target, pages=_PAGES, sleep=0)


def connect_to_copy(path: Path) -> sqlite3.Connection:
    """A connection to a database that nothing writes. It makes no file beside it, unless a log is there, which a
    database that was replaced may still need. Raises `sqlite3.Error`."""
    has_log = path.with_name(f"{path.name}-wal").exists()
    uri = f"file:{quote(str(path.absolute()))}?{'mode=ro' if has_log else 'immutable=1'}"
    return sqlite3.connect(uri, uri=True, isolation_level=None)


def integrity_problem(connection: Connection) -> str | None:
    """The first thing in the tree of pages, the indexes and the constraints that is wrong. Raises `DatabaseFailed`."""
    with translated():
        found: str = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    return None if found == "ok" else found


def cache_files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every file below a folder of the store, as far as it can be read."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                yield path, path.stat()
            except FileNotFoundError:  # evicted just now
                continue


def _left_out(store: Path, folder: str) -> LeftOut:
    sizes = [stat.st_blocks * 512 for _, stat in cache_files(store / folder)]
    return LeftOut(folder, len(sizes), sum(sizes))

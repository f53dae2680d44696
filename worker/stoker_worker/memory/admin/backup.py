"""Copies a store's database to one file, beside a running worker. Cache files stay out: they only save time."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from stoker_shared.durable_file import draft_of, write_new
from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.admin.verify import damaged_agents, damaged_answers
from stoker_worker.memory.database import Connection, translated
from stoker_worker.memory.database_file import HOW_TO_GO_ON
from stoker_worker.memory.store_parts import StoreParts

_PAGES: Final = 2048
"""Copied in one step; between two steps an interrupt ends the copy."""


@dataclass(frozen=True)
class LeftOut:
    """The cache files in a folder of the store. `n_bytes`: allocated."""

    folder: str
    files: int
    n_bytes: int


@dataclass(frozen=True)
class Backup:
    """
    Attributes:
        n_bytes: of the file.
        problems: a line for each row that is damaged, in the store and so in the backup.
    """

    agents: int
    n_bytes: int
    left_out: tuple[LeftOut, ...]
    problems: tuple[str, ...]


def back_up(store: StoreParts, file: Path, *, names: Path | None = None) -> Backup:
    """Write the newest state of every agent, as of now, to a new file (mode 0600): whole, or not there. A row that is
    damaged is copied as it is, and named.

    Args:
        names: also write the path of each cache file, relative to the store, on a line of this new file.

    Raises:
        FileExistsError: one of the files exists.
        OSError: it could not be written.
        StoreUnusable: a page of the database is damaged; the message explains how to go on.
    """
    for path in (file, names):
        if path is not None and path.exists():
            raise FileExistsError(f"{path} exists")
    folders = [store.blocks.path, store.pieces.path]
    left_out = []
    for folder in folders:
        sizes = [n_bytes for _, n_bytes in _cache_files(folder)]
        left_out.append(LeftOut(folder.name, len(sizes), sum(sizes)))
    if names is not None:
        with draft_of(names) as draft:
            paths = (path.relative_to(store.path) for folder in folders for path, _ in _cache_files(folder))
            write_new(draft, (f"{path}\n".encode() for path in paths))
    with draft_of(file) as draft:
        write_new(draft, ())
        with store.database.snapshot() as source:
            agents: int = source.execute("SELECT count(*) FROM agents").fetchone()[0]
            copy_database(source.connection, draft)
        with closing(connect_to_copy(draft)) as copy:
            with translated():
                problem = copy.execute("PRAGMA integrity_check(1)").fetchone()[0]
                if problem != "ok":
                    raise StoreUnusable(f"{store.database.path} is damaged: {problem}; {HOW_TO_GO_ON}")
            problems = tuple(x for look in (damaged_agents, damaged_answers) for x in look(lambda: nullcontext(copy)))
        return Backup(agents, draft.stat().st_size, tuple(left_out), problems)


def copy_database(source: Connection, target: Path) -> None:
    """Copy all pages to an empty file. `source` is in a transaction that has read: so no writer makes the copy begin
    again.

    Raises:
        sqlite3.Error: it could not be copied.
    """
    assert isinstance(source, sqlite3.Connection)
    with closing(sqlite3.connect(target, isolation_level=None)) as copy:
        copy.execute("PRAGMA journal_mode=OFF")  # it is synced when it is whole
        copy.execute("PRAGMA synchronous=OFF")
        source.backup(copy, pages=_PAGES, sleep=0)


def connect_to_copy(path: Path) -> sqlite3.Connection:
    """A connection that makes no file beside the copy, unless a log is there, which a database that was replaced may
    still need. Raises `DatabaseFailed`."""
    has_log = path.with_name(f"{path.name}-wal").exists()
    uri = f"file:{quote(str(path.absolute()))}?{'mode=ro' if has_log else 'immutable=1'}"
    with translated():
        connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    connection.text_factory = lambda data: data.decode(errors="replace")  # a row's checksum tells
    return connection


def _cache_files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Every file below a folder of the store, and its allocated bytes, as far as it can be read."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                yield path, path.stat().st_blocks * 512
            except FileNotFoundError:  # evicted just now
                continue

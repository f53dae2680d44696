"""Copies a store's database to one file, beside a running worker, and puts such a copy back, while no worker has the
store open. Cache files stay out: they only save time.

A database that replaces the store's, a backup or what `salvage` made, is made in the store's temp folder, with a new
index of the cache files; only then are the two exchanged.
"""

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from stoker_shared.durable_file import draft_of, write_new
from stoker_shared.errors import StoreUnusable
from stoker_worker.memory import unsaved
from stoker_worker.memory.admin.cache_files import recount
from stoker_worker.memory.admin.verify import damaged_agents, damaged_answers
from stoker_worker.memory.blocks import BlockFolder, PieceFolder
from stoker_worker.memory.database import NAME, Connection, Damaged, DatabaseFailed, Witness, translated
from stoker_worker.memory.database_file import (
    FORMAT,
    HOW_TO_GO_ON,
    check_header,
    check_tables,
    finish_replacement,
    open_database,
    refused_if_damaged,
    replace_database,
)
from stoker_worker.memory.files import CacheWriter, Disk
from stoker_worker.memory.locks import StoreLock
from stoker_worker.memory.store_parts import StoreParts, make_folders
from stoker_worker.memory.transcripts import IS_OF_SESSION

_PAGES: Final = 2048
"""Copied in one step; an interrupt ends the copy between two steps."""


@dataclass(frozen=True)
class Backup:
    """`n_bytes`: of the file. `problems`: a line for each damaged row, in the store and so in the backup."""

    agents: int
    n_bytes: int
    problems: tuple[str, ...]


def back_up(store: StoreParts, file: Path) -> Backup:
    """Write the newest state of every agent to a new file (mode 0600): whole, or not there. Damaged rows are copied as
    they are, and named.

    Raises:
        FileExistsError: the file exists.
        OSError: it could not be written.
        StoreUnusable: a page of the database is damaged; the message explains how to go on.
    """
    if file.exists():
        raise FileExistsError(f"{file} exists")
    with draft_of(file) as draft:
        write_new(draft)
        with store.database.snapshot() as source:
            agents: int = source.execute(f"SELECT count(*) FROM agents WHERE NOT {IS_OF_SESSION}").fetchone()[0]
            copy_database(source.connection, draft)
        with closing(connect_to_copy(draft)) as copy:
            with translated():
                check_pages(copy, store.database.path)
            problems = tuple(x for look in (damaged_agents, damaged_answers) for x in look(lambda: nullcontext(copy)))
        return Backup(agents, draft.stat().st_size, problems)


def check_pages(connection: Connection, path: Path) -> None:
    """Check every page and index of the database at `path`, or of a copy. Raises `StoreUnusable`: one is damaged; the
    message explains how to go on. Raises `sqlite3.Error`."""
    problem = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if problem != "ok":
        raise StoreUnusable(f"{path} is damaged: {problem}; {HOW_TO_GO_ON}")


def copy_database(source: Connection, target: Path) -> None:
    """Copy all pages to an empty file. `source` is in a transaction that has read, so that no writer makes the copy
    begin again. Raises `OSError`, which names `target` if it is for lack of room; `Damaged`."""
    assert isinstance(source, sqlite3.Connection)
    try:
        with translated(), closing(sqlite3.connect(target, isolation_level=None)) as copy:
            copy.execute("PRAGMA journal_mode=OFF")  # it is synced when it is whole
            copy.execute("PRAGMA synchronous=OFF")
            source.backup(copy, pages=_PAGES, sleep=0)
    except DatabaseFailed as failed:
        if failed.errno is None:  # of either file
            raise
        raise OSError(failed.errno, str(failed.__cause__), str(target)) from failed


def connect_to_copy(path: Path) -> sqlite3.Connection:
    """A read-only connection to a copy. It makes no file beside the copy, unless the copy has a log, as a database that
    was replaced may have. Raises `DatabaseFailed`."""
    has_log = path.with_name(f"{path.name}-wal").exists()
    uri = f"file:{quote(str(path.absolute()))}?{'mode=ro' if has_log else 'immutable=1'}"
    with translated():
        connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    connection.text_factory = lambda data: data.decode(errors="replace")  # its checksum shows a damaged row
    return connection


@dataclass(frozen=True)
class Exchanged:
    """`blocks`: how many are in the new index. `kept`: path of the previous database; ``None``: there was none."""

    blocks: int
    kept: str | None


@dataclass(frozen=True)
class RestoredBackup(Exchanged):
    """`newest_use`: Unix time of the last use of an agent in the backup; ``None``: it has no agents."""

    agents: int
    newest_use: float | None


def restore(folder: Path, backup: Path) -> RestoredBackup:
    """Make a backup the store's database.

    Raises:
        StoreUnusable: the backup is damaged or of another format, or a worker has the store; nothing has changed.
        OSError: the backup could not be read, or the store not written. Either nothing has changed, or the next start
            finishes the restore.
    """
    with _whole(backup) as source, refused_if_damaged(backup):
        counts = f"SELECT count(*), max(CAST(last_used AS REAL)) FROM agents WHERE NOT {IS_OF_SESSION}"
        agents, newest_use = source.execute(counts).fetchone()

        def copy(draft: Path) -> None:
            write_new(draft / NAME)
            copy_database(source, draft / NAME)

        done = exchange(folder, copy, lambda _: None)
    (folder / unsaved.NAME).unlink(missing_ok=True)  # of turns after the backup
    return RestoredBackup(done.blocks, done.kept, agents, newest_use)


def exchange(folder: Path, make: Callable[[Path], None], fill: Callable[[Connection], None]) -> Exchanged:
    """Make another database the store's; meanwhile no worker can have the store. `make` puts it into an empty folder,
    `fill` changes it.

    Raises:
        StoreUnusable: a worker has the store, or it or the new database has another format; nothing has changed.
        OSError: it could not be written; nothing has changed, or the next start finishes it.
        Exception: what `make` and `fill` raise; nothing has changed.
    """
    with closing(StoreLock(folder)):
        finish_replacement(folder)
        writer = CacheWriter(Disk(), folder / "tmp")
        make_folders(folder, writer)
        writer.clear()
        draft = folder / "tmp" / f"{os.getpid()}-database"
        blocks = BlockFolder(folder / "blocks", writer)
        pieces = PieceFolder(folder / "pieces", writer)
        testified = Witness(folder).read() or 0

        def change(connection: Connection) -> int:
            fill(connection)
            # Above what the witness has seen: this one is accepted, and an older one in its place is still refused.
            connection.execute("UPDATE store SET commits = max(commits, ?)", (testified,))
            return recount(connection, blocks, pieces, now=time.time())

        try:
            draft.mkdir(mode=0o700)
            make(draft)
            with closing(open_database(draft)) as database:
                n_blocks = database.commit(change)
                database.empty_log()
                if database.log_bytes():  # which stays behind, with the newest transactions; `close` would not tell
                    raise DatabaseFailed("the new database could not be written to its end: is the disk full?")
            kept = replace_database(folder, draft / NAME)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return Exchanged(n_blocks, str(kept) if kept.exists() else None)


@contextmanager
def _whole(backup: Path) -> Iterator[Connection]:
    """A connection to a backup that is whole, within a transaction. Raises `StoreUnusable`, `OSError`."""
    os.close(os.open(backup, os.O_RDONLY))  # SQLite's message for a missing file does not name it
    with closing(connect_to_copy(backup)) as source:
        try:
            with translated():
                source.execute("BEGIN")
                check_header(source, **{"user_version": FORMAT, "integrity_check(1)": "ok"})
                check_tables(source)
        except Damaged as damage:
            raise StoreUnusable(f"the backup {backup} cannot be used, and nothing has changed: {damage}") from damage
        yield source

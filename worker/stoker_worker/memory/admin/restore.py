"""Puts another database in the place of a store's: a backup, or what `salvage` made. No worker has the store open.

It is made in the store's temp folder, checked, its index of the cache files is made anew, and only then are the two
exchanged.
"""

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.admin.backup import connect_to_copy, copy_database, integrity_problem
from stoker_worker.memory.admin.recount import recount
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection, translated
from stoker_worker.memory.database import NAME
from stoker_worker.memory.database_file import open_database, refuse_other_formats
from stoker_worker.memory.files import Disk, DurableWriter
from stoker_worker.memory.piece_folder import PieceFolder
from stoker_worker.memory.replacement import finish_replacement, replace_database
from stoker_worker.memory.store_parts import StoreLock, make_folders
from stoker_worker.memory.witness import Witness

T = TypeVar("T")


@dataclass(frozen=True)
class Exchanged:
    """
    Attributes:
        blocks: on disk, and in the index now.
        kept: where the database that was there before is; ``None``: there was none.
    """

    blocks: int
    kept: str | None


@dataclass(frozen=True)
class Restored(Exchanged):
    """`newest_use`: Unix time of the last use of an agent in the backup; ``None``: it has no agents."""

    agents: int
    newest_use: float | None


def restore(folder: Path, backup: Path) -> Restored:
    """Make a backup the store's database.

    Raises:
        StoreUnusable: the backup is damaged or of another format, or a worker has the store; nothing has changed.
        OSError: it could not be read or written; nothing has changed, or the next start finishes it.
    """
    with draft_folder(folder) as draft:
        try:
            _copy(backup, draft / NAME)
            (agents, newest_use), done = exchange(folder, draft, _check)
        except (Damaged, StoreUnusable) as problem:
            raise StoreUnusable(f"the backup {backup} cannot be used, and nothing has changed: {problem}") from problem
    return Restored(done.blocks, done.kept, agents, newest_use)


@contextmanager
def draft_folder(folder: Path) -> Iterator[Path]:
    """A folder for a database in the making, removed at the end. Meanwhile no worker can have the store.

    Raises:
        StoreUnusable: a worker has it, or it has another format.
        OSError: it cannot be used.
    """
    with closing(StoreLock(folder)):
        refuse_other_formats(folder)
        finish_replacement(folder)
        writer = DurableWriter(Disk(), folder / "tmp")
        make_folders(folder, writer)
        writer.clear()
        draft = folder / "tmp" / f"{os.getpid()}-database"
        draft.mkdir(mode=0o700)
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def exchange(folder: Path, draft: Path, fill: Callable[[Connection], T]) -> tuple[T, Exchanged]:
    """Make the database in the folder `draft` the store's, after `fill` and a new index of the cache files.

    Raises:
        StoreUnusable, Damaged: the draft is damaged or of another format.
        OSError: it could not be written; nothing has changed, or the next start finishes it.
        Exception: what `fill` raises; nothing has changed.
    """
    writer = DurableWriter(Disk(), folder / "tmp")
    pieces = PieceFolder(folder / "pieces", files=Disk(), writer=writer)
    testified = Witness(folder).read() or 0

    def change(connection: Connection) -> tuple[T, int]:
        filled = fill(connection)
        n_blocks = recount(connection, folder / "blocks", pieces, now=time.time())
        # Above what the witness has seen: this one is accepted, and an older one in its place is still refused.
        connection.execute("UPDATE store SET commits = max(commits, ?)", (testified,))
        return filled, n_blocks

    with closing(open_database(draft)) as database:
        filled, n_blocks = database.commit(change)
    kept = replace_database(folder, draft / NAME)
    return filled, Exchanged(n_blocks, str(kept) if kept.exists() else None)


def _copy(backup: Path, target: Path) -> None:
    """Raises `Damaged`, `OSError`."""
    os.close(os.open(backup, os.O_RDONLY))  # SQLite's message for a missing file does not name it
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    copying = closing(sqlite3.connect(target, isolation_level=None))
    with translated(), closing(connect_to_copy(backup)) as source, copying as copy:
        source.execute("BEGIN")
        source.execute("PRAGMA user_version").fetchone()
        copy_database(source, copy)


def _check(connection: Connection) -> tuple[int, float | None]:
    """The number of agents, and when the last of them was used. Raises `Damaged`."""
    if problem := integrity_problem(connection):
        raise Damaged(problem)
    agents, newest_use = connection.execute("SELECT count(*), max(last_used) FROM agents").fetchone()
    return agents, newest_use

"""Puts another database in the place of a store's: a backup, or what `salvage` made. No worker has the store open.

It is made in the store's temp folder, its index of the cache files is made anew, and only then are the two exchanged.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from stoker_shared.durable_file import write_new
from stoker_shared.errors import StoreUnusable
from stoker_worker.memory import unsaved
from stoker_worker.memory.admin.backup import connect_to_copy, copy_database
from stoker_worker.memory.admin.recount import recount
from stoker_worker.memory.blocks import BlockFolder, PieceFolder
from stoker_worker.memory.database import NAME, Connection, Damaged, Witness, translated
from stoker_worker.memory.database_file import (
    FORMAT,
    check_header,
    check_tables,
    finish_replacement,
    open_database,
    refused_if_damaged,
    replace_database,
)
from stoker_worker.memory.files import Disk, DurableWriter
from stoker_worker.memory.locks import StoreLock
from stoker_worker.memory.store_parts import make_folders


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
    with _whole(backup) as source, refused_if_damaged(backup):
        agents, newest_use = source.execute("SELECT count(*), max(last_used) FROM agents").fetchone()

        def copy(draft: Path) -> None:
            write_new(draft / NAME, ())
            copy_database(source, draft / NAME)

        done = exchange(folder, copy, lambda _: None)
    (folder / unsaved.NAME).unlink(missing_ok=True)  # of turns after the backup
    return Restored(done.blocks, done.kept, agents, newest_use)


def exchange(folder: Path, make: Callable[[Path], None], fill: Callable[[Connection], None]) -> Exchanged:
    """Make another database the store's. Meanwhile no worker can have the store.

    Args:
        make: puts a database into an empty folder.
        fill: changes it.

    Raises:
        StoreUnusable: a worker has the store, or it or the new database has another format; nothing has changed.
        OSError: it could not be written; nothing has changed, or the next start finishes it.
        Exception: what `make` and `fill` raise; nothing has changed.
    """
    with closing(StoreLock(folder)):
        finish_replacement(folder)
        writer = DurableWriter(Disk(), folder / "tmp")
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

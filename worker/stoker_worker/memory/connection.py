"""A connection to a store's database: its interface, its settings, the end of its reads, and the meaning of SQLite's
errors. Any thread.
"""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, Protocol
from urllib.parse import quote
from weakref import WeakSet

from stoker_worker.memory.checksum import Damaged

BUSY_S: Final = 30.0
_TRANSIENT: Final = {
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_TOOBIG,
}  # fmt: skip


class Cursor(Protocol):
    """What `Connection.execute` returns."""

    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...
    def close(self) -> None: ...


class Connection(Protocol):
    """As much of `sqlite3.Connection` as this package uses. Rows are tuples; every statement commits by itself, unless
    a transaction was begun."""

    def execute(self, sql: str, parameters: Any = (), /) -> Cursor: ...
    def close(self) -> None: ...


class Reading:
    """A connection that reads one state. Its cursors end with it: one with rows left would keep the connection, and so
    its next reader, in that state.

    Attributes:
        connection: without this care.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._cursors = WeakSet[Cursor]()

    def execute(self, sql: str, parameters: Any = (), /) -> Cursor:
        cursor = self.connection.execute(sql, parameters)
        self._cursors.add(cursor)
        return cursor

    def close(self) -> None:
        for cursor in self._cursors:
            cursor.close()


class DatabaseFailed(OSError):
    """The disk, its space or a lock failed; the database itself is as it was."""


def connect(path: Path, mode: Literal["rw", "ro"] = "rw") -> Connection:
    """A connection to a file that exists, with the settings that every connection of a store needs. Raises
    `sqlite3.Error`."""
    uri = f"file:{quote(str(path.absolute()))}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    # Text that is no UTF-8 is a damaged row, which its checksum tells, and not an error of the whole statement.
    connection.text_factory = lambda data: data.decode(errors="replace")
    configure(connection)
    return connection


def configure(connection: Connection) -> None:
    for pragma in (
        "synchronous=FULL",
        "fullfsync=ON",  # macOS: to the platter
        "checkpoint_fullfsync=ON",
        "wal_autocheckpoint=4000",  # pages; `Upkeep` is faster
        "journal_size_limit=16777216",  # bytes, of a log that a long read kept from being emptied
        "temp_store=MEMORY",  # a savepoint needs no file
        "mmap_size=0",  # an I/O error in a mapped page would kill the worker
        "cell_size_check=ON",
        "trusted_schema=OFF",
        "secure_delete=ON",  # a forgotten conversation is overwritten, not only unlinked
        "foreign_keys=OFF",
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()


@contextmanager
def translated() -> Iterator[None]:
    """SQLite's errors as ours.

    Raises:
        DatabaseFailed: it may pass.
        Damaged: the database is not as it was written.
    """
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        if code is not None and code & 0xFF in _TRANSIENT:  # the disk, its space or a lock
            failed = DatabaseFailed(f"the database of the store: {error}")
            failed.errno = errno.ENOSPC if code == sqlite3.SQLITE_FULL else None
            raise failed from error
        raise Damaged(f"the database of the store is damaged: {error}") from error

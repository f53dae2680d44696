"""The store's open SQLite database: connections, and transactions that several threads share. Any thread.

One connection writes: changes that threads bring at the same time share one transaction, and so one sync. Each read has
a connection of its own. SQLite's locks keep the worker and the shell's commands apart; they are lost when the process
closes the file by any other means than SQLite, so nothing else in the process may open it. Knows no table but `store`.
`database_file` makes, checks and opens databases.
"""

import errno
import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import quote
from weakref import WeakSet

from xxhash import xxh3_128_digest

from stoker_worker.events import Outage

T = TypeVar("T")

NAME: Final = "agents.db"
_WITNESS_NAME: Final = "agents.commits"
_COUNT: Final = "UPDATE store SET commits = commits + 1 RETURNING commits"
_LONG_LOG_BYTES: Final = 1 << 20
BUSY_S: Final = 30.0
_TRANSIENT: Final = {
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_TOOBIG,
}  # fmt: skip


class Damaged(ValueError):
    """Something is not as it was written, or where it belongs; the message gives the reason. Stays in this package."""


def checksum(body: bytes) -> bytes:
    """xxh3_128: 16 bytes, the most significant first."""
    return xxh3_128_digest(body)


def row_checksum(columns: Iterable[str | bytes | int | float | None]) -> bytes:
    """The checksum of columns in order. Each adds its type, length and bytes, so no two rows give one input."""
    parts: list[bytes] = []
    for value in columns:
        data = value if isinstance(value, bytes) else b"" if value is None else str(value).encode()
        parts += f"{type(value).__name__[0]}{len(data)}:".encode(), data
    return xxh3_128_digest(b"".join(parts))


def key_of(agent_id: str) -> bytes:
    """The hash of an agent's id, for the second index."""
    return hashlib.sha256(agent_id.encode()).digest()


def agent_checksum(number: int, agent_id: str, version: int, head: bytes, unsaved: int) -> bytes:
    return row_checksum((number, agent_id, version, head, unsaved))


class Cursor(Protocol):
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...
    def close(self) -> None: ...


class Connection(Protocol):
    """The part of `sqlite3.Connection` that this package uses. Rows are tuples; every statement commits by itself,
    unless a transaction was begun."""

    def execute(self, sql: str, parameters: Any = (), /) -> Cursor: ...
    def close(self) -> None: ...


class Reading:
    """The connection of one read transaction. `close` closes its cursors: one with rows left would keep the connection,
    and its next user, in this snapshot. `connection`: without this care."""

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
    """A connection to an existing file, with the settings that every store needs. Raises `sqlite3.Error`."""
    uri = f"file:{quote(str(path.absolute()))}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    # Text that is no UTF-8 is a damaged row, found by its checksum, and not an error of the whole statement.
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
        "temp_store=MEMORY",
        "mmap_size=0",  # an I/O error in a mapped page would kill the worker
        "cell_size_check=ON",
        "trusted_schema=OFF",
        "secure_delete=ON",  # a forgotten conversation is overwritten, not only unlinked
        "foreign_keys=OFF",
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()


@contextmanager
def translated() -> Iterator[None]:
    """Raises SQLite's errors as ours: `DatabaseFailed`, which may pass, or `Damaged`."""
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


class Witness:
    """How many transactions a store's database had when this file was last written: a number and its checksum in a
    file. A database with fewer has lost some: a damaged byte in SQLite's write-ahead log ends the log early, and SQLite
    takes the rest for unfinished. The file is not synced: it may be older than the database, and is never newer."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / _WITNESS_NAME

    def write(self, commits: int) -> None:
        """Only after the transaction of that number is durable. Never raises."""
        with suppress(OSError):
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(file, _content(commits), 0)
            finally:
                os.close(file)

    def read(self) -> int | None:
        """``None``: there is no witness, or it is itself damaged."""
        try:
            written = self.path.read_bytes()
            commits = int(written.split()[0])
        except (OSError, ValueError, IndexError):
            return None
        return commits if written == _content(commits) else None


def _content(commits: int) -> bytes:
    number = f"{commits:020d}"
    return f"{number} {checksum(number.encode()).hex()}\n".encode()


@dataclass
class Change(Generic[T]):
    """A change that may share its transaction with others, before or after it."""

    run: Callable[[Connection], T]
    is_done: bool = False
    result: T | None = None
    error: BaseException | None = None

    def outcome(self) -> T:
        """What the change returned. Raises what it raised, or why the transaction failed: nothing has changed."""
        if self.error is not None:
            raise self.error
        result: Any = self.result
        return result  # type: ignore[no-any-return]


class Database:
    """An open database. `outage`: the store's, told of transactions that the disk refuses, and of those that succeed.
    Raises `DatabaseFailed`: it cannot be opened now; `Damaged`: it is no database."""

    def __init__(self, folder: Path, connector: Callable[[Path], Connection] = connect) -> None:
        self.path = folder / NAME
        self.witness = Witness(folder)
        self.outage = Outage("the store")
        self._connector = connector
        self._lock = threading.Lock()
        self._leading = threading.Lock()
        self._waiting: list[Change[Any]] = []
        self._idle: list[Connection] = []
        self._is_closed = False
        with translated():
            self._writer = connector(self.path)

    @contextmanager
    def snapshot(self) -> Iterator[Reading]:
        """Several reads of one state; rows can be fetched only until its end. Raises `DatabaseFailed`: it cannot be
        read now; `Damaged`: a page that was read is damaged."""
        with self._reading() as connection:
            connection.execute("BEGIN")
            with closing(Reading(connection)) as reading:
                yield reading
            connection.execute("ROLLBACK")

    def commit(self, run: Callable[[Connection], T]) -> T:
        """Run `run` in a transaction, and make it durable. Changes that come while another transaction syncs share the
        next one; a lone change does not wait.

        Args:
            run: lets `sqlite3.Error` through, and takes no lock that a caller of `commit` may hold. It may be called
                again, so it changes nothing but the database.

        Raises:
            DatabaseFailed: it could not be written; nothing has changed. `outage` has logged it.
            Damaged: the same, because a page is damaged.
            Exception: what `run` raised; nothing has changed.
        """
        return self.commit_each([run])[0].outcome()

    def commit_each(self, runs: Sequence[Callable[[Connection], T]]) -> list[Change[T]]:
        """As `commit`, for changes that share a transaction. One that raises fails alone. Raises nothing."""
        changes = [Change(run) for run in runs]
        with self._lock:
            self._waiting += changes
        with self._leading:
            if not all(change.is_done for change in changes):
                self._lead()
        for change in changes:
            if isinstance(change.error, DatabaseFailed):
                self.outage.met(change.error)
            elif change.error is None:
                self.outage.answered()
        return changes

    def log_bytes(self) -> int:
        """Size of the write-ahead log."""
        try:
            return self.path.with_name(f"{NAME}-wal").stat().st_size
        except FileNotFoundError:
            return 0

    def shorten_log(self) -> None:
        """Move a long log into the database, so that no transaction has to. Raises `DatabaseFailed`, `Damaged`."""
        if self.log_bytes() > _LONG_LOG_BYTES:
            with self._reading() as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def empty_log(self) -> bool:
        """Move the log into the database and truncate it. ``True``: that is done, or the log is being read; ``False``:
        it failed, perhaps for lack of room. Never raises."""
        with self._leading, suppress(DatabaseFailed, Damaged), translated():
            self._check_open()
            self._writer.execute("PRAGMA busy_timeout=0").fetchall()
            try:
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                self._writer.execute(f"PRAGMA busy_timeout={int(1000 * BUSY_S)}").fetchall()
            return True
        return False

    def close(self) -> None:
        """Wait for the transaction under way, but not for reads. The last process to close the database moves its log
        into it."""
        with self._leading, self._lock:
            connections = [] if self._is_closed else [*self._idle, self._writer]
            self._is_closed = True
        for connection in connections:
            with suppress(sqlite3.Error):
                connection.close()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """A connection for this thread alone."""
        with translated():
            connection = self._take_idle() or self._connector(self.path)
            try:
                yield connection
            except BaseException:  # after some errors SQLite has ended the transaction, after others not
                connection.close()
                raise
            with self._lock:
                if not self._is_closed:
                    self._idle.append(connection)
                    return
            connection.close()

    def _take_idle(self) -> Connection | None:
        with self._lock:
            self._check_open()
            return self._idle.pop() if self._idle else None

    def _check_open(self) -> None:
        if self._is_closed:
            raise DatabaseFailed("the database of the store is closed")

    def _lead(self) -> None:
        """Carry out all waiting changes."""
        with self._lock:
            group, self._waiting = self._waiting, []
        try:
            self._carry_out(group)
        finally:  # after an interrupt the next waiting thread leads
            with self._lock:
                self._waiting += [change for change in group if not change.is_done]

    def _carry_out(self, group: list[Change[Any]]) -> None:
        """Run them in one transaction. If any fails, each gets one of its own."""
        try:
            self._transaction(group)
        except BaseException as error:  # perhaps of another thread's change
            if len(group) == 1:
                group[0].error = error
            else:
                for change in group:
                    self._carry_out([change])
        for change in group:
            change.is_done = True

    def _transaction(self, group: list[Change[Any]]) -> None:
        """Raises `DatabaseFailed`, `Damaged`: nothing has changed."""
        self._check_open()
        with translated():
            connection = self._writer
            connection.execute("BEGIN IMMEDIATE")
            try:
                for change in group:
                    change.result = change.run(connection)
                commits = _end(connection)
            except BaseException:
                _roll_back(connection)
                raise
        self.witness.write(commits)


def _end(connection: Connection) -> int:
    """Count the transaction, and commit it; returns its number. Raises `sqlite3.Error`: nothing has changed."""
    commits = connection.execute(_COUNT).fetchall()[0][0]
    try:
        connection.execute("COMMIT")
    except sqlite3.Error:
        # If only the sync failed, all of it is in the log, where SQLite would find it after a crash: write over it.
        _roll_back(connection)
        with suppress(sqlite3.Error):
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_COUNT).fetchall()
            connection.execute("COMMIT")
        raise
    return int(commits)


def _roll_back(connection: Connection) -> None:
    with suppress(sqlite3.Error):  # SQLite has done so by itself
        connection.execute("ROLLBACK")


def count_bytes(connection: Connection, n_bytes: int) -> None:
    """Add to the store's count of cache bytes."""
    if n_bytes:
        connection.execute("UPDATE store SET cache_bytes = cache_bytes + ?", (n_bytes,))


class SharedNote(NamedTuple):
    """The shared store that has all of a store's agents (column `store.shared`). `id`: the same on every mount."""

    url: str
    id: str


def read_note(connection: Connection) -> SharedNote | None:
    """``None``: not all of the store's agents are in a shared store."""
    found = connection.execute("SELECT shared FROM store").fetchone()[0]
    if found is None:
        return None
    url, _, id_ = str(found).rpartition(" ")
    return SharedNote(url, id_)


def write_note(connection: Connection, note: SharedNote | None) -> None:
    connection.execute("UPDATE store SET shared = ?", (None if note is None else f"{note.url} {note.id}",))

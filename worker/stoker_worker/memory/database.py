"""The store's open SQLite database: connections, and transactions that several threads share. Any thread.

One connection writes: changes that threads bring at the same time share one transaction, and so one sync. Each read has
a connection of its own. SQLite's locks keep the worker and the shell's commands apart; closing the file by any other
means than SQLite would drop them, so nothing else in a process that has it open may open it. Knows no table but
`store`. `database_file` makes, checks and opens databases.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from stoker_worker.events import Outage
from stoker_worker.memory.change import Change
from stoker_worker.memory.connection import BUSY_S, Connection, DatabaseFailed, Reading, connect, translated
from stoker_worker.memory.witness import Witness

T = TypeVar("T")

NAME: Final = "agents.db"
_COUNT: Final = "UPDATE store SET commits = commits + 1 RETURNING commits"
_LONG_LOG_BYTES: Final = 1 << 20


class Database:
    """An open database.

    Attributes:
        outage: of the store: told of each transaction that the disk refuses, and of each that succeeds.

    Raises:
        DatabaseFailed: it cannot be opened now.
        Damaged: it is no database.
    """

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
        """Several reads of one state. Rows that are not fetched by its end cannot be fetched any more.

        Raises:
            DatabaseFailed: it cannot be read now.
            Damaged: a page that was read is damaged.
        """
        with self._reading() as connection:
            connection.execute("BEGIN")
            with closing(Reading(connection)) as reading:
                yield reading
            connection.execute("ROLLBACK")

    def commit(self, run: Callable[[Connection], T]) -> T:
        """Run `run` in a transaction, and make it durable. Changes that come while another transaction syncs share the
        next one; a lone change waits for nobody.

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
        """Move what a long log has into the database, so that no transaction has to: it is done beside them. Raises
        `DatabaseFailed`, `Damaged`."""
        if self.log_bytes() > _LONG_LOG_BYTES:
            with self._reading() as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def empty_log(self) -> None:
        """The same, and give its space back, unless it is being read. Raises `DatabaseFailed`, `Damaged`."""
        with self._leading, translated():
            self._check_open()
            self._writer.execute("PRAGMA busy_timeout=0").fetchall()
            try:
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                self._writer.execute(f"PRAGMA busy_timeout={int(1000 * BUSY_S)}").fetchall()

    def close(self) -> None:
        """End the transaction under way; reads under way go on. The last process to close the database moves its log
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
        """Carry out all changes that wait."""
        with self._lock:
            group, self._waiting = self._waiting, []
        try:
            self._carry_out(group)
        finally:  # after an interrupt the next one that waits leads the others
            with self._lock:
                self._waiting += [change for change in group if not change.is_done]

    def _carry_out(self, group: list[Change[Any]]) -> None:
        """Run them in one transaction. If that fails as a whole, each gets one of its own."""
        try:
            self._transaction(group)
        except Exception as error:
            if len(group) == 1:
                group[0].error = group[0].error or error
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
                if len(group) == 1:
                    group[0].try_alone(connection)
                else:
                    for change in group:
                        change.try_in(connection)
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

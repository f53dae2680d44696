"""SQLite whose every step on its files a test sees first, and may refuse. Over `apsw`, with the errors of `sqlite3`."""

import errno
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal

import apsw

from stoker_worker.memory.database import Connection, configure


@dataclass(frozen=True)
class Step:
    """A step on one of SQLite's files.

    Attributes:
        data: what is written.
        number: the offset of a write; the size after a truncation.
    """

    kind: Literal["open", "write", "truncate", "sync", "delete"]
    path: Path
    data: bytes = b""
    number: int = 0


Watch = Callable[[Step], None]
"""Called before each step. An `OSError` that it raises is what SQLite gets instead of the step."""

_numbers = count()
_FAULTS: Final = {
    "open": apsw.SQLITE_CANTOPEN,
    "write": apsw.SQLITE_IOERR_WRITE,
    "truncate": apsw.SQLITE_IOERR_TRUNCATE,
    "sync": apsw.SQLITE_IOERR_FSYNC,
    "delete": apsw.SQLITE_IOERR_DELETE,
}


class WatchedSqlite:
    """A `connector` for stores and databases."""

    def __init__(self, watch: Watch) -> None:
        self._vfs = _Vfs(watch)

    def __call__(self, path: Path) -> Connection:
        with _as_sqlite3():
            connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE, vfs=self._vfs.name)
            connection.set_busy_timeout(30_000)
        watched = _Connection(connection)
        configure(watched)
        return watched


class _Connection:
    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, parameters: Any = (), /) -> "_Cursor":
        with _as_sqlite3():
            return _Cursor(self._connection.execute(sql, tuple(parameters)))

    def close(self) -> None:
        with _as_sqlite3():
            self._connection.close()


class _Cursor:
    def __init__(self, cursor: apsw.Cursor) -> None:
        self._cursor = cursor

    def fetchone(self) -> Any:
        return next(iter(self), None)

    def fetchall(self) -> list[Any]:
        return list(self)

    def close(self) -> None:
        self._cursor.close(force=True)

    def __iter__(self) -> Iterator[Any]:
        while True:
            with _as_sqlite3():
                row = next(self._cursor, None)
            if row is None:
                return
            yield row


@contextmanager
def _as_sqlite3() -> Iterator[None]:
    try:
        yield
    except apsw.Error as failure:
        error: Any = failure
        kinds = {apsw.CorruptError: sqlite3.DatabaseError, apsw.NotADBError: sqlite3.DatabaseError}
        kinds[apsw.ConstraintError] = sqlite3.IntegrityError
        translated = kinds.get(type(error), sqlite3.OperationalError)(str(error))
        translated.sqlite_errorcode = error.extendedresult
        raise translated from failure


class _Vfs(apsw.VFS):
    def __init__(self, watch: Watch) -> None:
        self.name = f"watched {next(_numbers)}"
        self._watch = watch
        super().__init__(self.name, "")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        if name is None:  # a temporary file
            return apsw.VFSFile("", name, flags)
        path = Path(name.filename() if isinstance(name, apsw.URIFilename) else name)
        with _refusing("open"):
            self._watch(Step("open", path))
        return _File(name, flags, path, self._watch)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        with _refusing("delete"):
            self._watch(Step("delete", Path(filename)))
        super().xDelete(filename, syncdir)


class _File(apsw.VFSFile):
    def __init__(self, name: Any, flags: list[int], path: Path, watch: Watch) -> None:
        self._path = path
        self._watch = watch
        super().__init__("", name, flags)

    def xWrite(self, data: Any, offset: int) -> None:
        with _refusing("write"):
            self._watch(Step("write", self._path, bytes(data), offset))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:
        with _refusing("truncate"):
            self._watch(Step("truncate", self._path, number=newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        with _refusing("sync"):
            self._watch(Step("sync", self._path))
        super().xSync(flags)


@contextmanager
def _refusing(kind: str) -> Iterator[None]:
    fault: Any
    try:
        yield
    except OSError as refusal:
        if refusal.errno == errno.ENOSPC and kind == "write":
            fault, code = apsw.FullError(str(refusal)), apsw.SQLITE_FULL
        else:
            fault, code = apsw.IOError(str(refusal)), _FAULTS[kind]
        fault.extendedresult = code
        raise fault from refusal

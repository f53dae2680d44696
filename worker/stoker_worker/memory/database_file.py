"""The file of a store's database: its tables, and how it is made, checked, opened or refused, and replaced. Any thread
of any process. Imports nothing slow, for short commands.

A replacement is decided by one rename; the next open finishes what a crash leaves undone. The old log moves with its
database: SQLite would apply it to whatever has that name.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from stoker_shared.durable_file import sync
from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.database import NAME, Connection, Damaged, Database, Witness, connect, translated
from stoker_worker.memory.files import Disk

HOW_TO_GO_ON: Final = (
    "with the worker stopped, put a backup back with 'stoker-worker memory restore BACKUP', or take over every agent "
    "that is whole with 'stoker-worker memory salvage'"
)
COMPANIONS: Final = ("-journal", "-wal", "-shm")
"""Name endings of the files that SQLite may put beside a database."""
_DECIDED: Final = f"{NAME}.new-"
_KEPT: Final = f"{NAME}.replaced-"

FORMAT: Final = 9
"""SQLite's `user_version`. No release wrote a lower one. ``docs/storage-format.md`` explains every column, and
"Formats" there what a change of the tables needs."""

APPLICATION_ID: Final = 0x53544F4B
"""``STOK``: SQLite's `application_id`, by which `file` and we know the database as a store's."""

TABLES: Final = """
CREATE TABLE store (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    commits INTEGER NOT NULL,
    cache_bytes INTEGER NOT NULL,
    tables BLOB NOT NULL,
    shared TEXT,
    clock_s REAL NOT NULL DEFAULT 0
);
INSERT INTO store VALUES (1, 0, 0, x'', NULL, 0);

CREATE TABLE agents (
    number INTEGER PRIMARY KEY,
    agent_id TEXT NOT NULL UNIQUE,
    key BLOB NOT NULL,
    version INTEGER NOT NULL,
    head BLOB NOT NULL,
    unsaved INTEGER NOT NULL,
    checksum BLOB NOT NULL,
    turns INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    transcript_bytes INTEGER NOT NULL,
    piece_bytes INTEGER NOT NULL,
    last_block BLOB,
    evicted INTEGER NOT NULL,
    last_used REAL NOT NULL,
    used_clock_s REAL NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX agents_by_key ON agents (key);
CREATE INDEX agents_by_use ON agents (last_used);
CREATE INDEX agents_by_clock ON agents (used_clock_s);
CREATE INDEX agents_with_cache ON agents (last_used) WHERE piece_bytes > 0 OR last_block IS NOT NULL;
CREATE INDEX agents_by_block ON agents (last_block) WHERE last_block IS NOT NULL;

CREATE TABLE turns (
    agent INTEGER NOT NULL,
    version INTEGER NOT NULL,
    parent BLOB,
    delivery BLOB,
    about TEXT NOT NULL,
    keep_tokens INTEGER NOT NULL,
    keep_messages INTEGER NOT NULL,
    keep_text INTEGER NOT NULL,
    new_tokens BLOB NOT NULL,
    new_messages TEXT,
    new_text TEXT,
    checksum BLOB NOT NULL,
    PRIMARY KEY (agent, version)
);

CREATE TABLE deliveries (
    agent INTEGER NOT NULL,
    key BLOB NOT NULL,
    result TEXT NOT NULL,
    expires REAL NOT NULL,
    checksum BLOB NOT NULL,
    PRIMARY KEY (agent, key)
) WITHOUT ROWID;
CREATE INDEX deliveries_by_expiry ON deliveries (expires);

CREATE TABLE blocks (
    address BLOB PRIMARY KEY,
    parent BLOB NOT NULL,
    model TEXT NOT NULL,
    n_bytes INTEGER NOT NULL,
    chain_bytes INTEGER NOT NULL,
    unused_since REAL,
    checkpoint_bytes INTEGER NOT NULL DEFAULT 0,
    checkpoint_saves INTEGER,
    checkpoint_uses INTEGER NOT NULL DEFAULT 0,
    checkpoint_used REAL
) WITHOUT ROWID;
CREATE INDEX blocks_by_parent ON blocks (parent);
CREATE INDEX blocks_unused ON blocks (unused_since) WHERE unused_since IS NOT NULL;
CREATE INDEX blocks_with_checkpoint ON blocks (checkpoint_bytes) WHERE checkpoint_bytes > 0;

CREATE TABLE models (
    fingerprint TEXT PRIMARY KEY,
    cache TEXT NOT NULL
) WITHOUT ROWID;
"""


def has_database(folder: Path) -> bool:
    return (folder / NAME).exists()


def create_database(folder: Path, files: Disk, connector: Callable[[Path], Connection] = connect) -> None:
    """Make an empty database, unless there is one: whole under its name, or not there. Processes that do so at once
    wait for each other. Raises `OSError`, `Damaged`: it could not be made."""
    with _locked(folder):
        if has_database(folder):
            return
        draft = folder / f"{NAME}.draft"
        for path in (draft, *(draft.with_name(f"{draft.name}{end}") for end in COMPANIONS)):
            files.remove(path)
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with translated():
            connection = connector(draft)
            try:
                make_tables(connection)
                connection.execute("PRAGMA journal_mode=WAL").fetchall()
            finally:
                connection.close()
        files.rename(draft, folder / NAME)
        files.flush(folder)
        for parent in folder.absolute().parents:  # some may be as new as the folder
            with suppress(OSError):
                files.sync_folder(parent)


def open_database(
    folder: Path, connector: Callable[[Path], Connection] = connect, *, make: Callable[[], None] | None = None
) -> Database:
    """The database of the store at `folder`; `make` is called if there never was one. Raises `StoreUnusable`, which
    explains how to go on: there is none, it is damaged, of another format, or lacks its newest transactions; `OSError`:
    it cannot be used now."""
    finish_replacement(folder)
    if not has_database(folder):
        if Witness(folder).path.exists() or (folder / f"{NAME}-wal").exists():
            raise StoreUnusable(f"the database of the store at {folder} is missing; {HOW_TO_GO_ON}")
        if make is None:
            raise StoreUnusable(f"there is no store at {folder}")
        make()
    with refused_if_damaged(folder / NAME):
        check_database(folder)
        return Database(folder, connector)


def with_way_on(error: Exception) -> str:
    """The message of an error, and for damage how to go on."""
    return f"{error}; {HOW_TO_GO_ON}" if isinstance(error, Damaged) else str(error)


@contextmanager
def refused_if_unusable(folder: Path) -> Iterator[None]:
    """While a store is opened, raises every error of its files and its database as `StoreUnusable`."""
    try:
        yield
    except (OSError, ValueError) as error:  # `Damaged` is a `ValueError`, and so is a malformed number
        raise StoreUnusable(f"the store folder {folder} cannot be used: {with_way_on(error)}") from error


@contextmanager
def refused_if_damaged(path: Path) -> Iterator[None]:
    """Raises `Damaged`, which stays inside this package, as `StoreUnusable` for the store or file at `path`."""
    try:
        yield
    except Damaged as damage:
        raise StoreUnusable(f"{path}: {with_way_on(damage)}") from damage


def make_tables(connection: Connection) -> None:
    """Fill an empty database. Raises `sqlite3.Error`."""
    connection.execute("PRAGMA page_size=4096")
    for statement in ["BEGIN IMMEDIATE", *_statements(TABLES)]:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={FORMAT}")
    seal_tables(connection)
    connection.execute("COMMIT")


def seal_tables(connection: Connection) -> None:
    """Note the tables and their places in the file: `open_database` refuses others. Call this after a change of the
    tables, and after anything that moves them. Raises `sqlite3.Error`."""
    connection.execute("UPDATE store SET tables = ?", (_digest(connection),))


def check_database(folder: Path) -> None:
    """Check a store's database: header, size, format, tables and the number of transactions, but not its pages. Raises
    as `open_database`. The connection cannot write: one that can would, when it is closed, move what SQLite can read of
    a damaged log into the database, and delete the log."""
    testified = Witness(folder).read()  # first: another process may commit meanwhile
    path = folder / NAME
    with translated(), closing(connect(path, "ro")) as found:
        found.execute("BEGIN")
        check_header(found, journal_mode="wal")
        log = folder / f"{NAME}-wal"
        n_bytes = _value(found, "PRAGMA page_count") * 4096
        if n_bytes != path.stat().st_size and not (log.exists() and log.stat().st_size):
            raise Damaged(f"it has {path.stat().st_size} bytes, and should have {n_bytes}")
        if (format_ := _value(found, "PRAGMA user_version")) != FORMAT:
            raise StoreUnusable(
                f"{path} has format {format_}; this version of stoker reads format {FORMAT}; run the version "
                f"that wrote it, or name another folder with --store; if none did, it is damaged: {HOW_TO_GO_ON}"
            )
        commits = check_tables(found)
        if testified is not None and commits < testified:
            raise Damaged(f"its newest {testified - commits} transactions are missing")


def check_header(connection: Connection, **also: object) -> None:
    """A damaged header can make SQLite treat other pages as its own bookkeeping. `also`: more pragmas, and their
    values. Raises `Damaged`: it is not the header of a store's database."""
    expected = {"application_id": APPLICATION_ID, "auto_vacuum": 0, "encoding": "UTF-8", "page_size": 4096}
    for pragma, value in {**expected, **also}.items():
        if (found := _value(connection, f"PRAGMA {pragma}")) != value:
            raise Damaged(f"its {pragma} is {found!r}")


def check_tables(connection: Connection) -> int:
    """How many transactions the database has had. Raises `Damaged`: its tables are not those of a store."""
    if _value(connection, "SELECT tables FROM store WHERE id = 1") != _digest(connection):
        raise Damaged("its tables are not those of a store")
    commits = _value(connection, "SELECT commits FROM store WHERE id = 1")
    if not isinstance(commits, int):
        raise Damaged("its row in table store is damaged")
    return commits


def _statements(script: str) -> list[str]:
    return [statement for part in script.split(";\n") if (statement := part.strip().rstrip(";"))]


def _value(connection: Connection, sql: str) -> Any:
    row = connection.execute(sql).fetchone()
    if row is None:
        raise Damaged(f"{sql!r} finds nothing")
    return row[0]


def _digest(connection: Connection) -> bytes:
    """A digest of the tables and indexes, their SQL and their first pages."""
    rows = connection.execute("SELECT type, name, tbl_name, rootpage, sql FROM sqlite_schema ORDER BY name").fetchall()
    return hashlib.sha256(repr([tuple(row) for row in rows]).encode()).digest()


def replace_database(folder: Path, whole: Path) -> Path:
    """Make `whole`, a closed database in the same file system, the store's; returns the name under which the old one is
    kept. The caller holds `StoreLock`. Raises `OSError`: nothing has changed, or the next start finishes it."""
    when = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S.%fZ")
    sync(whole)
    with _locked(folder):
        whole.rename(folder / f"{_DECIDED}{when}")
        sync(folder, to_platter=True)
        _finish(folder)
    return folder / f"{_KEPT}{when}"


def finish_replacement(folder: Path) -> None:
    """Finish a replacement that a crash interrupted, if any. Raises `OSError`."""
    if any(folder.glob(f"{_DECIDED}*")):
        with _locked(folder):
            _finish(folder)


def _finish(folder: Path) -> None:
    for new in folder.glob(f"{_DECIDED}*"):
        kept = folder / new.name.replace(_DECIDED, _KEPT)
        for end in ("", "-wal"):
            with suppress(FileNotFoundError):
                (folder / f"{NAME}{end}").rename(kept.with_name(f"{kept.name}{end}"))
        (folder / f"{NAME}-shm").unlink(missing_ok=True)
        sync(folder, to_platter=True)  # never the new database beside the old log
        new.rename(folder / NAME)
        sync(folder, to_platter=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time makes or replaces the database. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

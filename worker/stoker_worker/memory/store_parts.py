"""The parts of a store by name, and how a store is opened: made, checked, refused. Any thread.

Several processes may have a store open, the worker and the shell's commands; SQLite's locks and atomic renames keep
them apart. Only one of them is a worker (`locks.StoreLock`).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.blocks import BlockFolder, PieceFolder
from stoker_worker.memory.connection import Connection, connect
from stoker_worker.memory.database import Database
from stoker_worker.memory.database_file import (
    HOW_TO_GO_ON,
    create_database,
    has_database,
    open_database,
    refused_if_damaged,
    refused_if_unusable,
)
from stoker_worker.memory.files import Disk, DurableWriter
from stoker_worker.memory.next_version import Alone, NextVersion, Replica
from stoker_worker.memory.unsaved import UnsavedTurns

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class StoreParts:
    """An open store.

    Attributes:
        replica: what it is a copy of.
    """

    path: Path
    files: Disk
    database: Database
    writer: DurableWriter
    blocks: BlockFolder
    pieces: PieceFolder
    replica: Replica = field(default_factory=Alone)

    @property
    def temp(self) -> Path:
        return self.path / "tmp"

    def commit_next(self, version: Callable[[], NextVersion], change: Callable[[Connection], T]) -> T | None:
        """Make the version the agent's newest one, there and here, by the transaction of `change`.

        Returns:
            what `change` returned; ``None``: it failed here, but the version is in the shared store, and so it is made.
            The next look brings it in.

        Raises:
            VersionTaken, SharedStoreAway: as `Replica.publish`; nothing has changed here.
            Exception: there is no shared store, and `change` failed; nothing has changed.
        """
        if not self.replica.is_shared:
            return self.database.commit(change)
        made = version()
        self.replica.publish(made)

        def run(connection: Connection) -> T:
            result = change(connection)
            self.replica.committed(connection, made)
            return result

        try:
            return self.database.commit(run)
        except Exception as error:
            name, number = made.agent_id, made.number
            _log.warning("agent %r: version %d is in the shared store, and comes here later: %s", name, number, error)
            return None

    def close(self) -> None:
        self.database.close()


def open_parts(
    path: Path,
    files: Disk | None = None,
    *,
    create: bool = False,
    connector: Callable[[Path], Connection] = connect,
) -> StoreParts:
    """Open the store at `path`.

    Args:
        create: make it if there is none, or if a crash left it half made.

    Raises:
        StoreUnusable: there is none, it is damaged or of another format, or it cannot be used.
    """
    files = Disk() if files is None else files
    writer = DurableWriter(files, path / "tmp")

    def make() -> None:
        make_folders(path, writer)
        has_caches = any(True for name in ("blocks", "pieces") for _ in (path / name).iterdir())
        if has_caches and not has_database(path):  # there is one as soon as another process has made it
            raise StoreUnusable(f"there are caches at {path}, and no database; {HOW_TO_GO_ON}")
        create_database(path, files, connector)

    with refused_if_unusable(path):
        database = open_database(path, connector, make=make if create else None)
    blocks, pieces = BlockFolder(path / "blocks", writer), PieceFolder(path / "pieces", writer)
    return StoreParts(path, files, database, writer, blocks, pieces)


def make_folders(path: Path, writer: DurableWriter) -> None:
    """Raises `OSError`."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
    for name in ("", "tmp", "blocks", "pieces"):
        writer.make_folder(path / name)


@contextmanager
def opened(path: Path) -> Iterator[StoreParts]:
    """A store that exists, for one command; a worker may have it open too.

    Raises:
        StoreUnusable: as `open_parts`, or the command came to a damaged page.
    """
    with closing(open_parts(path)) as parts, refused_if_damaged(path):
        with refused_if_unusable(path):
            UnsavedTurns(path, parts.database, parts.files).move_all()
        yield parts

"""Puts another database in the place of a store's, and keeps the old one beside it. The caller holds `StoreLock`.

The change is decided by one rename; what a crash leaves undone after it is done when the store is next opened. The old
log moves with its database: SQLite would apply it to whatever has that name.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from stoker_shared.durable_file import sync
from stoker_worker.memory.database import NAME

_DECIDED: Final = f"{NAME}.new-"
_KEPT: Final = f"{NAME}.replaced-"


def replace_database(folder: Path, whole: Path) -> Path:
    """Make `whole`, a closed database in the same file system, the store's.

    Returns:
        the name under which the old one is kept.

    Raises:
        OSError: nothing has changed, or the next start finishes it.
    """
    when = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S.%fZ")
    sync(whole)
    with locked(folder):
        whole.rename(folder / f"{_DECIDED}{when}")
        sync(folder, to_platter=True)
        _finish(folder)
    return folder / f"{_KEPT}{when}"


def finish_replacement(folder: Path) -> None:
    """Do what a crash left undone, if anything. Raises `OSError`."""
    if any(folder.glob(f"{_DECIDED}*")):
        with locked(folder):
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
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time makes or replaces the database. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

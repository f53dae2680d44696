"""The right to be a store's only worker, and to replace its database. Any thread."""

import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import Final

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.database_file import refused_if_unusable

_log = logging.getLogger(__name__)

_PROBE_S: Final = 0.05


class StoreLock:
    """The right to be the store's only worker, until `close`; the kernel takes it back when the process dies.

    Raises:
        StoreUnusable: another process has it, and the message names that process.
    """

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        """`wait`: wait for the other process to end, instead of refusing."""
        with refused_if_unusable(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file: int | None = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                self._take(path, self._file, wait)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _take(self, path: Path, lock: int, wait: bool) -> None:
        has_it = _try_lock(lock)
        if not has_it:
            time.sleep(_PROBE_S)  # `is_in_use` may have had it for a moment
            has_it = _try_lock(lock)
        if not has_it:
            in_use = f"the store folder {path} is in use by {_named_in(lock)}"
            if not wait:
                raise StoreUnusable(in_use) from None
            _log.info("standing by: %s", in_use)
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def is_in_use(path: Path) -> bool:
    """Whether a process has the store's `StoreLock`. Raises `OSError`."""
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return not _try_lock(lock)
    finally:
        os.close(lock)


def holder_of(path: Path) -> str | None:
    """The process that has the store's `StoreLock`, as ``pid N on HOST``; ``None``: no process. Makes no file. Raises
    `OSError`."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return None if _try_lock(lock) else _named_in(lock)
    finally:
        os.close(lock)


def _named_in(lock: int) -> str:
    return os.pread(lock, 300, 0).decode(errors="replace").strip() or "another process"


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""The store's folder: its lock and its format. Runs once, on the main thread, before the worker starts."""

import contextlib
import fcntl
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any, Final

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.files import DurableWriter, Files
from stoker_worker.memory.tombstones import Tombstones

_log = logging.getLogger(__name__)

FORMAT: Final = 4
_READABLE: Final = (1, 2, 3, FORMAT)
"""Format 1 had native blocks and tails only, format 2 no digest of the request, format 3 no message without content and
no ``forgotten/``: everything in them is valid in 4."""


class StoreFolder:
    """An open store, locked until `close`.

    Raises:
        StoreUnusable: another process has it, it is of an unknown format, or it cannot be written.
    """

    def __init__(self, path: Path, files: Files, *, clear: bool = True, wait: bool = False) -> None:
        """
        Args:
            clear: empty the temp folder of what a crash left, and upgrade an old format.
            wait: wait for a process that holds the store to end, instead of refusing.
        """
        self.agents = path / "agents"
        self.blocks = path / "blocks"
        temp = path / "tmp"
        self.writer = DurableWriter(files, temp)
        self._lock: int | None = None
        try:
            if not path.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                self.writer.make_folder(path)
            self._lock = _locked(path / "lock", wait=wait)
            written = self._known_format(path / "store.json")
            self.writer.make_folder(temp)
            if clear:
                self.writer.clear()
                if written != FORMAT:  # before anything is written that is new in this format
                    self.writer.put(path / "store.json", [json.dumps({"format": FORMAT}).encode() + b"\n"])
                    files.flush(path)
            self.writer.make_folder(self.agents)
            self.writer.make_folder(self.blocks)
            self.writer.make_folder(path / "forgotten")
            if clear:
                Tombstones(path / "forgotten", files, self.writer).tidy()
        except OSError as error:
            self.close()
            raise StoreUnusable(f"the store folder {path} cannot be used: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the store."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _known_format(self, path: Path) -> int | None:
        """The format in store.json; ``None`` for a store that does not exist yet."""
        return check_format(path) if path.exists() or self.agents.exists() else None


def check_format(path: Path) -> int:
    """The format in `path` (store.json).

    Raises:
        StoreUnusable: this code does not read it.
    """
    found = _format_of(path)
    if type(found) is not int or found not in _READABLE:
        raise StoreUnusable(f"{path} has format {found!r}; this version of stoker reads format {FORMAT} and older")
    return found


def _format_of(path: Path) -> Any:
    """The format in store.json; ``None`` when there is none."""
    with contextlib.suppress(FileNotFoundError, ValueError, AttributeError):
        return json.loads(path.read_bytes()).get("format")
    return None


def _locked(path: Path, *, wait: bool) -> int:
    """Descriptor of the lock file, locked until it is closed; the kernel unlocks it when the process dies."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 300, 0).decode(errors="replace").strip() or "another process"
            in_use = f"the store folder {path.parent} is in use by {holder}"
            if not wait:
                raise StoreUnusable(in_use) from None
            _log.info("standing by: %s", in_use)
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock

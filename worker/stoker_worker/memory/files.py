"""The operations that change cache files, folders and notes: each can fail or be cut short. Knows no format.

Tests use disks that stop after any step. Finisher threads write turns; loader threads read, and remove damaged files.
Many pieces of memory are read and written as one file, a megabyte with each system call: a call for each piece costs
more than copying its bytes, and joining the pieces first costs another copy.
"""

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from stoker_shared.durable_file import sync

Chunk = bytes | memoryview
"""Some bytes; arrays travel as views of their own memory, never as copies."""

_AT_ONCE_BYTES: Final = 1 << 20
"""Few enough to be still in the processor's cache when the caller looks at them."""
_MOST_PIECES: Final = 256
"""Every system allows at least 1024 in one call."""


def write_all(file: int, pieces: Iterable[Chunk]) -> None:
    """Write the pieces one after the other. Raises `OSError`."""
    for part in in_parts(pieces):
        missing = part
        while missing:
            missing = _behind(missing, os.writev(file, missing))


def fill(file: int, targets: list[memoryview]) -> bool:
    """Read until the targets, one part of `in_parts`, are full; ``False``: the file ends first. Raises `OSError`."""
    missing = targets
    while missing:
        n_read = os.readv(file, missing)
        if n_read == 0:
            return False
        missing = _behind(missing, n_read)
    return True


def in_parts(pieces: Iterable[Chunk]) -> Iterator[list[memoryview]]:
    """The same memory in the same order, without empty pieces, in parts for one system call."""
    part: list[memoryview] = []
    room = _AT_ONCE_BYTES
    for stretch in _stretches(pieces):
        if part and (len(stretch) > room or len(part) == _MOST_PIECES):
            yield part
            part, room = [], _AT_ONCE_BYTES
        part.append(stretch)
        room -= len(stretch)
    if part:
        yield part


def _stretches(pieces: Iterable[Chunk]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece)
        yield from (view[at : at + _AT_ONCE_BYTES] for at in range(0, len(view), _AT_ONCE_BYTES))


def _behind(pieces: list[memoryview], n_bytes: int) -> list[memoryview]:
    """The memory after the first `n_bytes`: a signal, or a file system, may end a call early."""
    for index, piece in enumerate(pieces):
        if n_bytes < len(piece):
            return [piece[n_bytes:], *pieces[index + 1 :]]
        n_bytes -= len(piece)
    return []


class Disk:
    """The steps on the real file system. Each raises `OSError`."""

    def make_folder(self, path: Path) -> None:
        """Make one folder, mode 0700, unless it is there."""
        path.mkdir(mode=0o700, exist_ok=True)

    def write(self, path: Path, chunks: Iterable[Chunk]) -> None:
        """Make a new file, mode 0600, with these bytes, unsynced."""
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            write_all(file, chunks)
        finally:
            os.close(file)

    def write_at(self, path: Path, offset: int, data: bytes) -> None:
        """Write these bytes into a file, mode 0600, which may be new, and make them durable."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            while data:
                n_bytes = os.pwrite(descriptor, data, offset)
                offset, data = offset + n_bytes, data[n_bytes:]
        finally:
            os.close(descriptor)
        sync(path, to_platter=True)

    def rename(self, source: Path, target: Path) -> None:
        """Atomically rename a file or folder; a file of that name is replaced."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and everything in it; follows no link."""
        shutil.rmtree(path)

    def sync_folder(self, path: Path) -> None:
        """Make the names in this folder survive a crash, as far as the drive's own cache."""
        sync(path)

    def flush(self, path: Path) -> None:
        """`sync_folder`, and everything synced before it reaches the platter."""
        sync(path, to_platter=True)


class CacheWriter:
    """Makes cache files whole or not at all for every process: writes into the store's temp folder, then renames.
    Nothing is synced: a power cut may take files or tear them, and every reader verifies them. One temp folder, in the
    same file system, for the whole store: what a crash leaves is found without a search."""

    _numbers = itertools.count()  # of this process: its writers, and other processes, share one temp folder

    def __init__(self, files: Disk, temp_folder: Path) -> None:
        self.files = files
        self._temp_folder = temp_folder

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents."""
        if path.is_dir():
            return
        self.make_folder(path.parent)
        self.files.make_folder(path)

    def stage(self, chunks: Iterable[Chunk]) -> Path:
        """Write a temp file, for `place`."""
        self.make_folder(self._temp_folder)  # it may have been removed
        path = self._temp_folder / f"{os.getpid()}-{next(self._numbers)}.tmp"
        with self._removed_on_failure(path):
            self.files.write(path, chunks)
        return path

    def place(self, staged: Path, target: Path) -> None:
        """Atomically give a staged file its name."""
        with self._removed_on_failure(staged):
            self.files.rename(staged, target)

    def put_all(self, files: Mapping[Path, Iterable[Chunk]]) -> None:
        """Write files, and the folders they are in. After an `OSError` some may be there."""
        for path, chunks in files.items():
            self.make_folder(path.parent)
            self.place(self.stage(chunks), path)

    @contextlib.contextmanager
    def _removed_on_failure(self, staged: Path) -> Iterator[None]:
        """A failed step removes its own file and no other: other threads write here too."""
        try:
            yield
        except OSError:
            with contextlib.suppress(OSError):
                self.files.remove(staged)
            raise

    def clear(self) -> None:
        """Remove the files of dead processes from the temp folder."""
        for path in self._temp_folder.glob("*"):
            if _is_alive(path.name.partition("-")[0]):
                continue
            if path.is_dir() and not path.is_symlink():
                self.files.remove_folder(path)
            else:
                self.files.remove(path)


def _is_alive(pid: str) -> bool:
    """True if another process of this id runs. Files of this process's own id are an earlier process's."""
    if not pid.isdecimal() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def is_there(path: Path) -> bool:
    """True if the file can be seen. Never raises, as `Path.exists` does for lack of permission."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def allocated_bytes(path: Path) -> int:
    """The bytes that a file takes on its disk; 0 if it is not there. Raises `OSError`."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0

"""The file operations that can fail or be cut short, each on its own. Owns durability; knows no format.

`Disk` is the real thing; tests put an object in its place that stops after every single step. Writes run on finaliser
threads only; the loader thread reads, and removes what it found damaged.
"""

import contextlib
import fcntl
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Protocol

Chunk = bytes | memoryview
"""A run of bytes; arrays travel as views of their own memory, never as copies."""

_FULL_SYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)
_READ_BYTES: Final = 1 << 20


class Files(Protocol):
    """Every step that changes the disk. All of them raise `OSError`."""

    def make_folder(self, path: Path) -> None:
        """Make one folder, mode 0700; one that is there already is fine."""
        ...

    def write(self, path: Path, chunks: Iterable[Chunk]) -> None:
        """Make a new file, mode 0600, with these bytes, and sync it."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Atomically give a file another name, replacing what had it."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is fine."""
        ...

    def remove_folder(self, path: Path) -> None:
        """Remove a folder with all that is in it; follows no link."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Make names made in this folder survive a crash, as far as the drive's own cache."""
        ...

    def flush(self, path: Path) -> None:
        """`sync_folder`, and everything synced before it is on the platter when this returns."""
        ...


class Disk:
    """`Files` on the real file system."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)

    def write(self, path: Path, chunks: Iterable[Chunk]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path)

    def sync_folder(self, path: Path) -> None:
        with _opened_folder(path) as descriptor:
            os.fsync(descriptor)

    def flush(self, path: Path) -> None:
        with _opened_folder(path) as descriptor:
            os.fsync(descriptor)
            if _FULL_SYNC is not None:
                # On macOS fsync stops at the drive's cache. One full sync covers all that was synced before, so two
                # a turn are enough. A file system that refuses it has nothing better than fsync.
                with contextlib.suppress(OSError):
                    fcntl.fcntl(descriptor, _FULL_SYNC)


class DurableWriter:
    """Whole files or none: writes into the store's temp folder, then renames into place.

    One temp folder for the whole store, on its file system: leftovers of a crash are found without a walk.
    """

    _numbers = itertools.count()  # of the process: several writers may use one temp folder

    def __init__(self, files: Files, temp_folder: Path) -> None:
        self._files = files
        self._temp_folder = temp_folder

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it, durably."""
        if path.is_dir():
            return
        self.make_folder(path.parent)
        self._files.make_folder(path)
        self._files.sync_folder(path.parent)

    def stage(self, chunks: Iterable[Chunk]) -> Path:
        """Write a synced temp file; the caller gives it its name with `place`."""
        path = self._temp_folder / f"{next(self._numbers)}.tmp"
        with self._removed_on_failure(path):
            self._files.write(path, chunks)
        return path

    def place(self, staged: Path, target: Path) -> None:
        """Atomically give a staged file its name."""
        with self._removed_on_failure(staged):
            self._files.rename(staged, target)

    def put(self, path: Path, chunks: Iterable[Chunk]) -> None:
        """Write a file whole; its name is durable after the next sync of its folder."""
        self.place(self.stage(chunks), path)

    @contextlib.contextmanager
    def _removed_on_failure(self, staged: Path) -> Iterator[None]:
        """Other threads write here too, so a step that fails (the disk is full) takes back its own file only."""
        try:
            yield
        except OSError:
            with contextlib.suppress(OSError):
                self._files.remove(staged)
            raise

    def clear(self) -> None:
        """Remove what a crash or a full disk left in the temp folder."""
        for path in list(self._temp_folder.iterdir()):
            if path.is_dir() and not path.is_symlink():  # an agent on its way out, or on its way in
                self._files.remove_folder(path)
            else:
                self._files.remove(path)


def is_there(path: Path) -> bool:
    """Whether the file is there as far as can be seen; never raises, as `Path.exists` does for lack of permission."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def chunks_of(path: Path) -> Iterator[bytes]:
    """A file's bytes, a piece at a time. Raises `OSError`."""
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            yield chunk


@contextlib.contextmanager
def _opened_folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

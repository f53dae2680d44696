"""Files and folders that appear whole or not at all, also after a power cut. Any thread; knows no format.

Many pieces of memory are read and written as one file, a megabyte with each system call: a call for each piece costs
more than the copy of its bytes, and joining the pieces first costs another copy.
"""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_AT_ONCE_BYTES: Final = 1 << 20
"""Few enough to be still in the processor's cache when the caller looks at them."""
_MOST_PIECES: Final = 256
"""Every system allows at least 1024 in one call."""


def write_all(file: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write the pieces one after the other. Raises `OSError`."""
    for part in in_parts(pieces):
        missing = part
        while missing:
            missing = _behind(missing, os.writev(file, missing))


def fill(file: int, targets: list[memoryview]) -> bool:
    """Read until the targets, one part of `in_parts`, are full; false when the file ends first. Raises `OSError`."""
    missing = targets
    while missing:
        n_read = os.readv(file, missing)
        if n_read == 0:
            return False
        missing = _behind(missing, n_read)
    return True


def in_parts(pieces: Iterable[bytes | memoryview]) -> Iterator[list[memoryview]]:
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


def _stretches(pieces: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece)
        yield from (view[at : at + _AT_ONCE_BYTES] for at in range(0, len(view), _AT_ONCE_BYTES))


def _behind(pieces: list[memoryview], n_bytes: int) -> list[memoryview]:
    """The memory behind the first `n_bytes`: a signal, or a file system, may end a call early."""
    for index, piece in enumerate(pieces):
        if n_bytes < len(piece):
            return [piece[n_bytes:], *pieces[index + 1 :]]
        n_bytes -= len(piece)
    return []


_FULL_SYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)


def write_new(path: Path, chunks: Iterable[bytes | memoryview], *, is_durable: bool = True) -> None:
    """Make a new file, mode 0600, with these bytes, and sync it if it is to be durable.

    Raises:
        FileExistsError: `path` exists.
        OSError: it could not be written; part of it may be there.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_all(file, chunks)
        if is_durable:
            os.fsync(file)
    finally:
        os.close(file)


def replace_file(path: Path, content: bytes) -> None:
    """Give a file this content, mode 0600. Raises `OSError`: then it is as it was."""
    with draft_of(path) as draft:
        write_new(draft, [content])


@contextmanager
def draft_of(target: Path) -> Iterator[Path]:
    """A free name beside `target`, for a file or a folder of files. When the block ends well, what it made there is
    synced and takes the place of `target`; otherwise it is removed.

    Raises:
        OSError: it could not be synced or renamed; `target` is as it was.
    """
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.draft")
    try:
        yield draft
        for path in [*draft.iterdir(), draft] if draft.is_dir() else [draft]:
            sync(path)
        draft.replace(target)
        sync(target.absolute().parent, to_platter=True)
    except BaseException as error:
        if isinstance(error, OSError) and str(error.filename) == str(draft):  # a name that nobody knows
            error.filename, error.filename2 = str(target), None
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):
            draft.unlink()
        raise


def sync(path: Path, *, to_platter: bool = False) -> None:
    """Make a file's content, or the names in a folder, survive a crash. Raises `OSError`.

    Args:
        to_platter: everything that was synced before too, through the drive's own cache.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if to_platter and _FULL_SYNC is not None:
            # On macOS fsync stops at the drive's cache. A file system that refuses this has nothing better.
            with suppress(OSError):
                fcntl.fcntl(descriptor, _FULL_SYNC)
    finally:
        os.close(descriptor)

"""Files and folders that appear whole or not at all, also after a power cut. Any thread; knows no format."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_FULL_SYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)


def write_new(path: Path, content: bytes = b"") -> None:
    """Make a new file, mode 0600, with this content, and sync it.

    Raises:
        FileExistsError: `path` exists.
        OSError: it could not be written; part of it may be there.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Give a file this content, mode 0600. Raises `OSError`: then it is as it was."""
    with draft_of(path) as draft:
        write_new(draft, content)


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

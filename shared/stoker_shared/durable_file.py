"""Files and folders that appear completely or not at all, also after a power cut. Any thread; knows no format."""

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
    """Make a new file of mode 0600 and sync it. Raises `FileExistsError`; `OSError`: part of it may be written."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Give a file this content and mode 0600. Raises `OSError`: the file is unchanged."""
    with draft_of(path) as draft:
        write_new(draft, content)


@contextmanager
def draft_of(target: Path) -> Iterator[Path]:
    """A free name beside `target`, for a file or a folder of files. When the block ends without an error, the draft is
    synced and replaces `target`; otherwise it is removed. Raises `OSError`: it could not be synced or renamed, and
    `target` is unchanged."""
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.draft")
    try:
        yield draft
        for path in [*draft.iterdir(), draft] if draft.is_dir() else [draft]:
            sync(path)
        draft.replace(target)
        sync(target.absolute().parent, to_platter=True)
    except BaseException as error:
        if isinstance(error, OSError) and str(error.filename) == str(draft):  # the caller never saw the draft's name
            error.filename, error.filename2 = str(target), None
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):
            draft.unlink()
        raise


def sync(path: Path, *, to_platter: bool = False) -> None:
    """Make a file's content, or a folder's names, survive a crash; with `to_platter`, also flush the drive's own cache,
    with all that was synced before. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if to_platter and _FULL_SYNC is not None:
            # On macOS fsync ends at the drive's cache. A file system that refuses this call offers nothing better.
            with suppress(OSError):
                fcntl.fcntl(descriptor, _FULL_SYNC)
    finally:
        os.close(descriptor)

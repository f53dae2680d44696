"""File systems that fail: by a power cut after any step, by a full disk, by unreadable files."""

import errno
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from tests.worker.memory.agents import write_at
from tests.worker.memory.watched_sqlite import Step, WatchedSqlite

from stoker_worker.memory.files import Chunk, Disk

Survivors = Literal["all", "none", "newest"]
"""Which of the steps that no sync has made durable are on the disk after the power cut."""


class PowerCut(BaseException):
    """Not an `Exception`: a process that is gone cleans nothing up."""


class CutFiles(Disk):
    """Once armed, stops before a given step, and then loses what was never synced.

    A write is three steps (nothing there, half of it, all of it but not synced); every other operation is one. A name
    that was made, replaced or removed in a folder can be lost until that folder is synced.
    """

    def __init__(self, survivors: Survivors = "all") -> None:
        self._survivors = survivors
        self._steps_left: int | None = None
        self._dead = False
        self._undo: list[tuple[Path, bytes | Path | None]] = []
        """Each unsynced change: the path, and what it held before; of a renamed folder, its name before."""

    def arm(self, cut_at: int) -> None:
        """Cut the power before step `cut_at` from now; what was done so far is durable."""
        self._steps_left = cut_at
        self._undo.clear()

    def make_folder(self, path: Path) -> None:
        self._step()
        if not path.exists():
            path.mkdir(mode=0o700)
            self._undo.append((path, None))

    def write(self, path: Path, chunks: Iterable[Chunk]) -> None:
        data = b"".join(chunks)
        self._step()
        path.write_bytes(data[: len(data) // 2])
        self._undo.append((path, None))
        self._step()
        path.write_bytes(data)
        self._step()

    def write_at(self, path: Path, offset: int, data: bytes) -> None:
        before = path.read_bytes() if path.exists() else None
        for n_bytes in (0, len(data) // 2, len(data)):
            self._step()
            write_at(path, offset, data[:n_bytes])
            if not n_bytes:
                self._undo.append((path, before))
        self._step()
        self._undo.remove((path, before))

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        before = source if source.is_dir() else target.read_bytes() if target.exists() else None
        source.replace(target)
        self._undo.append((target, before))

    def remove(self, path: Path) -> None:
        self._step()
        if path.exists():
            self._undo.append((path, path.read_bytes()))
            path.unlink()

    def remove_folder(self, path: Path) -> None:
        self._step()
        shutil.rmtree(path)

    def sync_folder(self, path: Path) -> None:
        self._step()
        self._undo = [entry for entry in self._undo if entry[0].parent != path]

    flush = sync_folder

    def cut(self) -> None:
        """The power goes: what was synced stays, and of the rest what `survivors` says."""
        self._dead = True
        if self._survivors == "all":
            return
        lost = self._undo[:-1] if self._survivors == "newest" else self._undo
        for path, before in reversed(lost):
            if isinstance(before, Path):
                path.rename(before)
            elif path.is_dir():
                shutil.rmtree(path)
            elif before is None:
                path.unlink(missing_ok=True)
            elif path.parent.is_dir():  # else it is lost with its folder
                path.write_bytes(before)

    def _step(self) -> None:
        if self._dead:
            raise PowerCut
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self.cut()
                raise PowerCut


class FullFiles(Disk):
    """Once armed, a given step fails, and `n_failures` in all, for lack of space; removing never does.

    With `connector` SQLite's steps count, and fail, too.
    """

    def __init__(self) -> None:
        self.connector = WatchedSqlite(self._sqlite_step)
        self._step_number = 0
        self._failing = range(0)
        self._errno = errno.ENOSPC

    def arm(self, fail_at: int, n_failures: int, *, number: int = errno.ENOSPC) -> None:
        """Fail at step `fail_at` from now, and at the steps behind it, with this errno."""
        self._step_number = 0
        self._failing = range(fail_at, fail_at + n_failures)
        self._errno = number

    @property
    def has_failed(self) -> bool:
        return self._step_number >= self._failing.start

    def make_folder(self, path: Path) -> None:
        self._step()
        path.mkdir(mode=0o700, exist_ok=True)

    def write(self, path: Path, chunks: Iterable[Chunk]) -> None:
        self._step()
        path.write_bytes(b"half")
        self._step()
        path.write_bytes(b"".join(chunks))

    def write_at(self, path: Path, offset: int, data: bytes) -> None:
        self._step()
        write_at(path, offset, data)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        source.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path)

    def sync_folder(self, path: Path) -> None:
        self._step()

    flush = sync_folder

    def _sqlite_step(self, step: Step) -> None:
        if step.kind in ("write", "truncate", "sync"):
            self._step()

    def _step(self) -> None:
        self._step_number += 1
        if self._step_number in self._failing:
            raise OSError(self._errno, os.strerror(self._errno))


@contextmanager
def unreadable(path: Path, number: int) -> Iterator[None]:
    """Inside, the system refuses to look into `path`: to open it or to name anything below it. `path` itself can be
    seen from above, as a folder of mode 000 can."""

    def refusing(function: Callable[..., Any], *, opens: bool) -> Callable[..., Any]:
        def call(*paths: Any, **options: Any) -> Any:
            for given in paths[:2]:
                named = Path(given) if isinstance(given, str | os.PathLike) else None
                if named is not None and (path in named.parents or (opens and named == path)):
                    raise OSError(number, os.strerror(number), str(given))
            return function(*paths, **options)

        return call

    opening, naming = ("open", "listdir", "scandir"), ("stat", "lstat", "mkdir", "rename", "replace", "unlink", "rmdir")
    functions = [(os, name, True) for name in opening] + [(os, name, False) for name in naming]
    patches = [patch.object(m, name, refusing(getattr(m, name), opens=opens)) for m, name, opens in functions]
    patches += [patch.object(m, "open", refusing(io.open, opens=True)) for m in (io, __import__("builtins"))]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in reversed(patches):
            one.stop()

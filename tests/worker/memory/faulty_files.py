"""File systems that fail: by a full disk, by unreadable files."""

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.worker.memory.agents import write_at
from tests.worker.memory.watched_sqlite import Step, WatchedSqlite

from stoker_worker.memory.files import Chunk, Disk


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

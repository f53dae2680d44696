"""A disk that records each single step on the files of a store, SQLite's too, and can be rebuilt as it was after any of
them: with all that was not synced, with none of it, or with a part of it.
"""

import itertools
import random
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal
from unittest.mock import patch

from tests.worker.memory.agents import write_at
from tests.worker.memory.watched_sqlite import Step, WatchedSqlite

from stoker_worker.memory.database import Witness
from stoker_worker.memory.files import Chunk, Disk

SECTOR: Final = 512

Survivors = Literal["all", "none", "some"]
"""Which of the writes and names that no sync has made durable are on the disk after the power cut."""

Op = tuple[Any, ...]
"""A step, by its first item:

``write`` inode offset data, ``size`` inode size, ``sync`` inode: of a file's content;
``folder`` inode: a new one; ``name`` folder name inode, ``unname`` folder name, ``sync names`` folder: of its names;
``note`` and whatever a test wants to find again."""

ROOT: Final = 0


class RecordedDisk(Disk):
    """Carries out the steps below `root`, without syncs, and records them. Any thread.

    With `connector` and `witnessed` all of a store's ways to the disk.
    """

    def __init__(self, root: Path) -> None:
        """`root`: an empty folder, durable."""
        self.root = root
        self.ops: list[Op] = []
        self.connector = WatchedSqlite(self._sqlite_step)
        self._lock = threading.RLock()
        self._inodes: dict[Path, int] = {root: ROOT}
        self._unsynced_logs: set[Path] = set()
        self._new_inodes = itertools.count(1)

    def note(self, *what: Any) -> None:
        with self._lock:
            self.ops.append(("note", *what))

    @contextmanager
    def witnessed(self) -> Iterator[None]:
        """Inside, the witnesses of databases are recorded too."""
        write = Witness.write

        def recorded(witness: Witness, commits: int) -> None:
            with self._lock:
                write(witness, commits)
                inode = self._made(witness.path)
                self.ops.append(("write", inode, 0, witness.path.read_bytes()))

        with patch.object(Witness, "write", recorded):
            yield

    def make_folder(self, path: Path) -> None:
        with self._lock:
            path.mkdir(mode=0o700, exist_ok=True)
            self._made(path, is_folder=True)

    def write(self, path: Path, chunks: Iterable[Chunk]) -> None:
        data = b"".join(chunks)
        with self._lock:
            path.write_bytes(data)
            inode, half = self._made(path), len(data) // 2
            self.ops += [("write", inode, 0, data[:half]), ("write", inode, half, data[half:])]

    def write_at(self, path: Path, offset: int, data: bytes) -> None:
        with self._lock:
            write_at(path, offset, data)
            inode = self._made(path)
            self.ops += [("write", inode, offset, data), ("sync", inode)]

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            source.replace(target)
            inode = self._inodes[target] = self._inodes.pop(source)
            self.ops.append(("name", self._inodes[target.parent], target.name, inode))
            self.ops.append(("unname", self._inodes[source.parent], source.name))

    def remove(self, path: Path) -> None:
        with self._lock:
            path.unlink(missing_ok=True)
            self._gone(path)

    def remove_folder(self, path: Path) -> None:
        with self._lock:
            shutil.rmtree(path)
            self._gone(path)

    def sync_folder(self, path: Path) -> None:
        with self._lock:
            if (inode := self._inodes.get(path)) is not None:
                self.ops.append(("sync names", inode))

    flush = sync_folder

    def _made(self, path: Path, *, is_folder: bool = False) -> int:
        if path not in self._inodes:
            inode = self._inodes[path] = next(self._new_inodes)
            if is_folder:
                self.ops.append(("folder", inode))
            self.ops.append(("name", self._inodes[path.parent], path.name, inode))
        return self._inodes[path]

    def _gone(self, path: Path) -> None:
        if self._inodes.pop(path, None) is not None:
            self.ops.append(("unname", self._inodes[path.parent], path.name))

    def _sqlite_step(self, step: Step) -> None:
        with self._lock:
            if step.kind == "delete":
                self._gone(step.path)
                return
            is_new = step.path not in self._inodes
            inode = self._made(step.path)
            if step.kind == "open":
                if is_new and step.path.name.endswith(("-wal", "-journal")):
                    self._unsynced_logs.add(step.path)
            elif step.kind == "write":
                self.ops.append(("write", inode, step.number, step.data))
            elif step.kind == "truncate":
                self.ops.append(("size", inode, step.number))
            else:
                self.ops.append(("sync", inode))
                if step.path in self._unsynced_logs:  # with a new log SQLite syncs its folder
                    self._unsynced_logs.remove(step.path)
                    self.ops.append(("sync names", self._inodes[step.path.parent]))


@dataclass
class _File:
    """A file's durable content, and what was done to it since."""

    content: bytearray = field(default_factory=bytearray)
    pending: list[Op] = field(default_factory=list)

    def after(self, survivors: Survivors, dice: random.Random) -> bytes:
        content = bytearray(self.content)
        if survivors == "all":
            for op in self.pending:
                _apply(content, op)
        elif survivors == "some":
            for op in self.pending:
                if op[0] == "size":
                    if dice.random() < 0.5:
                        _apply(content, op)
                    continue
                offset, data = op[2], op[3]
                start = 0
                while start < len(data):  # each sector by itself
                    stop = min(len(data), (offset + start) // SECTOR * SECTOR + SECTOR - offset)
                    if dice.random() < 0.5:
                        _apply(content, ("write", None, offset + start, data[start:stop]))
                    start = stop
        return bytes(content)


def _apply(content: bytearray, op: Op) -> None:
    if op[0] == "size":
        del content[op[2] :]
        content.extend(bytes(op[2] - len(content)))
    else:
        offset, data = op[2], op[3]
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data


class Replay:
    """The disk after the first steps of a recording, one more with each `step`."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = defaultdict(_File)
        self._folders: dict[int, dict[str, int]] = {ROOT: {}}
        self._pending_names: dict[int, list[Op]] = defaultdict(list)

    def step(self, op: Op) -> None:
        kind = op[0]
        if kind in ("write", "size"):
            self._files[op[1]].pending.append(op)
        elif kind == "sync":
            file = self._files[op[1]]
            for pending in file.pending:
                _apply(file.content, pending)
            file.pending.clear()
        elif kind == "folder":
            self._folders[op[1]] = {}
        elif kind in ("name", "unname"):
            self._pending_names[op[1]].append(op)
        elif kind == "sync names":
            for pending in self._pending_names.pop(op[1], []):
                _rename(self._folders[op[1]], pending)

    def write_to(self, folder: Path, survivors: Survivors, dice: random.Random, inode: int = ROOT) -> None:
        """Make the disk as a power cut now leaves it, in an empty folder."""
        names = dict(self._folders[inode])
        for op in self._pending_names.get(inode, ()):
            if survivors == "all" or (survivors == "some" and dice.random() < 0.5):
                _rename(names, op)
        for name, child in names.items():
            path = folder / name
            if child in self._folders:
                path.mkdir(mode=0o700)
                self.write_to(path, survivors, dice, child)
            else:
                path.write_bytes(self._files[child].after(survivors, dice))
                path.chmod(0o600)


def _rename(names: dict[str, int], op: Op) -> None:
    if op[0] == "name":
        names[op[2]] = op[3]
    else:
        names.pop(op[2], None)

"""A store's locks, and the name of its worker. Any thread of any process.

`StoreLock` is the right to be the store's only worker, and to replace its database. `InFlight` keeps two processes, the
worker and a command of the shell, from working on one agent. Each agent has a byte in the file ``STORE/in-flight``, and
the process that works on the agent locks that byte; the file stays empty, because bytes beyond its end can be locked
too. The kernel releases the locks of a process that dies.
"""

import fcntl
import hashlib
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from stoker_shared.durable_file import replace_file
from stoker_shared.errors import AgentBusy, StoreUnusable
from stoker_worker.memory.database_file import refused_if_unusable

_log = logging.getLogger(__name__)

_IN_FLIGHT: Final = "in-flight"
_WAIT_S: Final = 10.0
"""How long the worker waits for a command of the shell. Most need milliseconds."""
_LOOK_S: Final = 0.02

NAME_FILE: Final = "worker-name"
_WORKER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class StoreLock:
    """The right to be the store's only worker, until `close` or the end of the process. Raises `StoreUnusable`: another
    process has it, and the message names that process."""

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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 300, 0).decode(errors="replace").strip()
            in_use = f"the store folder {path} is in use by {holder or 'another process'}"
            if not wait:
                raise StoreUnusable(in_use) from None
            _log.info("standing by: %s", in_use)
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


class InFlight:
    """The agents that the owner of this object works on. Raises `OSError`: the file cannot be opened."""

    def __init__(self, folder: Path, *, wait_s: float = _WAIT_S) -> None:
        """`wait_s`: how long to wait for another process that works on an agent."""
        self._wait_s = wait_s
        self._file = _LockedFile.opened(folder / _IN_FLIGHT)
        self._lock = threading.Lock()
        self._pinned: frozenset[str] = frozenset()
        self._passing: Counter[str] = Counter()
        self._held: set[str] = set()

    def pin(self, agents: frozenset[str]) -> None:
        """From now on hold these agents, and no others but those of `working_on`. Never blocks: an agent that another
        process holds is taken later, by `wait_for`."""
        with self._lock:
            self._pinned = agents
            self._take_and_release()

    def wait_for(self, agent_id: str) -> None:
        """If the agent is pinned, wait until no other process works on it. Raises `AgentBusy` after `wait_s`."""
        until = time.monotonic() + self._wait_s
        while not self._has_if_wanted(agent_id):
            if time.monotonic() >= until:
                raise AgentBusy(f"another process is working on agent {agent_id!r}")
            time.sleep(_LOOK_S)

    @contextmanager
    def working_on(self, agent_id: str) -> Iterator[None]:
        """Inside, no other process works on the agent. Raises `AgentBusy` as `wait_for`."""
        with self._lock:
            self._passing[agent_id] += 1
        try:
            self.wait_for(agent_id)
            yield
        finally:
            with self._lock:
                self._passing -= Counter((agent_id,))
                self._take_and_release()

    def close(self) -> None:
        """Release all agents."""
        with self._lock:
            self._pinned, self._passing = frozenset(), Counter()
            self._take_and_release()
            self._file.close()

    def _has_if_wanted(self, agent_id: str) -> bool:
        with self._lock:
            return not (agent_id in self._pinned or agent_id in self._passing) or self._take(agent_id)

    def _take_and_release(self) -> None:
        wanted = self._pinned.union(self._passing)
        for agent_id in self._held - wanted:
            self._file.unlock(_byte_of(agent_id))
        self._held &= wanted
        for agent_id in wanted:
            self._take(agent_id)

    def _take(self, agent_id: str) -> bool:
        if agent_id not in self._held and self._file.lock(_byte_of(agent_id), self):
            self._held.add(agent_id)
        return agent_id in self._held


@contextmanager
def working_on(folder: Path, agent_id: str, *, wait: bool = False) -> Iterator[None]:
    """For a command of the shell: inside, no other process works on the agent of the store in `folder`. `wait`: wait
    for other processes, instead of refusing. Raises `AgentBusy`: another process works on it."""
    in_flight = InFlight(folder, wait_s=float("inf") if wait else 0.0)
    try:
        with in_flight.working_on(agent_id):
            yield
    finally:
        in_flight.close()


class _LockedFile:
    """A file whose bytes this process locks; one object for each file, because closing any descriptor of it would
    unlock all of the process's bytes."""

    _all: Final[dict[str, "_LockedFile"]] = {}
    _lock: Final = threading.Lock()

    def __init__(self, path: str) -> None:
        self._path = path
        self._n_users = 0
        self._owners: dict[int, object] = {}
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    @classmethod
    def opened(cls, path: Path) -> "_LockedFile":
        """Raises `OSError`."""
        name = os.path.realpath(path)
        with cls._lock:
            file = cls._all.get(name) or cls(name)
            cls._all[name] = file
            file._n_users += 1
            return file

    def lock(self, byte: int, owner: object) -> bool:
        """Lock the byte unless another process, or another owner here, has it; returns whether `owner` has it now."""
        with self._lock:
            if self._owners.get(byte, owner) is not owner:
                return False
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except OSError:  # another process has it, or the file system gives no locks
                return False
            self._owners[byte] = owner
            return True

    def unlock(self, byte: int) -> None:
        with self._lock, suppress(OSError):
            self._owners.pop(byte, None)
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, byte)

    def close(self) -> None:
        """Once for each `opened`."""
        with self._lock:
            self._n_users -= 1
            if not self._n_users:
                del self._all[self._path]
                os.close(self._fd)


def _byte_of(agent_id: str) -> int:
    return int.from_bytes(hashlib.sha256(agent_id.encode()).digest()[:8], "big") >> 2


def store_name(folder: Path) -> str:
    """The name of the store's worker, made by the first call, and anew if it is damaged. Raises `StoreUnusable`."""
    path = folder / NAME_FILE
    with refused_if_unusable(folder):
        kept = path.read_text(errors="replace").strip() if path.exists() else None
        if kept is not None:
            if _WORKER_NAME.fullmatch(kept):
                return kept
            _log.warning("%s is damaged; this store's worker gets a new name", path)
        name = f"{re.sub(r'[^A-Za-z0-9._-]', '-', socket.gethostname())[:50]}-{secrets.token_hex(3)}"
        replace_file(path, f"{name}\n".encode())
    return name

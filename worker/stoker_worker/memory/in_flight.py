"""Keeps two processes from working on one agent: the worker that runs its jobs, and a command of the shell. Any thread.

Each agent has a byte in the file ``STORE/in-flight``, and the process that works on the agent has that byte locked. The
kernel unlocks the bytes of a process that dies. The file stays empty: bytes behind its end can be locked too.
"""

import fcntl
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from stoker_shared.errors import AgentBusy

_NAME: Final = "in-flight"
_WAIT_S: Final = 10.0
"""How long the worker waits for a command of the shell. Most need milliseconds."""
_LOOK_S: Final = 0.02


class InFlight:
    """The agents that the owner of this object works on.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, folder: Path, *, wait_s: float = _WAIT_S) -> None:
        """`wait_s`: how long it waits for another process that works on an agent."""
        self._wait_s = wait_s
        self._file = _LockedFile.opened(folder / _NAME)
        self._lock = threading.Lock()
        self._pinned: frozenset[str] = frozenset()
        self._passing: Counter[str] = Counter()
        self._held: set[str] = set()

    def pin(self, agents: frozenset[str]) -> None:
        """From now on work on these agents, and on no others but those of `working_on`. Never blocks: an agent that
        another process works on is only taken by `wait_for`."""
        with self._lock:
            self._pinned = agents
            self._take_and_release()

    def wait_for(self, agent_id: str) -> None:
        """If the agent is pinned, wait until no other process works on it.

        Raises:
            AgentBusy: one still does after `wait_s`.
        """
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
    """For a command of the shell: inside, no other process works on the agent of the store in `folder`.

    Args:
        wait: wait for other processes, instead of refusing.

    Raises:
        AgentBusy: another process works on it.
    """
    in_flight = InFlight(folder, wait_s=float("inf") if wait else 0.0)
    try:
        with in_flight.working_on(agent_id):
            yield
    finally:
        in_flight.close()


class _LockedFile:
    """A file whose bytes this process locks. There is one object for a file, because closing any descriptor of it would
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
        """Lock the byte if neither another process nor another owner in this one has it. Whether `owner` has it now."""
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

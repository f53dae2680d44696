"""One lock for each agent that is being written. Any thread.

Jobs of one agent never run at the same time, but a fork also writes an agent that is not the job's own.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class AgentLocks:
    """Keeps a lock only while a thread holds it or waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, tuple[threading.Lock, int]] = {}

    @contextmanager
    def of(self, agent_id: str) -> Iterator[None]:
        with self._lock:
            lock, users = self._held.get(agent_id, (threading.Lock(), 0))
            self._held[agent_id] = lock, users + 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                users = self._held[agent_id][1] - 1
                if users:
                    self._held[agent_id] = lock, users
                else:
                    del self._held[agent_id]

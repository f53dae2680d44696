"""Holds recently used agents' states in memory, so that their next turn replays no records. Any thread; one lock."""

import threading
from collections import OrderedDict
from typing import Final

from stoker_worker.memory.record import AgentState

MAX_RECORD_BYTES: Final = 64 * 2**20
"""Of the held agents' records on disk; in memory they take several times that."""


class RecentAgents:
    """Drops the least recently used agents first. The newest one always stays, however long its history is."""

    def __init__(self, max_record_bytes: int = MAX_RECORD_BYTES) -> None:
        self._max_record_bytes = max_record_bytes
        self._record_bytes = 0
        self._states: OrderedDict[str, AgentState] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, agent_id: str) -> AgentState | None:
        with self._lock:
            state = self._states.get(agent_id)
            if state is not None:
                self._states.move_to_end(agent_id)
            return state

    def put(self, state: AgentState) -> None:
        with self._lock:
            self._drop(state.version.agent_id)
            self._states[state.version.agent_id] = state
            self._record_bytes += state.record_bytes
            while self._record_bytes > self._max_record_bytes and len(self._states) > 1:
                self._drop(next(iter(self._states)))

    def drop(self, agent_id: str) -> None:
        with self._lock:
            self._drop(agent_id)

    def _drop(self, agent_id: str) -> None:
        state = self._states.pop(agent_id, None)
        if state is not None:
            self._record_bytes -= state.record_bytes

"""The agents whose state is held in memory, so that the next turn replays nothing. Any thread; one lock."""

import threading
from collections import OrderedDict
from typing import Final

from stoker_worker.memory.agent_state import AgentState

MAX_RECORD_BYTES: Final = 64 * 2**20
"""Size on disk of the records whose agents are held; in memory they take several times that."""


class RecentAgents:
    """Least recently used out. The newest agent always stays: one of many thousand turns must not be replayed twice."""

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

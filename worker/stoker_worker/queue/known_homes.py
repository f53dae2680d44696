"""What this worker knows of the homes of the agents whose jobs it claimed last. Any thread.

Owns that knowledge alone: the homes themselves are in Redis (`homes.py`).
"""

import threading
from collections import OrderedDict
from typing import Final

from stoker_worker.ports import AgentHome

_MOST: Final = 2**12  # far more than are in flight


class KnownHomes:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._homes: OrderedDict[str, AgentHome] = OrderedDict()

    def of(self, agent_id: str) -> AgentHome | None:
        """``None``: no job of the agent was claimed for long."""
        return self._homes.get(agent_id)

    def claimed(self, agent_id: str, former: str, version: int, store: str) -> None:
        """A job of the agent was claimed.

        Args:
            former, version, store: as in `Granted`.
        """
        with self._lock:
            self._homes.pop(agent_id, None)
            self._homes[agent_id] = AgentHome(former or None, version, store)
            if len(self._homes) > _MOST:
                self._homes.popitem(last=False)

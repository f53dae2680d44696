"""What a worker knows of agents' versions in a shared store: up to which number it has them, and when it asked. Any
thread."""

import threading
import time
from collections import OrderedDict
from typing import Final, NamedTuple

RECENTLY_S: Final = 12 * 3600.0
"""After so long, a worker asks again before it continues an agent: it may have slept."""
_MOST: Final = 2**15
"""Agents forgotten here are asked for again."""


class Known(NamedTuple):
    """The shared store has the agent's versions up to `number`, as this store does, and had none above it when it was
    asked, at that Unix time."""

    number: int
    at: float


class KnownVersions:
    def __init__(self) -> None:
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, agent_id: str) -> Known | None:
        return self._known.get(agent_id)

    def recently(self, agent_id: str) -> Known | None:
        """``None`` also if it was not asked for recently."""
        known = self._known.get(agent_id)
        return known if known is not None and 0 <= time.time() - known.at < RECENTLY_S else None

    def note(self, agent_id: str, known: Known) -> None:
        with self._lock:
            self._known[agent_id] = known
            self._known.move_to_end(agent_id)
            if len(self._known) > _MOST:
                self._known.popitem(last=False)

"""Writes caches to the shared store behind the turns, on a thread of its own, within a bandwidth.

They only save time, so nothing notes which ones are left: another worker computes what it does not find. In an outage
this thread alone goes on asking whether the shared store is back.
"""

import logging
import threading
from collections import OrderedDict
from typing import Final

from stoker_shared.errors import StokerError
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.replica.bucket import Bucket, BucketAway
from stoker_worker.memory.replica.caches import SharedCaches
from stoker_worker.memory.replica.objects import MARKER
from stoker_worker.memory.replica.shared_replica import SharedReplica
from stoker_worker.memory.turn_record import FULL_EVERY

_log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0
_STOP_S: Final = 5.0
_MOST: Final = 2**16
"""Agents that wait. Of those beyond, the one that has waited longest goes without."""


class CachesBehind:
    def __init__(self, bucket: Bucket, replica: SharedReplica, caches: SharedCaches, *, max_bps: int | None) -> None:
        """`max_bps`: most bytes per second; ``None``: no limit."""
        self._bucket = bucket
        self._replica = replica
        self._caches = caches
        self._max_bps = max_bps
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="caches-behind", daemon=True)

    @property
    def n_waiting(self) -> int:
        """Agents whose caches are still to be written."""
        return len(self._waiting)

    def start(self) -> None:
        self._thread.start()

    def add(self, agent_id: str) -> None:
        """The agent has a new version. Never blocks."""
        with self._changed:
            self._waiting[agent_id] = None
            if len(self._waiting) > _MOST:
                self._waiting.popitem(last=False)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread after its file, if that does not take long."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def write_next(self) -> bool:
        """Write the cache of the agent that has waited longest; returns whether one has. Raises `BucketAway`."""
        with self._changed:
            if self._is_closing or not self._waiting:
                return False
            agent_id, _ = self._waiting.popitem(last=False)
        try:
            version = self._caches.write(agent_id, self._pace)
            if version and version % FULL_EVERY == 0:
                self._replica.versions.prune(agent_id)
        except BucketAway:
            self.add(agent_id)
            raise
        except (Damaged, OSError, StokerError) as error:
            _log.warning("the cache of agent %r is not written to the shared store: %s", agent_id, error)
        return True

    def _run(self) -> None:
        while not self._is_closing:
            try:
                if self._bucket.outage.seconds:
                    self._bucket.get(MARKER)
                while not self._bucket.outage.seconds and self.write_next():
                    pass
                self._wait(_RETRY_S if self._bucket.outage.seconds else None)
            except _Closing:
                return
            except BucketAway:
                self._wait(_RETRY_S)
            except Exception:  # the worker can do without it for now
                _log.exception("caches are written to the shared store later")
                self._wait(_RETRY_S)

    def _pace(self, n_bytes: int) -> None:
        """Wait for the bandwidth. Raises `_Closing`."""
        if self._max_bps is not None:
            self._wait(n_bytes / self._max_bps)
        if self._is_closing:
            raise _Closing

    def _wait(self, seconds: float | None) -> None:
        """Until then, or until the end. ``None``: until there is something to write, or for as long as a retry."""
        with self._changed:
            if seconds is None:
                self._changed.wait_for(lambda: self._is_closing or bool(self._waiting), _RETRY_S)
            else:
                self._changed.wait_for(lambda: self._is_closing, seconds)


class _Closing(Exception):
    """The thread is to end."""

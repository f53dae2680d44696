"""Writes to the shared store what it lacks, on a thread of its own: versions first, then caches, within a bandwidth.

What it lacks is in the table `unshared`, so a restart goes on where the last process stopped. In an outage it alone
goes on asking.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from stoker_shared.errors import AgentMemoryError, AgentVersionConflict
from stoker_worker.memory import unshared
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.database import Database
from stoker_worker.memory.shared_store.bucket import Bucket, BucketAway
from stoker_worker.memory.shared_store.caches import SharedCaches
from stoker_worker.memory.shared_store.objects import MARKER
from stoker_worker.memory.shared_store.versions import SharedVersions
from stoker_worker.periodic import Periodic

_log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0
_LOOK_EVERY_S: Final = 10.0
_AT_ONCE: Final = 64
_STOP_S: Final = 5.0


class WriteThrough:
    """
    Attributes:
        seen_waiting: of how many agents the shared store lacked something when that was last counted.
    """

    def __init__(
        self, database: Database, bucket: Bucket, versions: SharedVersions, caches: SharedCaches, *, max_bps: int | None
    ) -> None:
        """`max_bps`: most bytes of caches per second; ``None``: no limit."""
        self._database = database
        self._bucket = bucket
        self._versions = versions
        self._caches = caches
        self._max_bps = max_bps
        self._changed = threading.Condition()
        self._changes: OrderedDict[str, None] = OrderedDict()
        self._caches_waiting: OrderedDict[str, int] = OrderedDict()  # with the version that is there
        self._writing: str | None = None  # whose cache
        self._looks = Periodic(_LOOK_EVERY_S)
        self._told: set[str] = set()
        self._written: dict[str, int] = {}
        self.seen_waiting = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="write-through", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, agent_id: str) -> None:
        """The agent has changed. Never blocks."""
        with self._changed:
            self._changes[agent_id] = None
            self._changed.notify_all()

    def waiting_agents(self) -> int:
        """Of how many agents the shared store lacks something. Raises `OSError`, `Damaged`."""
        with self._database.snapshot() as connection:
            return unshared.count(connection)

    def close(self) -> None:
        """End the thread after its file, if that does not take long; what is left is written after the next start."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self.seen_waiting = self.waiting_agents()
                if self._bucket.outage.seconds:
                    self._bucket.get(MARKER)
                self._write_all()
            except _Closing:
                return
            except BucketAway:
                self._wait(_RETRY_S)
            except (OSError, Damaged) as error:
                _log.warning("the shared store gets what it lacks later: %s", error)
                self._wait(_RETRY_S)
            except Exception:  # the worker can do without it for now
                _log.exception("the shared store gets what it lacks later")
                self._wait(_RETRY_S)
            else:
                if self._bucket.outage.seconds:
                    self._wait(_RETRY_S)
                else:
                    self._wait_for_changes(_LOOK_EVERY_S)

    def _find(self) -> None:
        """What commands of the shell, or an earlier process, left in the table. Raises `OSError`, `Damaged`."""
        self._versions.meet_later()
        self._note_written()
        last: bytes | None = b""
        while last is not None:
            with self._database.snapshot() as connection:
                found = unshared.some(connection, after=last, limit=_AT_ONCE)
            for row in found:
                if row.agent_id not in self._caches_waiting and row.agent_id != self._writing:
                    self.add(row.agent_id)
            last = found[-1].key if found else None

    def _write_all(self) -> None:
        """Raises `BucketAway`, `OSError`, `Damaged`, `_Closing`."""
        try:
            self._write_all_versions()
            while self._caches_waiting:
                self._writing, version = self._caches_waiting.popitem(last=False)
                put_back = partial(self._caches_waiting.setdefault, self._writing, version)
                with self._handling(self._writing, put_back):
                    self._write_cache(self._writing, version)
                self._writing = None
                self._write_all_versions()
        finally:
            self._writing = None
            self._note_written()

    def _write_all_versions(self) -> None:
        """Raises as `_write_all`."""
        if self._looks.is_due():
            self._find()
        while (agent_id := self._next_change()) is not None:
            with self._handling(agent_id, partial(self.add, agent_id)):
                self._write_versions(agent_id)

    def _next_change(self) -> str | None:
        """Of any agent but the one whose cache is being written: that one may have been forgotten."""
        with self._changed:
            if self._is_closing:
                return None
            agent_id = next((one for one in self._changes if one != self._writing), None)
            if agent_id is not None:
                del self._changes[agent_id]
            return agent_id

    @contextmanager
    def _handling(self, agent_id: str, put_back: Callable[[], object]) -> Iterator[None]:
        """An agent that is damaged, or that another worker has continued, holds up no other one."""
        try:
            yield
        except AgentVersionConflict:  # logged where it was met
            pass
        except (AgentMemoryError, Damaged) as error:
            if agent_id not in self._told:
                _log.warning("agent %r is not written through: %s", agent_id, error)
            self._told.add(agent_id)
        except BaseException:
            put_back()
            raise

    def _write_versions(self, agent_id: str) -> None:
        if self._versions.flush_forgotten(agent_id):
            self._caches.remove(agent_id)
            self._database.commit(partial(unshared.forgotten_everywhere, agent_id=agent_id))
        self._caches_waiting[agent_id] = self._versions.flush(agent_id)

    def _write_cache(self, agent_id: str, version: int) -> None:
        if self._caches.write(agent_id, version, self._pace):  # else it has changed, and comes again
            self._written[agent_id] = version
            self._versions.pushing.prune(agent_id, version)
        if len(self._written) >= _AT_ONCE:
            self._note_written()

    def _note_written(self) -> None:
        def change(connection: Connection) -> None:
            for agent_id, version in self._written.items():
                unshared.written(connection, agent_id, version)

        if self._written:
            self._database.commit(change)
            self._written.clear()
            self.seen_waiting = self.waiting_agents()

    def _pace(self, n_bytes: int) -> None:
        """Wait for the bandwidth. A cache may take an hour, for which no version waits. Raises as `_write_all`."""
        until = time.monotonic() + (n_bytes / self._max_bps if self._max_bps is not None else 0.0)
        while not self._is_closing:
            self._write_all_versions()
            if (left := until - time.monotonic()) <= 0:
                return
            self._wait_for_changes(min(left, _LOOK_EVERY_S))
        raise _Closing

    def _wait(self, seconds: float) -> None:
        """Until then, or until the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, timeout=seconds)

    def _wait_for_changes(self, seconds: float) -> None:
        """Until then, or until there is something to do, or the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or bool(self._changes.keys() - {self._writing}), seconds)


class _Closing(Exception):
    """The thread is to end."""

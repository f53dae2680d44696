"""Limits a store's bytes on disk: evicts when it is over the limit. Any thread.

The bytes of cache files are in the database; only folders and the files beside the database are looked at. A save or a
restore first names the blocks that it counts on (`Holds`), and from then on each of them is there or not. Files go
first and their rows after: a full disk may have no room for a transaction until they are gone.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from stoker_worker.memory import cache_index
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection, DatabaseFailed
from stoker_worker.memory.eviction import (
    Plan,
    idle_rows,
    plan_agents,
    plan_unused,
    take_rows,
    waiting_agents,
)
from stoker_worker.memory.files import allocated_bytes, is_there
from stoker_worker.memory.holds import Holds
from stoker_worker.memory.notes import Notes
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.ports import PlaceOf

_log = logging.getLogger(__name__)

DEFAULT_SHARE: Final = 0.8
LOW_WATER: Final = 0.9
KEEP_UNUSED_S: Final = 3600.0
_AT_ONCE: Final = 64
_LOOK_EVERY_S: Final = 1.0


class DiskBudget:
    """A store's bytes on disk, and the limit.

    Attributes:
        max_bytes: the limit. Over it, cache is evicted down to 90 %, so that not every save has to.
        holds: the cache that stays.
        place_of: where in the queue a waiting agent is, as in `QueuePort.place_of`.
    """

    def __init__(
        self,
        parts: StoreParts,
        notes: Notes,
        *,
        max_bytes: int | None = None,
        keep_unused_s: float = KEEP_UNUSED_S,
        on_evicted: Callable[[str], None] = lambda agent_id: None,
    ) -> None:
        """
        Args:
            max_bytes: ``None``: 80 % of the store's bytes and of the free bytes on its disk.
            keep_unused_s: how long a block without a user stays while there is room: a conversation that was replaced
                may come back.
            on_evicted: called with the id of an agent before it loses cache.
        """
        self._parts = parts
        self._database = parts.database
        self._notes = notes
        self._keep_unused_s = keep_unused_s
        self._on_evicted = on_evicted
        self._settling = threading.Lock()
        self.holds = Holds(notes.used)
        self.place_of: PlaceOf = lambda agent_id: (0, 0)
        self._waiting: list[str] | None = None  # in one settling: the agents whose cache is left, the next to go last
        self._room_bytes = 0
        self._look_at = 0.0
        self._warned = False
        self.max_bytes = self._default_bytes() if max_bytes is None else max_bytes
        self.make_room()

    @property
    def total_bytes(self) -> int:
        """Allocated on disk, as `du` counts; without ``redis/``, and without files that are just being written."""
        with self._database.snapshot() as connection:
            return cache_index.cache_bytes(connection) + _other_bytes(self._parts)

    def saved(self, agent_id: str | None, n_bytes: int = 0) -> None:
        """The agent's new version is committed, and its blocks with it; ``None``: blocks of a job without an agent.

        Args:
            n_bytes: how much the store has grown at most. Only when it may be over its limit is more looked at.
        """
        if agent_id is not None:
            self._notes.saved(agent_id)
            self.holds.saved(agent_id)
        with self.holds.lock:
            self._room_bytes -= n_bytes
            is_due = self._room_bytes < 0 or time.time() >= self._look_at
        if is_due:
            self.make_room()

    def not_saved(self, agent_id: str | None, blocks: Iterable[Path]) -> None:
        """A save failed: remove what it has written of these blocks."""
        if agent_id is not None:
            self.holds.saved(agent_id)

        def without_rows() -> list[Path]:
            with self._database.snapshot() as connection:
                return [path for path in blocks if not cache_index.has_block(connection, path.stem)]

        with suppress(OSError, Damaged):
            self.discard(without_rows)

    def make_room(self) -> None:
        """Evict if the store is over its limit, and remove blocks unused for long. Never raises."""
        self._settle(unused_before=time.time() - self._keep_unused_s)

    def free(self, n_bytes: int) -> None:
        """Evict that much, however much room the store has: the disk has none. Never raises."""
        with suppress(OSError, Damaged):
            self._database.empty_log()
        self._settle(unused_before=float("inf"), free_bytes=n_bytes)

    def discard(self, find: Callable[[], Iterable[Path]]) -> int:
        """Remove the cache files that `find` finds, except blocks that work counts on; returns how many. While it
        looks, nobody begins to count on one. Raises `OSError`."""
        with self.holds.lock:
            held = self.holds.blocks()
            paths = [path for path in find() if path.stem not in held]
            for path in paths:
                self._parts.files.remove(path)
        return len(paths)

    def _unlink(self, plan: Plan) -> None:
        """Remove the plan's files. Raises `OSError`: some may be left."""
        pieces, blocks = self._parts.pieces, self._parts.blocks
        paths = [blocks.path_of(block.model, block.address) for block in plan.blocks]
        for row in plan.agents:
            self._on_evicted(row.agent_id)
            paths += pieces.paths(row.agent_id, row.version)
        for path in paths:
            self._parts.files.remove(path)

    def _note_removed(self, plan: Plan) -> None:
        """Remove the plan's rows. Raises `OSError`, `Damaged`."""
        now = time.time()

        def change(connection: Connection) -> None:
            for row in plan.agents:
                is_released = row in plan.released
                cache_index.note_evicted(connection, row, released=is_released, now=now)
            for block in plan.blocks:
                if not is_there(self._parts.blocks.path_of(block.model, block.address)):  # else it is saved again
                    cache_index.remove_block(connection, block.address, now=now if plan.agents else None)

        self._database.commit(change)

    def _default_bytes(self) -> int:
        free = shutil.disk_usage(self._parts.path).free
        max_bytes = int(DEFAULT_SHARE * (self.total_bytes + free))
        share = 100 * DEFAULT_SHARE
        _log.info("the store may take %.1f GB: %d %% of its own bytes and the free ones", max_bytes / 1e9, share)
        return max_bytes

    def _settle(self, *, unused_before: float, free_bytes: int = 0) -> None:
        """Evict until the store is within its limit and has freed that many bytes. In parts: no lock is held for
        long."""
        goal, total = self.max_bytes, 0
        try:
            with self._settling:
                self._waiting = None
                while True:
                    if 10 * self._database.log_bytes() > self.max_bytes:
                        self._database.empty_log()
                    other_bytes = _other_bytes(self._parts)
                    with self.holds.lock, self._database.snapshot() as connection:
                        total = cache_index.cache_bytes(connection) + other_bytes
                        if total > self.max_bytes:
                            goal = int(self.max_bytes * LOW_WATER)
                        goal, free_bytes = min(goal, total - free_bytes) if free_bytes else goal, 0
                        plan = self._plan(connection, total - goal, unused_before)
                        self._unlink(plan)
                    if not plan:
                        break
                    self._note_removed(plan)
                    if plan.agents:
                        n_blocks, n_agents = len(plan.blocks), len(plan.agents)
                        _log.info("evicted %d blocks, and the rest of the cache of %d agents", n_blocks, n_agents)
        except DatabaseFailed as error:
            self._database.outage.met(error)
        except (OSError, Damaged) as error:
            _log.warning("could not evict everything that should go: %s", error)
        except Exception:  # whatever a damaged row does, it does to no turn
            _log.exception("could not evict everything that should go")
        self._look_again(total)

    def _look_again(self, total: int) -> None:
        """When there is no room left, or after a second."""
        is_over = total > self.max_bytes
        with self.holds.lock:
            self._room_bytes = self.max_bytes - total
            self._look_at = time.time() + min(_LOOK_EVERY_S, self._keep_unused_s)
        if is_over and not self._warned:
            self._warned = True
            _log.warning(
                "the store takes %.2f GB of %.2f GB, and nothing more can be evicted: the rest is transcripts, and "
                "cache of running agents",
                total / 1e9,
                self.max_bytes / 1e9,
            )

    def _plan(self, connection: Connection, need_bytes: int, unused_before: float) -> Plan:
        holds, held = self.holds, self.holds.blocks()
        unused = plan_unused(connection, need_bytes=need_bytes, held=held, unused_before=unused_before, most=_AT_ONCE)
        if unused or need_bytes <= 0:
            return unused
        plan_of = partial(plan_agents, connection, need_bytes=need_bytes, held=held, most=_AT_ONCE)
        if self._waiting is None:
            if plan := plan_of(idle_rows(connection, holds.agents())):
                return plan
            self._waiting = waiting_agents(connection, holds.waits, self.place_of)
        plan = plan_of(take_rows(connection, self._waiting, holds.is_running))
        self._waiting += [row.agent_id for row in plan.agents[-1:]]  # it may have some left
        return plan


def _other_bytes(parts: StoreParts) -> int:
    """Allocated bytes of the store's folders, and of the files beside its database. There are a few hundred folders for
    each model, however many agents."""
    store = parts.path
    folders = (store, parts.temp, parts.blocks.path, parts.pieces.path)
    inner = (*store.glob("blocks/*/"), *store.glob("blocks/*/*/"), *store.glob("pieces/*/"))
    files = (path for path in store.iterdir() if path.is_file() and not path.is_symlink())
    return sum(map(allocated_bytes, (*folders, *inner, *files)))

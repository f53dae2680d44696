"""How much disk a store may take: keeps the ledger true, and evicts when it says that there is too much.

One lock makes planning and removing one step, and `using` the other: what a save or a restore is about to rely on is
named first, and from then on it is there or it is not. The lock is never held while anything is synced. Any thread.
"""

import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.disk_usage import STORE_PARTS, agent_use, allocated_bytes, pieces_in
from stoker_worker.memory.eviction import Plan, plan_eviction
from stoker_worker.memory.ledger import Ledger
from stoker_worker.memory.stock import take_stock

_log = logging.getLogger(__name__)

DEFAULT_SHARE: Final = 0.8
LOW_WATER: Final = 0.9
KEEP_UNUSED_S: Final = 3600.0
_BLOCKS_AT_ONCE: Final = 64
_SLOW_OPENING_S: Final = 1.0


class DiskBudget:
    """A store's bytes on disk, its users and its limit.

    Attributes:
        max_bytes: the limit. Over it, pieces are evicted down to 90 %, so that not every save has to.
    """

    def __init__(
        self,
        store: StoreAccess,
        *,
        max_bytes: int | None = None,
        keep_unused_s: float = KEEP_UNUSED_S,
        on_evicted: Callable[[str], None] = lambda agent_id: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the whole store once, and collects what nobody uses.

        Args:
            max_bytes: ``None``: 80 % of what the store has and of what is free on its disk.
            keep_unused_s: how long a block without a user stays while there is room: a conversation that was replaced
                may come back.
            on_evicted: told which agent loses cache, before it does.
        """
        self._store = store
        self._keep_unused_s = keep_unused_s
        self._on_evicted = on_evicted
        self._clock = clock
        self._lock = threading.Lock()
        self._ledger = Ledger(clock)
        self._protected: frozenset[str] = frozenset()
        self._in_use: Counter[str] = Counter()
        self._held: dict[str, set[Path]] = {}
        self._lent: Counter[Path] = Counter()
        self._evicted: set[str] = set()
        self._warned = False
        started = time.monotonic()
        take_stock(store, self._ledger)
        self.max_bytes = self._default_bytes() if max_bytes is None else max_bytes
        self._settle(unused_before=float("inf"))
        self._remove_empty_folders()
        if (took_s := time.monotonic() - started) > _SLOW_OPENING_S:
            _log.info("took stock of %d agents in %.1f s", len(self._ledger.agents), took_s)

    @property
    def total_bytes(self) -> int:
        """Allocated on disk, as `du` counts; without ``redis/``, and files that are just being written."""
        with self._lock:
            return self._ledger.total_bytes

    def protect(self, agents: frozenset[str]) -> None:
        """Agents with work queued or running, as of now: they lose nothing. Waits for nobody."""
        self._protected = agents

    def was_evicted(self, agent_id: str) -> bool:
        """Whether this process evicted cache of the agent's newest version."""
        return agent_id in self._evicted

    @contextmanager
    def using(self, agent_id: str, blocks: Iterable[Path]) -> Iterator[None]:
        """Inside, the agent loses nothing and `blocks` stay. They stay until its turn is saved, while it has work."""
        named = set(blocks)
        folder = self._store.agent(agent_id).path
        with self._lock:
            self._in_use[agent_id] += 1
            self._held.setdefault(agent_id, set()).update(named)
            self._ledger.touch(folder, agent_id)
        try:
            yield
        finally:
            with self._lock:
                self._in_use[agent_id] -= 1
                if not self._in_use[agent_id]:
                    del self._in_use[agent_id]

    @contextmanager
    def lending(self, blocks: tuple[Path, ...]) -> Iterator[None]:
        """Inside, `blocks` stay, for a job without an agent."""
        with self._lock:
            self._lent.update(blocks)
            self._ledger.touch_unused(blocks)
        try:
            yield
        finally:
            with self._lock:
                self._lent -= Counter(blocks)

    def look_again(self, agent_id: str | None, blocks: Iterable[Path] = ()) -> None:
        """Something of the agent's, or these blocks, may have changed on disk. Never raises."""
        try:
            with self._lock:
                self._look_again(agent_id, blocks)
        except OSError as error:
            _log.warning("the bytes of %s are not known: %s", f"agent {agent_id!r}" if agent_id else "blocks", error)

    def saved(self, agent_id: str, blocks: tuple[Path, ...]) -> None:
        """A version of the agent is committed that uses `blocks`."""
        folder = self._store.agent(agent_id).path
        with self._lock:
            self._ledger.set_blocks_of(folder, blocks)
            self._ledger.touch(folder, agent_id)
            self._held.pop(agent_id, None)
            self._evicted.discard(agent_id)

    def not_saved(self, agent_id: str | None) -> None:
        """A save failed, as on a full disk: what nobody uses goes at once, or the next turn finds no space either."""
        with self._lock:
            if agent_id is not None:
                self._held.pop(agent_id, None)
        self._settle(unused_before=float("inf"))

    def make_room(self) -> None:
        """Evict if there is too much, and collect what nobody has used for long. Never raises."""
        self._settle(unused_before=self._clock() - self._keep_unused_s)

    # --- counting ---

    def _default_bytes(self) -> int:
        free = shutil.disk_usage(self._store.path).free
        max_bytes = int(DEFAULT_SHARE * (self._ledger.total_bytes + free))
        _log.info(
            "the store may take %.1f GB: %d %% of its own and of what is free", max_bytes / 1e9, 100 * DEFAULT_SHARE
        )
        return max_bytes

    def _look_again(self, agent_id: str | None, blocks: Iterable[Path]) -> None:
        touched = {self._store.path, *(self._store.path / name for name in STORE_PARTS)}
        if agent_id is not None:
            folder = self._store.agent(agent_id).path
            touched.add(folder.parent)
            self._ledger.set_agent(folder, agent_id, agent_use(folder, self._ledger.folder_use(folder)))
        for path in blocks:
            self._ledger.set_block(path, allocated_bytes(path))
            touched |= {path.parent, path.parent.parent}
        for path in touched:
            self._ledger.set_other(path, allocated_bytes(path))

    # --- evicting ---

    def _settle(self, *, unused_before: float) -> None:
        goal = self.max_bytes
        try:
            while True:
                with self._lock:
                    if self._ledger.total_bytes > self.max_bytes:
                        goal = int(self.max_bytes * LOW_WATER)
                    plan = self._plan(self._ledger.total_bytes - goal, unused_before)
                    if not plan:
                        break
                    self._carry_out(plan)
        except OSError as error:
            _log.warning("not all that should go could be evicted: %s", error)
            return
        self._warn_if_over()

    def _plan(self, need_bytes: int, unused_before: float) -> Plan:
        protected = self._protected.union(self._in_use)
        self._held = {agent_id: blocks for agent_id, blocks in self._held.items() if agent_id in protected}
        return plan_eviction(
            self._ledger,
            need_bytes=need_bytes,
            protected=protected,
            held=set(self._lent).union(*self._held.values()),
            unused_before=unused_before,
            most_blocks=_BLOCKS_AT_ONCE,
        )

    def _carry_out(self, plan: Plan) -> None:
        """Raises `OSError`; the ledger then says what is still there."""
        ledger, files = self._ledger, self._store.files
        for folder in plan.agents:
            agent_id = ledger.agents[folder].agent_id
            if agent_id is not None:
                self._evicted.add(agent_id)
                self._on_evicted(agent_id)
            try:
                for path in pieces_in(folder):
                    files.remove(path)
            finally:
                ledger.set_agent(folder, agent_id, agent_use(folder, ledger.folder_use(folder)))
        for path in plan.blocks:
            try:
                files.remove(path)
            finally:
                ledger.set_block(path, allocated_bytes(path))
        for path in {path.parent for path in plan.blocks}:
            ledger.set_other(path, allocated_bytes(path))
        if plan.agents:
            _log.info("evicted %d blocks, and the rest of the cache of %d agents", len(plan.blocks), len(plan.agents))

    def _remove_empty_folders(self) -> None:
        """Only before any save runs: a save makes a block's folder first, and then the block."""
        for name, _, _ in os.walk(self._store.blocks.path, topdown=False):
            folder = Path(name)
            with suppress(OSError):  # not empty
                if folder != self._store.blocks.path:
                    folder.rmdir()
            self._ledger.set_other(folder, allocated_bytes(folder))

    def _warn_if_over(self) -> None:
        if self._warned or self._ledger.total_bytes <= self.max_bytes:
            return
        self._warned = True
        _log.warning(
            "the store takes %.2f GB of %.2f GB, and nothing more can be evicted: the rest is transcripts, and cache "
            "of agents with work",
            self._ledger.total_bytes / 1e9,
            self.max_bytes / 1e9,
        )

"""Limits a store's bytes on disk: keeps the usage up to date, and evicts when it is over the limit.

One lock makes planning and removing one step, and `using` another: a save or a restore first names the blocks that it
counts on, and from then on each of them is there or not. Nothing is synced while the lock is held. Any thread.
"""

import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.disk_usage import allocated_bytes
from stoker_worker.memory.eviction import Plan, carry_out, plan_eviction, remove_empty_folders
from stoker_worker.memory.usage import StoreUsage, measure_again, scan_usage

_log = logging.getLogger(__name__)

DEFAULT_SHARE: Final = 0.8
LOW_WATER: Final = 0.9
KEEP_UNUSED_S: Final = 3600.0
_BLOCKS_AT_ONCE: Final = 64
_SLOW_OPENING_S: Final = 1.0


class DiskBudget:
    """A store's bytes on disk, the agents that use them, and the limit.

    Attributes:
        max_bytes: the limit. Over it, cache is evicted down to 90 %, so that not every save has to.
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
        """Reads the whole store once, and removes the blocks that no agent uses.

        Args:
            max_bytes: ``None``: 80 % of the store's bytes and of the free bytes on its disk.
            keep_unused_s: how long a block without a user stays while there is room: a conversation that was replaced
                may come back.
            on_evicted: called with the id of an agent before it loses cache.
        """
        self._store = store
        self._keep_unused_s = keep_unused_s
        self._on_evicted = on_evicted
        self._clock = clock
        self._lock = threading.Lock()
        self._usage = StoreUsage(clock)
        self._pinned: frozenset[str] = frozenset()
        self._in_use: Counter[str] = Counter()
        self._held: dict[str, set[Path]] = {}
        self._lent: Counter[Path] = Counter()
        self._evicted: set[str] = set()
        self._warned = False
        started = time.monotonic()
        scan_usage(store, self._usage)
        self.max_bytes = self._default_bytes() if max_bytes is None else max_bytes
        self._settle(unused_before=float("inf"))
        remove_empty_folders(store.blocks.path, self._usage)
        if (took_s := time.monotonic() - started) > _SLOW_OPENING_S:
            _log.info("read the store's %d agents in %.1f s", len(self._usage.agents), took_s)

    @property
    def total_bytes(self) -> int:
        """Allocated on disk, as `du` counts; without ``redis/``, and without files that are just being written."""
        with self._lock:
            return self._usage.total_bytes

    def pin(self, agents: frozenset[str]) -> None:
        """From now on these agents, and no others, lose nothing. Never blocks."""
        self._pinned = agents

    def was_evicted(self, agent_id: str) -> bool:
        """Whether this process evicted cache of the agent's newest version."""
        return agent_id in self._evicted

    @contextmanager
    def using(self, agent_id: str, blocks: Iterable[Path]) -> Iterator[None]:
        """Inside, the agent loses nothing and `blocks` stay; afterwards too, while it is pinned, until it is saved."""
        named = set(blocks)
        folder = self._store.agent(agent_id).path
        with self._lock:
            self._in_use[agent_id] += 1
            self._held.setdefault(agent_id, set()).update(named)
            self._usage.touch(folder, agent_id)
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
            self._usage.touch_unused(blocks)
        try:
            yield
        finally:
            with self._lock:
                self._lent -= Counter(blocks)

    def look_again(self, agent_id: str | None, blocks: Iterable[Path] = ()) -> None:
        """Measure the agent's folder and these blocks again: they may have changed on disk. Never raises."""
        try:
            with self._lock:
                measure_again(self._store, self._usage, agent_id, blocks)
        except OSError as error:
            _log.warning("cannot measure %s: %s", f"agent {agent_id!r}" if agent_id else "blocks", error)

    def look_at(self, *paths: Path) -> None:
        """Measure these again: neither agents' folders nor blocks."""
        with suppress(OSError), self._lock:
            for path in paths:
                self._usage.set_other(path, allocated_bytes(path))

    def saved(self, agent_id: str, blocks: tuple[Path, ...]) -> None:
        """A version of the agent is committed that uses `blocks`."""
        folder = self._store.agent(agent_id).path
        with self._lock:
            self._usage.set_blocks_of(folder, blocks)
            self._usage.touch(folder, agent_id)
            self._held.pop(agent_id, None)
            self._evicted.discard(agent_id)

    def users_of(self, blocks: Iterable[Path]) -> dict[Path, int]:
        """How many agents use each of them."""
        with self._lock:
            return {path: self._usage.n_users(path) for path in blocks}

    def only_of(self, agent_id: str, blocks: Iterable[Path]) -> tuple[Path, ...]:
        """Those of `blocks` that no other agent uses, and that no work of another agent was restored from."""
        with self._lock:
            return self._only_of(agent_id, blocks)

    def forgotten(self, agent_id: str, blocks: Iterable[Path]) -> None:
        """The agent is gone: remove those of its `blocks` that nothing else needs.

        Raises:
            OSError: some are left; they are the next to be evicted.
        """
        self.look_again(agent_id)
        with self._lock:
            self._held.pop(agent_id, None)
            self._evicted.discard(agent_id)
            self._carry_out(Plan(self._only_of(agent_id, blocks)))

    def not_saved(self, agent_id: str | None) -> None:
        """A save failed, as on a full disk: remove all unused blocks at once, or the next turn finds no space."""
        with self._lock:
            if agent_id is not None:
                self._held.pop(agent_id, None)
        self._settle(unused_before=float("inf"))

    def make_room(self) -> None:
        """Evict if the store is over its limit, and remove blocks unused for long. Never raises."""
        self._settle(unused_before=self._clock() - self._keep_unused_s)

    def _default_bytes(self) -> int:
        free = shutil.disk_usage(self._store.path).free
        max_bytes = int(DEFAULT_SHARE * (self._usage.total_bytes + free))
        share = 100 * DEFAULT_SHARE
        _log.info("the store may take %.1f GB: %d %% of its own bytes and the free ones", max_bytes / 1e9, share)
        return max_bytes

    def _only_of(self, agent_id: str, blocks: Iterable[Path]) -> tuple[Path, ...]:
        folder = self._store.agent(agent_id).path
        own = set(self._usage.agents[folder].blocks) if folder in self._usage.agents else set()
        held = set(self._lent).union(*(held for user, held in self._held.items() if user != agent_id))
        return tuple(path for path in blocks if path not in held and self._usage.n_users(path) <= (path in own))

    def _settle(self, *, unused_before: float) -> None:
        """Evict until the store is within its limit; in parts, so that the lock is never held for long."""
        goal = self.max_bytes
        try:
            while True:
                with self._lock:
                    if self._usage.total_bytes > self.max_bytes:
                        goal = int(self.max_bytes * LOW_WATER)
                    plan = self._plan(self._usage.total_bytes - goal, unused_before)
                    if not plan:
                        break
                    self._carry_out(plan)
        except OSError as error:
            _log.warning("could not evict everything that should go: %s", error)
            return
        self._warn_if_over()

    def _plan(self, need_bytes: int, unused_before: float) -> Plan:
        pinned = self._pinned.union(self._in_use)
        self._held = {agent_id: blocks for agent_id, blocks in self._held.items() if agent_id in pinned}
        return plan_eviction(
            self._usage,
            need_bytes=need_bytes,
            pinned=pinned,
            held=set(self._lent).union(*self._held.values()),
            unused_before=unused_before,
            most_blocks=_BLOCKS_AT_ONCE,
        )

    def _carry_out(self, plan: Plan) -> None:
        """Raises `OSError`; the usage is then of what is left."""
        for folder in plan.agents:
            agent_id = self._usage.agents[folder].agent_id
            if agent_id is not None:
                self._evicted.add(agent_id)
                self._on_evicted(agent_id)
        carry_out(plan, self._usage, self._store.files)
        if plan.agents:
            _log.info("evicted %d blocks, and the rest of the cache of %d agents", len(plan.blocks), len(plan.agents))

    def _warn_if_over(self) -> None:
        if self._warned or self._usage.total_bytes <= self.max_bytes:
            return
        self._warned = True
        _log.warning(
            "the store takes %.2f GB of %.2f GB, and nothing more can be evicted: the rest is transcripts, and cache "
            "of agents with work",
            self._usage.total_bytes / 1e9,
            self.max_bytes / 1e9,
        )

"""The cache that work counts on, and so may not be evicted: agents with work, and blocks that it was restored from. Any
thread.

With `lock` held nobody begins to count on anything: then an eviction is planned and its files are removed.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class Holds:
    """
    Attributes:
        lock: never held while a transaction is waited for.
    """

    def __init__(self, on_used: Callable[[str], None]) -> None:
        """`on_used`: called with the id of each agent whose work begins to use cache."""
        self._on_used = on_used
        self.lock = threading.Lock()
        self._running: frozenset[str] = frozenset()
        self._waiting: frozenset[str] = frozenset()
        self._is_all = False
        self._in_use: Counter[str] = Counter()
        self._held: dict[str, set[str]] = {}
        self._lent: Counter[str] = Counter()

    def pin(self, running: frozenset[str], waiting: frozenset[str], *, is_all: bool = True) -> None:
        """From now on these agents, and no others, have work: those that run lose nothing, those that wait lose theirs
        last. Never blocks.

        Args:
            is_all: whether no other agent has work waiting.
        """
        self._is_all = is_all
        self._running, self._waiting = running, waiting

    def has_work(self, agent_id: str) -> bool:
        """Whether the agent has, or may have, work that runs or waits."""
        return not self._is_all or any(agent_id in agents for agents in (self._running, self._waiting, self._in_use))

    @contextmanager
    def using(self, agent_id: str, blocks: Iterable[str]) -> Iterator[None]:
        """Inside, the agent loses nothing and the blocks of these addresses stay; afterwards too, while it is pinned,
        until it is saved."""
        named = set(blocks)
        with self.lock:
            self._in_use[agent_id] += 1
            self._held.setdefault(agent_id, set()).update(named)
        self._on_used(agent_id)
        try:
            yield
        finally:
            with self.lock:
                self._in_use[agent_id] -= 1
                if not self._in_use[agent_id]:
                    del self._in_use[agent_id]

    @contextmanager
    def lending(self, blocks: tuple[str, ...]) -> Iterator[None]:
        """Inside, the blocks of these addresses stay, for a job without an agent."""
        with self.lock:
            self._lent.update(blocks)
        try:
            yield
        finally:
            with self.lock:
                self._lent -= Counter(blocks)

    def is_held(self, address: str, *, but_by: str) -> bool:
        """Whether work of another agent counts on the block."""
        with self.lock:
            others = self.agents() - {but_by}
            return address in self._lent or any(address in self._held.get(agent_id, ()) for agent_id in others)

    def saved(self, agent_id: str) -> None:
        """Its turn has ended: nothing counts on the blocks any more that it was restored from."""
        with self.lock:
            self._held.pop(agent_id, None)

    def agents(self) -> frozenset[str]:
        """The agents with work. With `lock` held."""
        return self._running.union(self._waiting, self._in_use)

    def is_running(self, agent_id: str) -> bool:
        """Whether the agent may lose nothing. With `lock` held."""
        return agent_id in self._running or agent_id in self._in_use

    def waits(self, agent_id: str) -> bool:
        return agent_id in self._waiting

    def blocks(self) -> set[str]:
        """Addresses of the blocks that stay. With `lock` held."""
        agents = self.agents()
        self._held = {agent_id: blocks for agent_id, blocks in self._held.items() if agent_id in agents}
        return set(self._lent).union(*self._held.values())

"""Reads caches from disk into the RAM cache before their agents' jobs start. Owns the choice of the next one, and one
thread; writes nothing.

First come the agents whose jobs are next in the queue, in that order. Before the first job runs, while the model loads,
those used last follow, until the RAM cache is full. Reading waits for every restore. Damage is left to the restore,
which names it: an agent's cache is kept only if all of its files are whole.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Self

from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.database import Connection, Damaged
from stoker_worker.memory.lookup import AgentBlocks, BlockLookup, find_prefix, load_snapshot, n_readers
from stoker_worker.memory.ram_cache import RamCache, RamCacheEntry
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.ports import AgentVersion, CachedPrefix, LoadedModel, PrefixRoom, Snapshot
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, ModelCacheSpec


@dataclass(frozen=True)
class WholeCache:
    """A cache whose files should all exist. `spec`: of the model that made it."""

    agent: AgentVersion
    cache: CachedPrefix
    spec: ModelCacheSpec

    @classmethod
    def find(cls, parts: StoreParts, agent_id: str, model: LoadedModel | None) -> Self | None:
        """`model`: the one that must have made it; ``None``: any model that has saved something in this store. Raises
        `OSError`, `Damaged`, `ValueError`: the rows cannot be read."""
        with parts.database.snapshot() as connection:
            state = transcripts.read_agent(connection, agent_id)
            agent, cache = state.version, state.version.cache
            if state.problem is not None or cache is None or not cache.tokens or agent.evicted:
                return None
            spec = _spec_of(connection, cache.model, model)
        if spec is None or (spec.snapshot_layers and not cache.snapshots):
            return None
        return cls(agent, cache, spec)

    @property
    def n_bytes(self) -> int:
        """In RAM."""
        return self.cache.tokens * self.spec.bytes_per_token + sum(map(self.spec.snapshot_bytes, self.cache.snapshots))

    def read(
        self,
        parts: StoreParts,
        n_readers: int,
        before_each: Callable[[], None],
        make_room: Callable[[int], PrefixRoom | None] | None = None,
    ) -> RamCacheEntry | None:
        """The cache, verified; ``None`` unless all files are whole. `n_readers`, `before_each`, `make_room`: as in
        `BlockLookup`; `before_each` is called before each snapshot too."""
        agent, cache, spec = self.agent, self.cache, self.spec
        own = AgentBlocks.of(agent, parts.pieces)
        chain = BlockChain(cache.model, cache.salt, own.token_ids)
        if not chain.has_fingerprint:
            return None
        n_tokens = cache.snapshots[-1] if spec.snapshot_layers else cache.tokens
        found = find_prefix(
            BlockLookup(chain, n_tokens, spec, own, parts.blocks.path_of, n_readers, before_each, make_room)
        ).cache
        if found.n_tokens < n_tokens:
            return None
        snapshots = []
        for n_before, path in own.snapshots[:-1]:
            before_each()
            _, states, fault = load_snapshot(path, chain.up_to(n_before), spec)
            if fault is not None:
                return None
            snapshots.append(Snapshot(n_before, states))
        found = replace(found, snapshots=(*snapshots, *found.snapshots))
        return RamCacheEntry(agent.number, chain.up_to(n_tokens), found)


def _spec_of(connection: Connection, fingerprint: str, model: LoadedModel | None) -> ModelCacheSpec | None:
    if model is not None:
        return model.spec if model.has_memory and model.fingerprint == fingerprint else None
    text = cache_index.read_model(connection, fingerprint)
    return None if text is None else ModelCacheSpec.parse(text)


_log = logging.getLogger(__name__)

_MOST_RECENT: Final = 1024
"""Agents that may be read before the first job, so that a start does not go through a large store."""


class ReadAhead:
    """The thread starts with the first call of `next`, and only if the RAM cache keeps anything."""

    def __init__(self, parts: StoreParts, ram_cache: RamCache) -> None:
        self._parts = parts
        self._ram_cache = ram_cache
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._model: LoadedModel | None = None
        self._order: tuple[str, ...] = ()
        self._tried: set[str] = set()  # since the order changed
        self._sizes: dict[str, int] = {}  # of the order: bytes of the caches that were looked at; 0: none that is whole
        self._fills = True  # with the agents used last: until the first job, or until the RAM cache is full
        self._reading: str | None = None
        self._n_restores = 0

    def next(self, agents: Sequence[str]) -> None:
        """The next jobs are of these agents, in this order. Never blocks."""
        if not self._ram_cache.max_bytes:
            return
        with self._changed:
            if self._is_closing or (self._thread is not None and self._order == tuple(agents)):
                return
            self._order = tuple(agents)
            self._tried.clear()
            self._sizes = {name: size for name, size in self._sizes.items() if name in self._order}
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def is_at_hand(self, agent_id: str) -> bool:
        """See `CacheStorePort.is_at_hand`."""
        return agent_id in self._ram_cache or self._sizes.get(agent_id) == 0 or self._ram_cache.is_empty

    def model_loaded(self, model: LoadedModel) -> None:
        """From now on only caches of this model are read, and kept. Never blocks for long."""
        with self._changed:
            self._model = model
        self._ram_cache.keep_only(model.fingerprint)

    @contextmanager
    def giving_way(self, agent_id: str | None) -> Iterator[None]:
        """Inside, nothing is read ahead. Waits for this agent's cache if it is just being read, to read no file
        twice."""
        with self._changed:
            self._fills = False
            while agent_id is not None and self._reading == agent_id:
                self._changed.wait()
            self._n_restores += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_restores -= 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        used_last = iter(self._agents_used_last())
        while (agent_id := self._wait_for_next(used_last)) is not None:
            try:
                self._bring(agent_id)
            except _NotWanted:
                pass
            except Exception as error:  # whatever an agent's rows or files do, reading goes on
                level = logging.DEBUG if isinstance(error, OSError | Damaged | ValueError) else logging.ERROR
                _log.log(level, "agent %r: its cache was not read ahead: %s", agent_id, error)
                self._note_size(agent_id, 0)

    def _agents_used_last(self) -> list[str]:
        """Agents that have a cache, those used last first."""
        where = f"WHERE {cache_index.HAS_CACHE} AND NOT {transcripts.IS_OF_SESSION} ORDER BY last_used DESC LIMIT ?"
        try:
            with self._parts.database.snapshot() as connection:
                return [row.agent_id for row in transcripts.agent_rows(connection, where, (_MOST_RECENT,))]
        except (OSError, Damaged) as error:
            _log.debug("cannot read which agents were used last: %s", error)
            return []

    def _wait_for_next(self, used_last: Iterator[str]) -> str | None:
        """The agent whose cache is to be read now; ``None`` at the end."""
        with self._changed:
            self._reading = None
            self._changed.notify_all()
            while not self._is_closing and (self._n_restores or not self._choose(used_last)):
                self._changed.wait()
            return self._reading

    def _choose(self, used_last: Iterator[str]) -> bool:
        """Sets `_reading` to the agent to read now; returns whether there is one."""
        soon = (name for name in self._order if name not in self._tried and self._sizes.get(name) != 0)
        names = itertools.chain(soon, used_last if self._fills else ())
        self._reading = next((name for name in names if name not in self._ram_cache), None)
        if self._reading is None:
            self._fills = False
            return False
        self._tried.add(self._reading)
        return True

    def _bring(self, agent_id: str) -> None:
        """Raises `_NotWanted`, `OSError`, `Damaged`, `ValueError`: nothing is kept."""
        with self._changed:
            order, size = self._order, self._sizes.get(agent_id, 0)
        if not self._ram_cache.expect(agent_id, order):
            return
        entry: RamCacheEntry | None = None
        try:
            if self._ram_cache.reserve(size):
                entry = self._read(agent_id, is_next=agent_id in order)
        finally:
            self._ram_cache.arrive(entry)

    def _read(self, agent_id: str, *, is_next: bool) -> RamCacheEntry | None:
        """The agent's whole cache; ``None``: there is none that is whole, or there is no room for it."""
        model, entry = self._model, None
        if (found := WholeCache.find(self._parts, agent_id, model)) is not None:
            self._note_size(agent_id, found.n_bytes)
            if not self._ram_cache.reserve(found.n_bytes):
                if not is_next and found.n_bytes <= self._ram_cache.max_bytes:
                    self._fills = False  # the RAM cache is full
                return None
            make_room = None if model is None else partial(model.make_room, n_left=BLOCK_TOKENS)
            entry = found.read(self._parts, n_readers(True) if model is None else 1, self._check, make_room)
        if entry is None:
            self._note_size(agent_id, 0)
        elif not self._ram_cache.reserve(entry.n_bytes):  # with the room for the next turn
            self._note_size(agent_id, entry.n_bytes)
            self._fills = self._fills and is_next
            return None
        return entry

    def _check(self) -> None:
        """Wait while a restore reads. Raises `_NotWanted`."""
        with self._changed:
            while self._n_restores and not self._is_closing:
                self._changed.wait()
            is_wanted = self._fills or self._reading in self._order
            if self._is_closing or not is_wanted:
                raise _NotWanted

    def _note_size(self, agent_id: str, n_bytes: int) -> None:
        with self._changed:
            if agent_id in self._order:
                self._sizes[agent_id] = n_bytes


class _NotWanted(Exception):
    """The agent whose cache is being read has left the order, or the store is closing."""

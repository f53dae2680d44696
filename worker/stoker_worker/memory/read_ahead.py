"""Reads caches from disk into the RAM cache before their agents' jobs start. Owns the choice of the next one, and one
thread.

First the agents whose jobs are next in the queue, in that order. Before the first job runs, then those used last, until
the RAM cache is full: while a model loads, the disk has time. A restore goes before: reading waits for it. Damage is
left to the restore, which names it: nothing is kept of an agent unless all its files are whole.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from stoker_worker.memory import agent_table, cache_index
from stoker_worker.memory.block_chain import BlockChain
from stoker_worker.memory.block_lookup import AgentBlocks, BlockLookup, load_snapshot, n_readers
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.ram_cache import RamCache
from stoker_worker.memory.ram_cache_entry import RamCacheEntry
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.ports import AgentVersion, CachedPrefix, LayerKV, LoadedModel, Snapshot
from stoker_worker.ports.cache_spec import ModelCacheSpec

_log = logging.getLogger(__name__)

_PAGE: Final = 64
_MOST_RECENT: Final = 1024
"""Agents looked at before the first job, so that a start takes no more of a large store."""


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
        self._useless: set[str] = set()  # of the order: there is no cache, or it is not whole
        self._sizes: dict[str, int] = {}  # of the order: bytes of the caches that were looked at
        self._used_last = self._agents_used_last()
        self._recent: str | None = None  # the next of these
        self._fills = True  # with these; until the first job
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
            self._useless.intersection_update(agents)
            self._sizes = {name: size for name, size in self._sizes.items() if name in self._order}
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def is_at_hand(self, agent_id: str) -> bool:
        """See `CacheStorePort.is_at_hand`."""
        return agent_id in self._ram_cache or agent_id in self._useless or self._ram_cache.is_empty

    def model_loaded(self, model: LoadedModel) -> None:
        """From now on only caches of this model are read, and kept. Never blocks for long."""
        with self._changed:
            self._model = model
        self._ram_cache.keep_only(model.fingerprint)

    @contextmanager
    def giving_way(self, agent_id: str | None) -> Iterator[None]:
        """Inside, nothing is read ahead. Waits for this agent's cache if it is just being read: no file is read
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
        while (agent_id := self._wait_for_next()) is not None:
            try:
                self._bring(agent_id)
            except _NotWanted:
                pass
            except Exception as error:  # whatever an agent's rows or files do, reading goes on
                level = logging.DEBUG if isinstance(error, OSError | Damaged | ValueError) else logging.ERROR
                _log.log(level, "agent %r: its cache was not read ahead: %s", agent_id, error)
                self._note_useless(agent_id)

    def _wait_for_next(self) -> str | None:
        """The agent whose cache is to be read now; ``None`` at the end."""
        while True:
            with self._changed:
                self._reading = None
                self._changed.notify_all()
                while not self._is_closing and (self._n_restores or not self._choose()):
                    if self._fills and not self._n_restores:
                        break
                    self._changed.wait()
                if self._is_closing or self._reading is not None:
                    return self._reading
            self._recent = next((name for name in self._used_last if name not in self._ram_cache), None)
            self._fills = self._fills and self._recent is not None

    def _choose(self) -> bool:
        """Whether there is an agent to read now: `_reading`."""
        done = self._tried | self._useless
        self._reading = next((name for name in self._order if name not in done and name not in self._ram_cache), None)
        if self._reading is not None:
            self._tried.add(self._reading)
        elif self._fills:
            self._reading, self._recent = self._recent, None
        return self._reading is not None

    def _agents_used_last(self) -> Iterator[str]:
        """The agents that have a cache, those used last first."""
        where = "WHERE piece_bytes > 0 OR last_block IS NOT NULL ORDER BY last_used DESC LIMIT ? OFFSET ?"
        for offset in range(0, _MOST_RECENT, _PAGE):
            try:
                with self._parts.database.snapshot() as connection:
                    rows = agent_table.agent_rows(connection, where, (_PAGE, offset))
            except (OSError, Damaged) as error:
                _log.debug("cannot read which agents were used last: %s", error)
                return
            yield from (row.agent_id for row in rows)

    def _bring(self, agent_id: str) -> None:
        """Raises `_NotWanted`, `OSError`, `Damaged`, `ValueError`: nothing is kept."""
        with self._changed:
            order, size = self._order, self._sizes.get(agent_id, 0)
        if not self._ram_cache.expect(agent_id):
            return
        entry: RamCacheEntry | None = None
        try:
            if self._ram_cache.reserve(agent_id, size, order):
                entry = self._read(agent_id, order)
        finally:
            self._ram_cache.arrive(agent_id, entry, goes_last=agent_id in order)

    def _read(self, agent_id: str, order: tuple[str, ...]) -> RamCacheEntry | None:
        """The agent's whole cache; ``None``: there is none that is whole, or there is no room for it."""
        entry = None
        if (found := self._look_up(agent_id)) is not None:
            agent, cache, spec = found
            n_bytes = cache.tokens * spec.bytes_per_token + sum(map(spec.snapshot_bytes, cache.snapshots))
            with self._changed:
                self._sizes[agent_id] = n_bytes
            if not self._ram_cache.reserve(agent_id, n_bytes, order):
                if agent_id not in order and n_bytes <= self._ram_cache.max_bytes:
                    self._fills = False  # the RAM cache is full
                return None
            entry = self._entry(agent, cache, spec)
        if entry is None:
            self._note_useless(agent_id)
        return entry

    def _look_up(self, agent_id: str) -> tuple[AgentVersion, CachedPrefix, ModelCacheSpec] | None:
        """The agent's newest version, if all of its cache should be there, and the layout of the model that made
        it."""
        with self._parts.database.snapshot() as connection:
            state = agent_table.read_agent(connection, agent_id)
            agent, cache = state.version, state.version.cache
            if state.problem is not None or cache is None or not cache.tokens or agent.evicted:
                return None
            spec = self._spec_of(cache.model, connection)
            if spec is None or (spec.snapshot_layers and not cache.snapshots):
                return None
            return agent, cache, spec

    def _spec_of(self, model: str, connection: Connection) -> ModelCacheSpec | None:
        loaded = self._model
        if loaded is None:
            text = cache_index.read_model(connection, model)
            return None if text is None else ModelCacheSpec.parse(text)
        return loaded.spec if loaded.has_memory and model == loaded.fingerprint else None

    def _entry(self, agent: AgentVersion, cache: CachedPrefix, spec: ModelCacheSpec) -> RamCacheEntry | None:
        """``None`` unless all files of the version are whole."""
        own, readers = AgentBlocks.of(agent, self._parts.pieces), n_readers(True) if self._model is None else 1
        chain = BlockChain(cache.model, cache.salt, own.token_ids)
        if not chain.has_fingerprint:
            return None
        layers: tuple[LayerKV, ...] = ()
        if spec.full_layers:
            path_of = self._parts.blocks.path_of
            found = BlockLookup(chain, cache.tokens, spec, own, path_of, readers, self._check).run()
            if found.n_tokens < cache.tokens:
                return None
            layers = found.layers
        snapshots = []
        for n_tokens, path in own.snapshots:
            self._check()
            states, fault = load_snapshot(path, chain.up_to(n_tokens), spec)
            if fault is not None:
                return None
            snapshots.append(Snapshot(n_tokens, states))
        return RamCacheEntry(
            agent.number, cache.model, cache.salt, own.token_ids, layers, tuple(snapshots), has_all=True
        )

    def _check(self) -> None:
        """Wait while a restore reads. Raises `_NotWanted`."""
        with self._changed:
            while self._n_restores and not self._is_closing:
                self._changed.wait()
            is_wanted = self._fills or self._reading in self._order
            if self._is_closing or not is_wanted:
                raise _NotWanted

    def _note_useless(self, agent_id: str) -> None:
        with self._changed:
            if agent_id in self._order:
                self._useless.add(agent_id)


class _NotWanted(Exception):
    """The agent whose cache is being read has lost its place in the order, or the store is closing."""

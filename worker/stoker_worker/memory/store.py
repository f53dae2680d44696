"""`AgentCacheStore`: agent memory on disk, as the worker sees it (`CacheStorePort`). The way into this package.

Owns the order of a save, and the cached state of each agent. `open_agent` and `restore` run on the loader thread,
`save` and `mark_unsaved` on finisher threads, at the same time, for different agents.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stoker_shared.errors import AgentTranscriptUnreadable, AgentVersionConflict, StoreUnusable
from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.agent_jobs import AgentJobs
from stoker_worker.memory.agent_locks import AgentLocks
from stoker_worker.memory.agent_writer import Pieces
from stoker_worker.memory.block_chain import BlockChain
from stoker_worker.memory.block_lookup import n_readers
from stoker_worker.memory.budget import KEEP_UNUSED_S, DiskBudget
from stoker_worker.memory.files import Disk, Files
from stoker_worker.memory.prefix_lookup import Lookup, PrefixLookup
from stoker_worker.memory.ram_cache import RamCache
from stoker_worker.memory.recent_agents import RecentAgents
from stoker_worker.memory.record import AgentState, CachedPrefix, TurnRecord, delta, record_checksum
from stoker_worker.memory.store_folder import StoreFolder
from stoker_worker.memory.turn_cache import cached_chain, own_pieces
from stoker_worker.ports import AgentVersion, CacheSlice, CacheStorePort, LoadedModel, Restored, Turn
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

_log = logging.getLogger(__name__)


class AgentCacheStore(CacheStorePort):
    """Agent memory in one folder.

    Attributes:
        budget: the bytes on disk, and their limit.
        ram_cache: the caches in RAM, and their limit.
        agent_jobs: carries out jobs about an agent's memory.

    Raises:
        StoreUnusable: the folder is locked, of an unknown format, or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        files: Files | None = None,
        max_bytes: int | None = None,
        memory_max_bytes: int = 0,
        keep_unused_s: float = KEEP_UNUSED_S,
        wait: bool = False,
    ) -> None:
        """`max_bytes` and `keep_unused_s` as in `DiskBudget`, `memory_max_bytes` as in `RamCache`, `wait` as in
        `StoreFolder`."""
        files = Disk() if files is None else files
        self._folder = StoreFolder(folder, files, wait=wait)
        self._store = StoreAccess(folder, files)
        self._blocks = self._store.blocks
        self._recent = RecentAgents()
        self._unsaved: set[str] = set()
        self._locks = AgentLocks()
        self.ram_cache = RamCache(memory_max_bytes)
        try:
            self.budget = DiskBudget(
                self._store, max_bytes=max_bytes, keep_unused_s=keep_unused_s, on_evicted=self.ram_cache.drop
            )
        except OSError as error:
            self._folder.close()
            raise StoreUnusable(f"the store folder {folder} cannot be read: {error}") from error
        self._prefixes = PrefixLookup(self._store, self.budget, self.ram_cache, state_of=self._state)
        self.agent_jobs = AgentJobs(
            self._store,
            locks=self._locks,
            budget=self.budget,
            ram_cache=self.ram_cache,
            recent=self._recent,
            unsaved=self._unsaved,
            state_of=self._state,
        )

    @property
    def misses(self) -> Counter[str]:
        """How often less was reused than an agent's history allowed, by reason."""
        return self._prefixes.misses

    def open_agent(self, agent_id: str) -> AgentVersion:
        state = self._state(agent_id)
        problem = "its last turn was not saved" if agent_id in self._unsaved else state.problem
        if problem is not None:
            raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {problem}", usable=state.version)
        return state.version

    def restore(
        self,
        prompt_ids: Sequence[int],
        *,
        agent: AgentVersion | None,
        model: LoadedModel,
        salt: str | None,
        beside_others: bool = False,
    ) -> Restored:
        if not model.has_memory or (agent is None and model.spec.snapshot_layers):
            return Restored(None, "none")
        prompt = BlockChain(model.fingerprint, salt, tuple(prompt_ids))
        return self._prefixes.find(Lookup(prompt, agent, model, n_readers(beside_others)))

    def save(self, turn: Turn) -> tuple[int, Mapping[str, Any]]:
        """See `CacheStorePort.save`.

        Raises:
            AgentVersionConflict: `turn.parent` is not the agent's newest version (any more).
        """
        with self._locks.of(turn.agent_id):
            version, result = self._save(turn)
        self.budget.make_room()
        return version, result

    def _save(self, turn: Turn) -> tuple[int, Mapping[str, Any]]:
        state = self._state(turn.agent_id)
        if state.unreadable is not None:
            raise state.unreadable
        if state.version.number != turn.parent:
            raise AgentVersionConflict(
                f"agent {turn.agent_id!r} is at version {state.version.number}, the turn continues {turn.parent}"
            )
        chain = cached_chain(turn, state)
        snapshots = tuple(snapshot.n_tokens for snapshot in turn.cache.snapshots) if turn.cache else ()
        cached = CachedPrefix.of(chain, snapshots) if chain is not None else None
        result = turn.result_of(turn.parent + 1)
        record = TurnRecord(
            agent_id=turn.agent_id,
            version=turn.parent + 1,
            delivery=turn.delivery,
            result=dict(result),
            cache=cached,
            **delta(state.version.transcript, turn.transcript, state.record),
        ).encode()
        head = self._write(turn, state, record, chain)
        results = MappingProxyType({**state.version.results, turn.delivery: result})
        version = AgentVersion(turn.agent_id, turn.parent + 1, turn.transcript, results)
        size = state.record_bytes + len(record)
        self._recent.put(AgentState(version, record_checksum(record), cached, head, record_bytes=size))
        self._unsaved.discard(turn.agent_id)
        self.ram_cache.saved(turn)
        return version.number, result

    def save_blocks(
        self, token_ids: tuple[int, ...], cache: CacheSlice, *, model: LoadedModel, salt: str | None
    ) -> None:
        chain = BlockChain(model.fingerprint, salt, token_ids)
        blocks = chain.paths(self._blocks.path_of)
        try:
            with self.budget.lending(blocks):
                try:
                    self._blocks.save(chain, cache, model.spec)
                finally:
                    self.budget.look_again(None, blocks[cache.start // BLOCK_TOKENS :])
        except OSError:
            self.budget.not_saved(None)
            raise
        self.budget.make_room()

    def mark_unsaved(self, agent_id: str) -> None:
        self._unsaved.add(agent_id)
        self._recent.drop(agent_id)
        self._store.agent_writer(agent_id).mark_unsaved()
        self.budget.look_again(agent_id)

    def pin(self, agents: frozenset[str]) -> None:
        self.budget.pin(agents)
        self.ram_cache.pin(agents)

    def verify(self) -> list[str]:
        return self._store.verify()

    def close(self) -> None:
        """Log this run's misses, and unlock the folder. Every save was durable when it returned."""
        if misses := ", ".join(f"{n_times} {reason}" for reason, n_times in self.misses.most_common()):
            _log.info("cache misses since the store was opened: %s", misses)
        self._folder.close()

    def _state(self, agent_id: str) -> AgentState:
        """The agent's state: from memory while HEAD is the same, else from its records."""
        folder, held = self._store.agent(agent_id), self._recent.get(agent_id)
        if held is not None and held.head == folder.read_head():
            return held
        state = folder.read()
        if state.head and state.problem is None:
            self._recent.put(state)
        return state

    def _write(self, turn: Turn, state: AgentState, record: bytes, chain: BlockChain | None) -> bytes:
        """Write blocks and record within the budget; returns HEAD as written."""
        blocks = chain.paths(self._blocks.path_of) if chain is not None else ()
        written = blocks[turn.cache.start // BLOCK_TOKENS :] if turn.cache is not None else ()
        try:
            with self.budget.using(turn.agent_id, blocks):
                try:
                    head = self._commit(turn, state, record, chain)
                finally:
                    self.budget.look_again(turn.agent_id, written)
                self.budget.saved(turn.agent_id, blocks)
        except OSError:
            self._after_failure(turn)
            raise
        return head

    def _commit(self, turn: Turn, state: AgentState, record: bytes, chain: BlockChain | None) -> bytes:
        """Blocks first, durable before the record that names them; returns HEAD as written."""
        pieces: Pieces = {}
        if turn.cache is not None and chain is not None:
            self._blocks.save(chain, turn.cache, turn.model.spec)
            pieces = own_pieces(turn, turn.cache, self._store.agent(turn.agent_id), chain)
        return self._store.agent_writer(turn.agent_id).commit(state, turn.parent + 1, record, pieces)

    def _after_failure(self, turn: Turn) -> None:
        """If the turn could not be undone, `append` is refused from now on. The blocks written for it are useless."""
        self._recent.drop(turn.agent_id)
        if self._state(turn.agent_id).version.number != turn.parent:
            self._unsaved.add(turn.agent_id)
        self.budget.not_saved(turn.agent_id)

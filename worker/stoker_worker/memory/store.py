"""`AgentStore`: agent memory on disk, as the worker sees it (`CacheStorePort`).

Owns the order of a save, and what is known of each agent; what a prompt gets of it is `recall`'s, the files are in the
modules beside it. `open_agent` and `restore` run on the loader thread, `save` and `mark_unsaved` on finaliser threads,
at the same time, for different agents.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stoker_shared.errors import AgentTranscriptUnreadable, AgentVersionConflict, StoreUnusable
from stoker_worker.cache_spec import BLOCK_TOKENS
from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.agent_folder import AgentFolder, Pieces
from stoker_worker.memory.agent_state import AgentState
from stoker_worker.memory.block_folder import BlockFolder
from stoker_worker.memory.block_paths import cached_blocks, chain_paths
from stoker_worker.memory.block_search import n_readers
from stoker_worker.memory.budget import KEEP_UNUSED_S, DiskBudget
from stoker_worker.memory.files import Disk, Files
from stoker_worker.memory.hot import HotMemory
from stoker_worker.memory.recall import Question, Recall
from stoker_worker.memory.recent import RecentAgents
from stoker_worker.memory.record import TurnRecord, delta, record_checksum
from stoker_worker.memory.store_folder import StoreFolder
from stoker_worker.memory.turn_cache import cached_prefix, own_pieces, run_of
from stoker_worker.memory.verify import verify_agents, verify_blocks
from stoker_worker.ports import AgentVersion, CacheSlice, LoadedModel, Restored, Turn


class AgentStore:
    """Agent memory in one folder.

    Attributes:
        budget: what is on disk, and how much may be.
        hot: what is in RAM, and how much may be.

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
        """`max_bytes` and `keep_unused_s` as in `DiskBudget`, `memory_max_bytes` as in `HotMemory`, `wait` as in
        `StoreFolder`."""
        files = Disk() if files is None else files
        self._files = files
        self._folder = StoreFolder(folder, files, wait=wait)
        self._blocks = BlockFolder(self._folder.blocks, files=files, writer=self._folder.writer)
        self._recent = RecentAgents()
        self._unsaved: set[str] = set()
        self.hot = HotMemory(memory_max_bytes)
        try:
            self.budget = DiskBudget(
                StoreAccess(folder, files),
                max_bytes=max_bytes,
                keep_unused_s=keep_unused_s,
                on_evicted=self.hot.drop,
            )
        except OSError as error:
            self._folder.close()
            raise StoreUnusable(f"the store folder {folder} cannot be read: {error}") from error
        self._recall = Recall(files, self._blocks, self.budget, self.hot, folder_of=self._agent, state_of=self._state)

    @property
    def misses(self) -> Counter[str]:
        """How often less was reused than an agent's history allowed, by reason."""
        return self._recall.misses

    def open_agent(self, agent_id: str) -> AgentVersion:
        """See `CacheStorePort.open_agent`."""
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
        """See `CacheStorePort.restore`."""
        if not model.has_memory or (agent is None and model.spec.snapshot_layers):
            return Restored(None, "none")
        return self._recall.answer(Question(tuple(prompt_ids), agent, model, salt, n_readers(beside_others)))

    def save(self, turn: Turn) -> tuple[int, Mapping[str, Any]]:
        """See `CacheStorePort.save`.

        Raises:
            AgentVersionConflict: `turn.parent` is not the agent's newest version (any more).
        """
        state = self._state(turn.agent_id)
        if state.unreadable is not None:
            raise state.unreadable
        if state.version.number != turn.parent:
            raise AgentVersionConflict(
                f"agent {turn.agent_id!r} is at version {state.version.number}, the turn continues {turn.parent}"
            )
        cached = cached_prefix(turn, state)
        result = turn.result_of(turn.parent + 1)
        changes = delta(state.version.transcript, turn.transcript)
        kept = changes["keep_tokens"] or changes["keep_messages"] or changes["keep_text"]
        record = TurnRecord(
            agent_id=turn.agent_id,
            version=turn.parent + 1,
            parent=state.record if kept else None,
            delivery=turn.delivery,
            result=dict(result),
            cache=cached,
            **changes,
        ).encode()
        blocks = cached_blocks(cached, turn.transcript.token_ids, self._blocks.path_of)
        written = blocks[turn.cache.start // BLOCK_TOKENS :] if turn.cache is not None else ()
        try:
            with self.budget.using(turn.agent_id, blocks):
                try:
                    head = self._write(turn, state, record)
                finally:
                    self.budget.look_again(turn.agent_id, written)
                self.budget.saved(turn.agent_id, blocks)
        except OSError:
            self._after_failure(turn)
            raise
        self._unsaved.discard(turn.agent_id)
        results = MappingProxyType({**state.version.results, turn.delivery: result})
        version = AgentVersion(turn.agent_id, turn.parent + 1, turn.transcript, results)
        size = state.record_bytes + len(record)
        self._recent.put(AgentState(version, record_checksum(record), cached, head, record_bytes=size))
        self.hot.saved(turn)
        self.budget.make_room()
        return version.number, result

    def save_blocks(
        self, token_ids: tuple[int, ...], cache: CacheSlice, *, model: LoadedModel, salt: str | None
    ) -> None:
        """See `CacheStorePort.save_blocks`."""
        blocks = chain_paths(model.fingerprint, salt, token_ids, self._blocks.path_of)
        try:
            with self.budget.lending(blocks):
                try:
                    self._blocks.save(run_of(token_ids, model, salt, cache), cache.layers)
                finally:
                    self.budget.look_again(None, blocks[cache.start // BLOCK_TOKENS :])
        except OSError:
            self.budget.not_saved(None)
            raise
        self.budget.make_room()

    def mark_unsaved(self, agent_id: str) -> None:
        """See `CacheStorePort.mark_unsaved`."""
        self._unsaved.add(agent_id)
        self._recent.drop(agent_id)
        self._agent(agent_id).mark_unsaved()
        self.budget.look_again(agent_id)

    def protect(self, agents: frozenset[str]) -> None:
        """See `CacheStorePort.protect`."""
        self.budget.protect(agents)
        self.hot.protect(agents)

    def verify(self) -> list[str]:
        """One line for everything in the store that is not as it was written; reads all of it."""
        return [*verify_blocks(self._folder.blocks), *verify_agents(self._folder.agents, self._agent)]

    def close(self) -> None:
        """Let go of the folder; nothing is pending, every save was durable when it returned."""
        self._folder.close()

    def _agent(self, agent_id: str) -> AgentFolder:
        return AgentFolder(self._folder.agents, agent_id, files=self._files, writer=self._folder.writer)

    def _state(self, agent_id: str) -> AgentState:
        """The agent's state: from memory while HEAD is what it was, else from its records."""
        folder, held = self._agent(agent_id), self._recent.get(agent_id)
        if held is not None and held.head == folder.read_head():
            return held
        state = folder.read()
        if state.head and state.problem is None:
            self._recent.put(state)
        return state

    def _after_failure(self, turn: Turn) -> None:
        """If the turn could not even be taken back, `append` refuses from now on. Its blocks are of no use."""
        self._recent.drop(turn.agent_id)
        if self._state(turn.agent_id).version.number != turn.parent:
            self._unsaved.add(turn.agent_id)
        self.budget.not_saved(turn.agent_id)

    def _write(self, turn: Turn, state: AgentState, record: bytes) -> bytes:
        """Blocks first, durable before the record that speaks of them; returns HEAD as written."""
        folder, cache = self._agent(turn.agent_id), turn.cache
        pieces: Pieces = {}
        if cache is not None and turn.model.has_memory:
            run = run_of(turn.transcript.token_ids, turn.model, turn.cache_salt, cache)
            last_block = self._blocks.save(run, cache.layers)
            pieces = own_pieces(turn, cache, folder, last_block)
        return folder.commit(state, turn.parent + 1, record, pieces)

"""`AgentStore`: agent memory on disk, as the worker sees it (`CacheStorePort`).

Owns the order of a save and what a restore says about what it missed; the files are in the modules beside it.
`open_agent` and `restore` run on the loader thread, `save` and `mark_unsaved` on the finaliser thread, at the same
time, for different agents.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stoker_shared.errors import AgentTranscriptUnreadable, AgentVersionConflict
from stoker_worker.memory.agent_folder import AgentFolder, AgentState, Pieces
from stoker_worker.memory.block_folder import BlockFolder
from stoker_worker.memory.block_search import Found, OwnCache, Source
from stoker_worker.memory.files import Disk, Files
from stoker_worker.memory.recent import RecentAgents
from stoker_worker.memory.record import TurnRecord, delta, record_checksum
from stoker_worker.memory.restore import find_prefix
from stoker_worker.memory.store_folder import StoreFolder
from stoker_worker.memory.turn_cache import cached_prefix, own_pieces, run_of
from stoker_worker.memory.verify import verify_agents, verify_blocks
from stoker_worker.ports import AgentVersion, LoadedModel, Restored, RestoredPrefix, Turn

_log = logging.getLogger(__name__)


class AgentStore:
    """Agent memory in one folder.

    Attributes:
        misses: how often less was reused than an agent's history allowed, by reason.

    Raises:
        StoreUnusable: the folder is locked, of an unknown format, or cannot be written.
    """

    def __init__(self, folder: Path, *, files: Files | None = None) -> None:
        self.misses: Counter[str] = Counter()
        self._files = Disk() if files is None else files
        self._folder = StoreFolder(folder, self._files)
        self._blocks = BlockFolder(self._folder.blocks, files=self._files, writer=self._folder.writer)
        self._recent = RecentAgents()
        self._unsaved: set[str] = set()

    def open_agent(self, agent_id: str) -> AgentVersion:
        """See `CacheStorePort.open_agent`."""
        state = self._state(agent_id)
        problem = "its last turn was not saved" if agent_id in self._unsaved else state.problem
        if problem is not None:
            raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {problem}", usable=state.version)
        return state.version

    def restore(
        self, prompt_ids: Sequence[int], *, agent: AgentVersion, model: LoadedModel, salt: str | None
    ) -> Restored:
        """See `CacheStorePort.restore`."""
        if not model.spec.can_be_stored:
            return Restored(None, "none")
        prompt = tuple(prompt_ids)
        limit = max(0, len(prompt) - 1)
        own, other = self._own_cache(agent, model, salt)
        found = find_prefix(prompt, Source(model.fingerprint, salt, model.spec, own, self._blocks.path_of))
        reason = self._report(agent.agent_id, found, other if found.n_tokens < limit else None)
        prefix = RestoredPrefix(found.n_tokens, found.layers, found.states) if found.n_tokens else None
        return Restored(prefix, "disk" if prefix else "none", saved_blocks=found.saved_blocks, miss_reason=reason)

    def save(self, turn: Turn) -> tuple[int, Mapping[str, Any]]:
        """See `CacheStorePort.save`.

        Raises:
            AgentVersionConflict: `turn.parent` is not the agent's newest version (any more).
        """
        state = self._state(turn.agent_id)
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
        try:
            head = self._write(turn, state, record)
        except OSError:
            self._after_failure(turn)
            raise
        self._unsaved.discard(turn.agent_id)
        results = MappingProxyType({**state.version.results, turn.delivery: result})
        version = AgentVersion(turn.agent_id, turn.parent + 1, turn.transcript, results)
        size = state.record_bytes + len(record)
        self._recent.put(AgentState(version, record_checksum(record), cached, head, record_bytes=size))
        return version.number, result

    def mark_unsaved(self, agent_id: str) -> None:
        """See `CacheStorePort.mark_unsaved`."""
        self._unsaved.add(agent_id)
        self._recent.drop(agent_id)
        self._agent(agent_id).mark_unsaved()

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

    def _own_cache(
        self, agent: AgentVersion, model: LoadedModel, salt: str | None
    ) -> tuple[OwnCache | None, str | None]:
        """The agent's own cache as far as `model` and `salt` may use it, else why they may not."""
        state, transcript = self._state(agent.agent_id), agent.transcript
        cache = state.cache if state.version.number == agent.number else None
        if cache is None or transcript is None:
            return None, None
        if transcript.tokenizer_fingerprint != model.tokenizer_fingerprint:
            return None, "other_tokenizer"
        if cache.model != model.fingerprint:
            return None, "other_model"
        if cache.salt != salt:
            return None, "other_salt"
        folder = self._agent(agent.agent_id)
        snapshots = [(n, folder.snapshot_path(agent.number, index)) for index, n in enumerate(cache.snapshots)]
        tail = folder.tail_path(agent.number)
        return OwnCache(transcript.token_ids[: cache.tokens], tail, tuple(snapshots)), None

    def _report(self, agent_id: str, found: Found, other: str | None) -> str | None:
        """Remove what is damaged, so that the next save writes it anew; log, count and return the first reason."""
        for faulty in found.faults:
            if faulty.fault != "missing":
                with contextlib.suppress(OSError):
                    self._files.remove(faulty.path)
        reasons = [f"{faulty.kind}_{faulty.fault}" for faulty in found.faults] or ([other] if other else [])
        if not reasons:
            return None
        where = f": {found.faults[0].path}" if found.faults else ""
        _log.warning("agent %r: cache missed after %d tokens: %s%s", agent_id, found.n_tokens, reasons[0], where)
        self.misses[reasons[0]] += 1
        return reasons[0]

    def _after_failure(self, turn: Turn) -> None:
        """Leave nothing half-written; if the turn could not even be taken back, `append` refuses from now on."""
        self._recent.drop(turn.agent_id)
        if self._state(turn.agent_id).version.number != turn.parent:
            self._unsaved.add(turn.agent_id)

    def _write(self, turn: Turn, state: AgentState, record: bytes) -> bytes:
        """Blocks first, durable before the record that speaks of them; returns HEAD as written."""
        folder, cache = self._agent(turn.agent_id), turn.cache
        pieces: Pieces = {}
        if cache is not None and turn.model.spec.can_be_stored:
            last_block = self._blocks.save(run_of(turn, cache), cache.layers)
            pieces = own_pieces(turn, cache, folder, last_block)
        return folder.commit(state, turn.parent + 1, record, pieces)

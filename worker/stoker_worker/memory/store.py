"""`AgentStore`: agent memory on disk, as the worker sees it (`CacheStorePort`).

Owns the order of a save and what a restore says about what it missed; the files are in the modules beside it.
`open_agent` and `restore` run on the loader thread, `save` and `mark_unsaved` on the finaliser threads, at the same
time, for different agents.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stoker_shared.errors import AgentTranscriptUnreadable, AgentVersionConflict, StoreUnusable
from stoker_worker.cache_spec import BLOCK_TOKENS
from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.agent_folder import AgentFolder, AgentState
from stoker_worker.memory.block_folder import BlockFolder
from stoker_worker.memory.block_paths import cached_blocks, chain_paths
from stoker_worker.memory.blocks import chain, chain_root, common_length
from stoker_worker.memory.budget import KEEP_UNUSED_S, DiskBudget
from stoker_worker.memory.cache_file import CachePiece, fits
from stoker_worker.memory.files import Disk, Files
from stoker_worker.memory.hot import HotMemory
from stoker_worker.memory.recent import RecentAgents
from stoker_worker.memory.record import CachedPrefix, TurnRecord, delta, record_checksum
from stoker_worker.memory.restore import Found, OwnCache, PrefixSearch
from stoker_worker.memory.store_folder import StoreFolder
from stoker_worker.memory.verify import verify_agents, verify_blocks
from stoker_worker.ports import AgentVersion, LoadedModel, Restored, RestoredPrefix, Turn

_log = logging.getLogger(__name__)


class AgentStore:
    """Agent memory in one folder.

    Attributes:
        misses: how often less was reused than an agent's history allowed, by reason.
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
    ) -> None:
        """`max_bytes` and `keep_unused_s` as in `DiskBudget`, `memory_max_bytes` as in `HotMemory`."""
        self.misses: Counter[str] = Counter()
        self._files = Disk() if files is None else files
        self._folder = StoreFolder(folder, self._files)
        self._blocks = BlockFolder(self._folder.blocks, files=self._files, writer=self._folder.writer)
        self._recent = RecentAgents()
        self._unsaved: set[str] = set()
        self.hot = HotMemory(memory_max_bytes)
        try:
            self.budget = DiskBudget(
                StoreAccess(folder, self._files),
                max_bytes=max_bytes,
                keep_unused_s=keep_unused_s,
                on_evicted=self.hot.drop,
            )
        except OSError as error:
            self._folder.close()
            raise StoreUnusable(f"the store folder {folder} cannot be read: {error}") from error

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
        prompt = tuple(prompt_ids)
        own, other = self._own_cache(agent, model, salt)
        blocks = chain_paths(model.fingerprint, salt, prompt, self._blocks.path_of)
        with self.budget.using(agent.agent_id, blocks):
            if other is None and agent.agent_id in self.hot:
                restored = self._from_memory(prompt, blocks, agent=agent, model=model, salt=salt, own=own)
                if restored is not None:
                    return restored
            return self._from_disk(prompt, agent=agent, model=model, salt=salt, own=own, other=other)

    def _from_memory(
        self,
        prompt: tuple[int, ...],
        blocks: Sequence[Path],
        *,
        agent: AgentVersion,
        model: LoadedModel,
        salt: str | None,
        own: OwnCache | None,
    ) -> Restored | None:
        """What the agent's hot cache gives; ``None`` when the disk may give more. `blocks` are the prompt's."""
        limit = max(0, len(prompt) - 1)
        saved_blocks = sum(1 for _ in takewhile(Path.exists, blocks))
        disk_tokens = common_length(own.token_ids, prompt[:limit]) if own else 0
        if not model.spec.snapshot_layers:
            disk_tokens = max(disk_tokens, min(limit, saved_blocks * BLOCK_TOKENS))
        prefix = self.hot.restore(prompt, agent=agent, model=model, salt=salt, disk_tokens=disk_tokens)
        if prefix is None:
            return None
        # A prompt of whole blocks leaves out one token, and its last block needs no second write all the same.
        saved_blocks = min(saved_blocks, (prefix.n_tokens + 1) // BLOCK_TOKENS)
        return Restored(prefix, "memory", saved_blocks=saved_blocks)

    def _from_disk(
        self,
        prompt: tuple[int, ...],
        *,
        agent: AgentVersion,
        model: LoadedModel,
        salt: str | None,
        own: OwnCache | None,
        other: str | None,
    ) -> Restored:
        limit = max(0, len(prompt) - 1)
        search = PrefixSearch(
            prompt, model=model.fingerprint, salt=salt, spec=model.spec, own=own, path_of=self._blocks.path_of
        )
        found = search.run()
        reason = self._report(agent.agent_id, found, other if found.n_tokens < limit else None)
        prefix = RestoredPrefix(found.n_tokens, found.layers) if found.n_tokens else None
        if prefix is not None:
            has_all = prefix.n_tokens >= (len(own.token_ids) if own else 0)
            self.hot.loaded(prefix, prompt, agent=agent, model=model, salt=salt, has_all=has_all)
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
        cached = _cached_prefix(turn, state)
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
        with self.budget.using(turn.agent_id, blocks):
            try:
                head = self._write(turn, state, record)
            except OSError:
                self._after_failure(turn)
                raise
            finally:
                self.budget.look_again(turn.agent_id, written)
            self.budget.saved(turn.agent_id, blocks)
        self._unsaved.discard(turn.agent_id)
        results = MappingProxyType({**state.version.results, turn.delivery: result})
        version = AgentVersion(turn.agent_id, turn.parent + 1, turn.transcript, results)
        size = state.record_bytes + len(record)
        self._recent.put(AgentState(version, record_checksum(record), cached, head, record_bytes=size))
        self.hot.saved(turn)
        self.budget.make_room()
        return version.number, result

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
        tail = self._agent(agent.agent_id).tail_path(agent.number)
        return OwnCache(transcript.token_ids[: cache.tokens], tail), None

    def _report(self, agent_id: str, found: Found, other: str | None) -> str | None:
        """Remove what is damaged, so that the next save writes it anew; log, count and return the first reason."""
        for faulty in found.faults:
            if faulty.fault != "missing":
                with contextlib.suppress(OSError):
                    self._files.remove(faulty.path)
        if found.faults:
            blocks = (faulty.path for faulty in found.faults if faulty.kind == "block")
            self.budget.look_again(agent_id, blocks)
        gone = "evicted" if self.budget.was_evicted(agent_id) else None
        reasons = [
            (gone if faulty.fault == "missing" else None) or f"{faulty.kind}_{faulty.fault}" for faulty in found.faults
        ] or ([other] if other else [])
        if not reasons:
            return None
        where = f": {found.faults[0].path}" if found.faults else ""
        level = logging.INFO if reasons[0] == "evicted" else logging.WARNING
        _log.log(level, "agent %r: cache missed after %d tokens: %s%s", agent_id, found.n_tokens, reasons[0], where)
        self.misses[reasons[0]] += 1
        return reasons[0]

    def _after_failure(self, turn: Turn) -> None:
        """Leave nothing half-written; if the turn could not even be taken back, `append` refuses from now on."""
        self._recent.drop(turn.agent_id)
        with contextlib.suppress(OSError):
            self._folder.writer.discard_own()
        if self._state(turn.agent_id).version.number != turn.parent:
            self._unsaved.add(turn.agent_id)

    def _write(self, turn: Turn, state: AgentState, record: bytes) -> bytes:
        """Blocks first, durable before the record that speaks of them; returns HEAD as written."""
        tail = None
        if turn.cache is not None:
            model, token_ids = turn.model, turn.transcript.token_ids
            before = chain(chain_root(model.fingerprint, turn.cache_salt), token_ids[: turn.cache.start])[-1]
            piece = CachePiece(
                "block", model.fingerprint, model.spec, before, token_ids[turn.cache.start : turn.cache.stop]
            )
            last = self._blocks.save(piece, turn.cache.layers)
            n_full = len(piece.token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
            if n_full < len(piece.token_ids):
                rest = replace(piece, kind="tail", parent=last, token_ids=piece.token_ids[n_full:])
                tail = rest.encode(turn.cache.layers, n_full)
        return self._agent(turn.agent_id).commit(state, turn.parent + 1, record, tail)


def _cached_prefix(turn: Turn, state: AgentState) -> CachedPrefix | None:
    """Which cache the agent has after `turn`.

    Raises:
        ValueError: the turn's cache is not the cache of its transcript.
    """
    token_ids, cache, model = turn.transcript.token_ids, turn.cache, turn.model
    if cache is not None:
        n_tokens = cache.stop - cache.start
        if cache.start % BLOCK_TOKENS or not n_tokens >= 0 or cache.stop > len(token_ids):
            raise ValueError(f"cache of tokens {cache.start} to {cache.stop}, of a transcript of {len(token_ids)}")
        if not fits(model.spec, cache.layers, n_tokens):
            raise ValueError("the cache arrays are not of the shapes and dtype that the model's cache spec says")
        tokens = cache.stop
    elif state.cache is not None and (state.cache.model, state.cache.salt) == (model.fingerprint, turn.cache_salt):
        # Saved without cache: the parent's blocks serve as far as its tokens were kept; its tail goes.
        base = state.version.transcript.token_ids if state.version.transcript else ()
        tokens = common_length(base[: state.cache.tokens], token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    else:
        return None
    last_block = chain(chain_root(model.fingerprint, turn.cache_salt), token_ids[:tokens])[-1]
    return CachedPrefix(model.fingerprint, turn.cache_salt, tokens, last_block)

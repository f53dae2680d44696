"""Agent memory without a disk: `CacheStorePort` for the tests of everything above the store.

`AgentCacheStore` passes the same contract suite (tests/worker/memory/test_store_contract.py). Any thread.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from tests.in_memory.agent_jobs import InMemoryAgentJobs
from tests.in_memory.agent_memory import AgentMemory, SavedCache, SavedVersion, cut, join

from stoker_shared.errors import AgentTranscriptUnreadable, AgentVersionConflict, SharedStoreAway
from stoker_worker.memory.blocks import BlockChain, common_length, fits, state_fits
from stoker_worker.ports import (
    AgentVersion,
    CacheSlice,
    CacheStorePort,
    Delivery,
    LastVersion,
    LoadedModel,
    PlaceOf,
    Restored,
    RestoredPrefix,
    Turn,
)
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, ModelCacheSpec


class InMemoryAgentStore(CacheStorePort):
    """Never evicts.

    Attributes:
        memory: what is in it; tests look there, and set `memory.before_write` to play a full or a slow disk.
        beside_others: of each call of `restore`, in order.
        read_ahead_for: the agents of each call of `read_ahead`, and the model's name when it was loaded.
        place_of: as `order_by` was told.
        at_hand: agents whose caches a restore finds in RAM; ``None``: all.
    """

    def __init__(self) -> None:
        self.memory = AgentMemory()
        self.beside_others: list[bool] = []
        self.read_ahead_for: list[tuple[str, ...] | str] = []
        self.agent_jobs = InMemoryAgentJobs(self.memory)
        self.at_hand: set[str] | None = None
        self._begun: set[str] = set()

    def look(self, agent_id: str, last: LastVersion | None = None) -> bool:
        """No other worker has what is in this process's memory."""
        self.memory.looks.append((agent_id, last))
        if self.memory.is_away:
            raise SharedStoreAway("the shared store is away (in memory)")
        return self.memory.is_certain or last is None

    def close_number(self, agent_id: str) -> None:
        self.memory.closed.append(agent_id)

    def open_agent(self, agent_id: str) -> AgentVersion:
        with self.memory.lock:
            version = self.memory.newest(agent_id)
            if agent_id in self.memory.unsaved:
                problem = f"the transcript of agent {agent_id!r}: its last turn was not saved"
                raise AgentTranscriptUnreadable(problem, usable=version)
            return version

    def answer(self, agent_id: str, delivery: Delivery) -> Mapping[str, Any] | None:
        with self.memory.lock:
            return self.memory.answer(agent_id, delivery)

    def restore(
        self,
        prompt_ids: Sequence[int],
        *,
        agent: AgentVersion | None,
        model: LoadedModel,
        salt: str | None,
        max_tokens: int = 0,
        is_saved: bool = True,
        beside_others: bool = False,
    ) -> Restored:
        if not model.has_memory or (agent is None and model.spec.snapshot_layers):
            return Restored(None, "none")
        chain = BlockChain(model.fingerprint, salt, tuple(prompt_ids))
        limit = max(0, len(prompt_ids) - 1)
        with self.memory.lock:
            self.beside_others.append(beside_others)
            shared = 0
            if agent is None:
                shared = sum(1 for _ in takewhile(self._begun.__contains__, chain.addresses))
                self._begun.update(chain.addresses)
            else:
                self.memory.counted_on.setdefault(agent.agent_id, set()).update(chain.addresses)
            saved = sum(
                1 for _ in takewhile(self.memory.blocks.__contains__, chain.addresses[: -(-limit // BLOCK_TOKENS)])
            )
            own, reason = self._own_cache(agent, model, salt)
            prefix = self._longest_prefix(chain, limit, saved, own, model.spec)
        if prefix is None:
            return Restored(None, "none", 0 if model.spec.snapshot_layers else saved, reason, shared)
        if prefix.n_tokens == limit:
            reason = None
        return Restored(prefix, "memory", min(saved, -(-prefix.n_tokens // BLOCK_TOKENS)), reason, shared)

    def save(self, turn: Turn) -> Mapping[str, Any]:
        check_cache(turn)
        if self.memory.is_away:
            raise SharedStoreAway("the shared store is away (in memory)")
        self.memory.before_write(turn.agent_id)
        with self.memory.lock:
            newest, base = self.memory.newest(turn.agent_id), turn.base
            if (newest.number, newest.head) != (base.number, base.head):
                raise AgentVersionConflict(
                    f"agent {turn.agent_id!r} is at version {newest.number}, the turn continues {base.number}"
                )
            cache = self._cache_after(turn)
            version = SavedVersion(turn.delivery, turn.transcript, dict(turn.result), cache)
            self.memory.add_version(turn.agent_id, version)
        return turn.result

    def ended(self, agent_id: str, delivery: Delivery, *, remember_s: float) -> None:
        with self.memory.lock:
            self.memory.ended[agent_id, delivery] = time.time() + remember_s

    def save_blocks(
        self, token_ids: tuple[int, ...], cache: CacheSlice, *, model: LoadedModel, salt: str | None
    ) -> None:
        self.memory.before_write(None)
        with self.memory.lock:
            self._add_blocks(BlockChain(model.fingerprint, salt, token_ids), cache)

    def mark_unsaved(self, agent_id: str) -> None:
        with self.memory.lock:
            self.memory.unsaved.add(agent_id)

    def pin(self, running: frozenset[str], waiting: frozenset[str], *, is_all: bool = True) -> None:
        self.memory.pinned = running | waiting

    def order_by(self, place_of: PlaceOf) -> None:
        self.place_of = place_of

    def is_away(self) -> bool:
        return self.memory.is_away

    def is_at_hand(self, agent_id: str) -> bool:
        return self.at_hand is None or agent_id in self.at_hand

    def read_ahead(self, agents: Sequence[str]) -> None:
        self.read_ahead_for.append(tuple(agents))

    def model_loaded(self, model: LoadedModel) -> None:
        self.read_ahead_for.append(model.name)

    def close(self) -> None:
        pass

    # --- caches ---

    def _own_cache(
        self, agent: AgentVersion | None, model: LoadedModel, salt: str | None
    ) -> tuple[SavedCache | None, str | None]:
        """The cache of the agent's newest version if this model and salt may use it, else why not."""
        versions = self.memory.agents.get(agent.agent_id, []) if agent is not None else []
        if agent is None or not versions or len(versions) != agent.number or (cache := versions[-1].cache) is None:
            return None, None
        if versions[-1].transcript.tokenizer_fingerprint != model.tokenizer_fingerprint:
            return None, "other_tokenizer"
        if cache.chain.model != model.fingerprint:
            return None, "other_model"
        return (cache, None) if cache.chain.salt == salt else (None, "other_salt")

    def _longest_prefix(
        self, chain: BlockChain, limit: int, saved_blocks: int, own: SavedCache | None, spec: ModelCacheSpec
    ) -> RestoredPrefix | None:
        own_tokens = common_length(own.chain.token_ids, chain.token_ids[:limit]) if own else 0
        if spec.snapshot_layers:
            usable = [snapshot for snapshot in own.snapshots if snapshot.n_tokens <= own_tokens] if own else []
            if own is None or not usable:
                return None
            n_tokens = usable[-1].n_tokens
            return RestoredPrefix(n_tokens, cut(own.layers, 0, n_tokens), usable[-1].states)
        n_tokens = max(own_tokens, min(limit, saved_blocks * BLOCK_TOKENS))
        if not n_tokens:
            return None
        if own is not None and n_tokens == own_tokens:
            return RestoredPrefix(n_tokens, cut(own.layers, 0, n_tokens))
        blocks = [self.memory.blocks[address] for address in chain.addresses[:saved_blocks]]
        return RestoredPrefix(n_tokens, cut(join(blocks), 0, n_tokens))

    def _cache_after(self, turn: Turn) -> SavedCache | None:
        model, cache = turn.model, turn.cache
        if not model.has_memory:
            return None
        chain = BlockChain(model.fingerprint, turn.cache_salt, turn.transcript.token_ids)
        if cache is None:  # the full blocks of the tokens that stay are still right
            old, _ = self._own_cache(self.memory.newest(turn.agent_id), model, turn.cache_salt)
            if old is None or not model.spec.full_layers:
                return None
            n_tokens = common_length(old.chain.token_ids, chain.token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
            return SavedCache(chain.up_to(n_tokens), model.spec, cut(old.layers, 0, n_tokens))
        chain = chain.up_to(cache.stop)
        if model.spec.full_layers:
            self._add_blocks(chain, cache)
        return SavedCache(chain, model.spec, join([cache.layers]), cache.snapshots)

    def _add_blocks(self, chain: BlockChain, cache: CacheSlice) -> None:
        for index in range(cache.start // BLOCK_TOKENS, chain.n_blocks):
            start = index * BLOCK_TOKENS
            self.memory.blocks.setdefault(chain.addresses[index], cut(cache.layers, start, start + BLOCK_TOKENS))


def check_cache(turn: Turn) -> None:
    """Raises `ValueError` unless the turn's cache is the cache of its transcript."""
    cache, spec, n_tokens = turn.cache, turn.model.spec, len(turn.transcript.token_ids)
    if cache is None or not turn.model.has_memory:
        return
    if cache.start % BLOCK_TOKENS or not cache.start <= cache.stop <= n_tokens:
        raise ValueError(f"cache of tokens {cache.start} to {cache.stop}, of a transcript of {n_tokens}")
    if not fits(spec, cache.layers, cache.stop):
        raise ValueError("the cache arrays are not of the model's shapes and dtype")
    if not all(state_fits(spec, snapshot.states, snapshot.n_tokens) for snapshot in cache.snapshots):
        raise ValueError("the snapshot's arrays are not of the model's shapes and dtypes")

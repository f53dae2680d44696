"""Agent memory without a disk: `CacheStorePort` for the tests of everything above the store.

`AgentCacheStore` passes the same contract suite (tests/worker/memory/test_store_contract.py). Any thread.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count, takewhile
from typing import Any

import numpy as np

from stoker_shared.agents import (
    AgentForgotten,
    AgentForked,
    AgentInfo,
    AgentRequest,
    AgentResult,
    AgentRolledBack,
    PastVersion,
    read_agent_result,
)
from stoker_shared.errors import (
    AgentExists,
    AgentNotFound,
    AgentTranscriptUnreadable,
    AgentVersionConflict,
    SharedStoreAway,
)
from stoker_worker.memory.blocks import BlockChain, common_length, fits, state_fits
from stoker_worker.ports import (
    AgentJobsPort,
    AgentVersion,
    CacheSlice,
    CacheStorePort,
    Delivery,
    LastVersion,
    LayerKV,
    LoadedModel,
    PlaceOf,
    Restored,
    RestoredPrefix,
    Snapshot,
    Transcript,
    Turn,
)
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, ModelCacheSpec

_heads = count(1)


@dataclass(frozen=True)
class SavedCache:
    """Cache of the tokens of `chain`, from the first on."""

    chain: BlockChain
    spec: ModelCacheSpec
    layers: tuple[LayerKV, ...]
    snapshots: tuple[Snapshot, ...] = ()

    def full_blocks(self) -> "SavedCache | None":
        """What is left without the tail; nothing of a cache that also needs a snapshot."""
        if not self.spec.full_layers or self.spec.snapshot_layers:
            return None
        n_tokens = self.chain.n_blocks * BLOCK_TOKENS
        return SavedCache(self.chain.up_to(n_tokens), self.spec, cut(self.layers, 0, n_tokens))


@dataclass(frozen=True)
class SavedVersion:
    """One version of an agent, and the answer to the job that made it."""

    delivery: Delivery
    transcript: Transcript
    result: Mapping[str, Any]
    cache: SavedCache | None
    head: bytes = field(default_factory=lambda: b"%d" % next(_heads))
    saved_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


class AgentMemory:
    """The state that the store and the jobs about agents share. Every method is called with `lock` held.

    Attributes:
        before_write: called without the lock before anything is changed, with the agent's id (``None``: no agent's).
        agents: each agent's versions, the first of them version 1.
        blocks: the full blocks, by address.
        counted_on: addresses of the blocks that an agent's work was restored from, or may have been.
        ended: until which Unix time the answer to an agent's delivery is kept whose job has ended.
        looks: the calls of `look`, in order.
        is_away: a shared store that does not answer.
        is_certain: whether `look` asks although the agent's newest version is from here.
        closed: the agents of each call of `close_number`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.before_write: Callable[[str | None], None] = lambda agent_id: None
        self.agents: dict[str, list[SavedVersion]] = {}
        self.blocks: dict[str, tuple[LayerKV, ...]] = {}
        self.unsaved: set[str] = set()
        self.pinned: frozenset[str] = frozenset()
        self.counted_on: dict[str, set[str]] = {}
        self.ended: dict[tuple[str, Delivery], float] = {}
        self.looks: list[tuple[str, LastVersion | None]] = []
        self.is_away = False
        self.is_certain = True
        self.closed: list[str] = []

    def newest(self, agent_id: str) -> AgentVersion:
        versions = self.agents.get(agent_id, [])
        if not versions:
            return AgentVersion(agent_id, 0, None)
        return AgentVersion(agent_id, len(versions), versions[-1].transcript, versions[-1].head)

    def answer(self, agent_id: str, delivery: Delivery) -> Mapping[str, Any] | None:
        """Raises `AgentTranscriptUnreadable`: it was answered, and the answer is forgotten."""
        for version in self.agents.get(agent_id, []):
            if version.delivery == delivery:
                if self.is_forgotten(agent_id, delivery):
                    raise AgentTranscriptUnreadable(f"the answers of agent {agent_id!r}: it is forgotten", usable=None)
                return version.result
        return None

    def is_forgotten(self, agent_id: str, delivery: Delivery) -> bool:
        return self.ended.get((agent_id, delivery), math.inf) <= time.time()

    def add_version(self, agent_id: str, version: SavedVersion) -> None:
        self.agents.setdefault(agent_id, []).append(version)
        self.unsaved.discard(agent_id)
        self.counted_on.pop(agent_id, None)

    def used_by_others(self, agent_id: str, *, count_on: bool = True) -> set[str]:
        """Addresses of the blocks that other agents use and, with `count_on`, that their work was restored from."""
        caches = [versions[-1].cache for other, versions in self.agents.items() if other != agent_id]
        used = {address for cache in caches if cache is not None for address in cache.chain.addresses}
        held = [self.counted_on.get(other, set()) for other in self.pinned - {agent_id}] if count_on else []
        return used.union(*held)


def cut(layers: tuple[LayerKV, ...], start: int, stop: int) -> tuple[LayerKV, ...]:
    """A copy of tokens [start, stop)."""
    return tuple((keys[:, start:stop].copy(), values[:, start:stop].copy()) for keys, values in layers)


def join(parts: Sequence[tuple[LayerKV, ...]]) -> tuple[LayerKV, ...]:
    """A copy of the parts, one after the other."""
    return tuple(
        (np.concatenate([keys for keys, _ in layer], axis=1), np.concatenate([values for _, values in layer], axis=1))
        for layer in zip(*parts, strict=True)
    )


class InMemoryAgentJobs(AgentJobsPort):
    def __init__(self, memory: AgentMemory) -> None:
        self._memory = memory
        self._forgotten: dict[tuple[str, Delivery], AgentForgotten] = {}

    def answer(self, request: AgentRequest, delivery: Delivery) -> AgentResult | None:
        if request.action == "info":
            return None
        with self._memory.lock:
            if request.action == "forget":
                is_forgotten = self._memory.is_forgotten(request.agent_id, delivery)
                return None if is_forgotten else self._forgotten.get((request.agent_id, delivery))
            known = self._memory.answer(request.changed_agent, delivery)
            return None if known is None else read_agent_result(known)

    def run(self, request: AgentRequest, delivery: Delivery) -> AgentResult:
        if request.action == "info":
            with self._memory.lock:
                return self._info(request.agent_id, delivery)
        self._memory.before_write(request.target or request.agent_id)
        with self._memory.lock:
            number = self._memory.newest(request.agent_id).number
            if request.expect_version not in (None, number):
                raise AgentVersionConflict(
                    f"agent {request.agent_id!r} is at version {number}, not {request.expect_version}"
                )
            if request.action == "forget":
                return self._forget(request.agent_id, delivery)
            if request.action == "fork":
                assert request.target is not None  # the request is valid
                return self._fork(request.agent_id, request.target, delivery)
            return self._roll_back(request.agent_id, request.version, delivery)

    def _info(self, agent_id: str, delivery: Delivery) -> AgentInfo:
        memory, versions = self._memory, self._memory.agents.get(agent_id, [])
        is_unsaved = agent_id in memory.unsaved
        if not versions:
            state = "unsaved" if is_unsaved else "ok"
            return AgentInfo(job_id=delivery.job_id, agent_id=agent_id, exists=is_unsaved, state=state)
        newest = versions[-1]
        transcript, own = newest.transcript, set(newest.cache.chain.addresses if newest.cache else ())
        messages, text = transcript.messages, transcript.text
        return AgentInfo(
            job_id=delivery.job_id,
            agent_id=agent_id,
            exists=True,
            version=len(versions),
            tokens=len(transcript.token_ids),
            messages=None if messages is None else len(messages),
            text_chars=None if text is None else len(text),
            cached_tokens=len(newest.cache.chain.token_ids) if newest.cache else 0,
            own_bytes=4 * len(transcript.token_ids),
            block_bytes=self._bytes_of(own),
            shared_bytes=self._bytes_of(own & memory.used_by_others(agent_id, count_on=False)),
            last_used=newest.saved_at,
            state="unsaved" if is_unsaved else "ok",
            problem="its last turn was not saved" if is_unsaved else None,
            versions=tuple(
                PastVersion(
                    version=number, tokens=len(x.transcript.token_ids), job_id=x.delivery.job_id, saved_at=x.saved_at
                )
                for number, x in enumerate(versions[:-1], start=1)
            )[-100:],
        )

    def _forget(self, agent_id: str, delivery: Delivery) -> AgentForgotten:
        memory = self._memory
        versions = memory.agents.get(agent_id, [])
        caches: list[SavedCache] = [version.cache for version in versions if version.cache is not None]
        there = {address for cache in caches for address in cache.chain.addresses} & memory.blocks.keys()
        going = there - memory.used_by_others(agent_id)
        forgotten = AgentForgotten(
            job_id=delivery.job_id,
            agent_id=agent_id,
            existed=bool(versions) or agent_id in memory.unsaved,
            version=len(versions),
            blocks=len(going),
            block_bytes=self._bytes_of(going),
            shared_blocks=len(there) - len(going),
        )
        for address in going:
            del memory.blocks[address]
        memory.agents.pop(agent_id, None)
        memory.unsaved.discard(agent_id)
        if forgotten.existed:
            self._forgotten[agent_id, delivery] = forgotten
        return forgotten

    def _fork(self, source: str, target: str, delivery: Delivery) -> AgentForked:
        memory = self._memory
        if source in memory.unsaved:
            raise AgentTranscriptUnreadable(f"the transcript of agent {source!r}: its last turn was not saved")
        if source not in memory.agents:
            raise AgentNotFound(f"there is no agent {source!r}")
        if target in memory.agents or target in memory.unsaved:
            raise AgentExists(f"there is an agent {target!r} already")
        newest = memory.agents[source][-1]
        forked = AgentForked(
            job_id=delivery.job_id,
            agent_id=source,
            target=target,
            version=1,
            from_version=len(memory.agents[source]),
            tokens=len(newest.transcript.token_ids),
        )
        result = forked.model_dump(mode="json")
        memory.add_version(target, SavedVersion(delivery, newest.transcript, result, newest.cache))
        return forked

    def _roll_back(self, agent_id: str, version: int | None, delivery: Delivery) -> AgentRolledBack:
        versions = self._memory.agents.get(agent_id, [])
        if not versions:
            raise AgentNotFound(f"there is no agent {agent_id!r}")
        to = len(versions) - 1 if version is None else version
        if not 1 <= to <= len(versions):
            raise AgentNotFound(f"agent {agent_id!r} has no version {to}: it is at version {len(versions)}")
        goal = versions[to - 1]
        back = AgentRolledBack(
            job_id=delivery.job_id,
            agent_id=agent_id,
            version=len(versions) + 1,
            to_version=to,
            from_version=len(versions),
            tokens=len(goal.transcript.token_ids),
        )
        cache = goal.cache.full_blocks() if goal.cache else None
        result = back.model_dump(mode="json")
        self._memory.add_version(agent_id, SavedVersion(delivery, goal.transcript, result, cache))
        return back

    def _bytes_of(self, addresses: set[str]) -> int:
        blocks = (self._memory.blocks.get(address, ()) for address in addresses)
        return sum(keys.nbytes + values.nbytes for block in blocks for keys, values in block)


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

"""What the in-memory agent store holds: every version whole, every full block by its address. One lock guards it."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any

import numpy as np

from stoker_shared.errors import AgentTranscriptUnreadable
from stoker_worker.memory.blocks import BlockChain
from stoker_worker.ports import AgentVersion, Delivery, LastVersion, LayerKV, Snapshot, Transcript
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

"""Reads the whole cache of an agent's newest version from disk, or nothing. Any thread; writes nothing.

A restore reads as much as there is and names what is damaged; this is for reading ahead, which leaves that to it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from stoker_worker.memory import agent_table, cache_index
from stoker_worker.memory.block_chain import BlockChain
from stoker_worker.memory.block_lookup import AgentBlocks, BlockLookup, load_snapshot
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.ram_cache_entry import RamCacheEntry
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.ports import AgentVersion, CachedPrefix, LayerKV, LoadedModel, Snapshot
from stoker_worker.ports.cache_spec import ModelCacheSpec


@dataclass(frozen=True)
class WholeCache:
    """A cache all of whose files should be there.

    Attributes:
        spec: of the model that made it.
    """

    agent: AgentVersion
    cache: CachedPrefix
    spec: ModelCacheSpec

    @classmethod
    def find(cls, parts: StoreParts, agent_id: str, model: LoadedModel | None) -> Self | None:
        """
        Args:
            model: that must have made it; ``None``: any model that has saved something in this store.

        Raises:
            OSError, Damaged, ValueError: the rows cannot be read.
        """
        with parts.database.snapshot() as connection:
            state = agent_table.read_agent(connection, agent_id)
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

    def read(self, parts: StoreParts, n_readers: int, before_each: Callable[[], None]) -> RamCacheEntry | None:
        """The cache, verified; ``None`` unless all files are whole.

        Args:
            n_readers, before_each: as in `BlockLookup`; called before each snapshot too.
        """
        agent, cache, spec = self.agent, self.cache, self.spec
        own = AgentBlocks.of(agent, parts.pieces)
        chain = BlockChain(cache.model, cache.salt, own.token_ids)
        if not chain.has_fingerprint:
            return None
        layers: tuple[LayerKV, ...] = ()
        if spec.full_layers:
            lookup = BlockLookup(chain, cache.tokens, spec, own, parts.blocks.path_of, n_readers, before_each)
            found = lookup.run()
            if found.n_tokens < cache.tokens:
                return None
            layers = found.layers
        snapshots = []
        for n_tokens, path in own.snapshots:
            before_each()
            states, fault = load_snapshot(path, chain.up_to(n_tokens), spec)
            if fault is not None:
                return None
            snapshots.append(Snapshot(n_tokens, states))
        return RamCacheEntry(
            agent.number, cache.model, cache.salt, own.token_ids, layers, tuple(snapshots), has_all=True
        )


def _spec_of(connection: Connection, fingerprint: str, model: LoadedModel | None) -> ModelCacheSpec | None:
    if model is not None:
        return model.spec if model.has_memory and model.fingerprint == fingerprint else None
    text = cache_index.read_model(connection, fingerprint)
    return None if text is None else ModelCacheSpec.parse(text)

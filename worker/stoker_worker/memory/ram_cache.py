"""Keeps recently used agents' caches in RAM, so that their next turn skips the disk. Any thread; one lock, which is
not held while arrays are copied.

Entries hold arrays that others made anyway: what a restore assembled, what a turn handed over. They are lent to the
engine, which makes its own copy.
"""

import logging
import os
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Final

from stoker_worker.memory.block_chain import BlockChain, common_length
from stoker_worker.memory.ram_cache_entry import OwnedSegment, RamCacheEntry, Segment, join
from stoker_worker.ports import AgentVersion, RestoredPrefix, Snapshot, Turn
from stoker_worker.ports.cache_spec import ModelCacheSpec

_log = logging.getLogger(__name__)

DEFAULT_SHARE: Final = 1 / 16
"""Of the machine's RAM: the model and the batch need the rest."""

_NO_SNAPSHOT: Final = Snapshot(0, ())


def default_memory_bytes() -> int:
    """The limit where none is given; logged, because it depends on the machine."""
    max_bytes = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * DEFAULT_SHARE)
    _log.info("recent agents' caches may take %.1f GB of RAM", max_bytes / 1e9)
    return max_bytes


class RamCache:
    """Drops the least recently used agents first, but none with work: a new entry that does not fit is refused.

    Attributes:
        max_bytes: 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._n_bytes = 0
        self._entries: OrderedDict[str, RamCacheEntry] = OrderedDict()
        self._pinned: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    def __contains__(self, agent_id: str) -> bool:
        return agent_id in self._entries

    def pin(self, agents: frozenset[str]) -> None:
        """From now on these agents, and no others, lose nothing."""
        self._pinned = agents

    def restore(
        self, prompt: BlockChain, *, agent: AgentVersion, spec: ModelCacheSpec, disk_tokens: int
    ) -> RestoredPrefix | None:
        """The cached prefix of `prompt`, at most all but its last token; ``None``: ask the disk.

        Args:
            disk_tokens: how many tokens the disk may have of it. A shorter prefix is only given when the disk has no
                longer one.
        """
        entry = self._get(agent.agent_id)
        if entry is None or not entry.belongs_to(agent.number, prompt.model, prompt.salt):
            return None
        shared = min(common_length(entry.token_ids, prompt.token_ids), max(0, len(prompt.token_ids) - 1))
        n_tokens, states = shared, _NO_SNAPSHOT.states
        if spec.snapshot_layers:
            usable = [snapshot for snapshot in entry.snapshots if snapshot.n_tokens <= shared]
            last = max(usable, key=lambda snapshot: snapshot.n_tokens, default=_NO_SNAPSHOT)
            n_tokens, states = last.n_tokens, last.states
        if not n_tokens or (n_tokens < disk_tokens and not (entry.has_all and spec.snapshot_layers)):
            return None
        if n_tokens < len(entry.token_ids) or len(entry.segments) == 1:
            return RestoredPrefix(n_tokens, entry.layers_of(n_tokens), states)
        rest, segments = replace(entry, segments=()), [OwnedSegment(segment) for segment in entry.segments]
        self.drop(agent.agent_id)
        del entry  # so that `join` frees the parts
        layers = join(segments, n_tokens)
        self._put(agent.agent_id, replace(rest, segments=(Segment(0, n_tokens, layers),)))
        return RestoredPrefix(n_tokens, layers, states)

    def loaded(self, prefix: RestoredPrefix, prompt: BlockChain, *, agent: AgentVersion, has_all: bool) -> None:
        """Keep what was read from disk, the same arrays. `has_all`: as in `RamCacheEntry`."""
        n_tokens = prefix.n_tokens
        snapshots = (Snapshot(n_tokens, prefix.states),) if prefix.states else ()
        segments = (Segment(0, n_tokens, prefix.layers),)
        token_ids = prompt.token_ids[:n_tokens]
        entry = RamCacheEntry(agent.number, prompt.model, prompt.salt, token_ids, segments, snapshots, has_all)
        self._put(agent.agent_id, entry)

    def saved(self, turn: Turn) -> None:
        """Go on to the turn's version: the entry up to the turn's own cache, then that."""
        old, new = self._get(turn.agent_id), turn.cache
        token_ids, model = turn.transcript.token_ids, turn.model.fingerprint
        before: tuple[Segment, ...] = ()
        if new is not None and new.start:
            continues = old is not None and old.belongs_to(turn.parent, model, turn.cache_salt)
            if old is not None and continues and common_length(old.token_ids, token_ids) >= new.start:
                before = old.up_to(new.start)
            else:
                new = None
        if new is None:
            self.drop(turn.agent_id)
            return
        segments = (*before, Segment(new.start, new.stop, new.layers))
        entry = RamCacheEntry(
            turn.parent + 1, model, turn.cache_salt, token_ids[: new.stop], segments, new.snapshots, has_all=True
        )
        self._put(turn.agent_id, entry)

    def renumber(self, agent_id: str, old: int, new: int) -> None:
        """Version `new` has a transcript without a cache of its own; the cache of `old` serves as far as they agree."""
        with self._lock:
            entry = self._entries.get(agent_id)
            if entry is not None and entry.version == old:
                self._entries[agent_id] = replace(entry, version=new, has_all=False)

    def drop(self, agent_id: str) -> None:
        with self._lock:
            self._drop(agent_id)

    def _get(self, agent_id: str) -> RamCacheEntry | None:
        with self._lock:
            entry = self._entries.get(agent_id)
            if entry is not None:
                self._entries.move_to_end(agent_id)
            return entry

    def _put(self, agent_id: str, entry: RamCacheEntry) -> None:
        with self._lock:
            self._drop(agent_id)
            over = self._n_bytes + entry.n_bytes - self.max_bytes
            going = []
            for name in self._entries if over > 0 else ():
                if name not in self._pinned:
                    going.append(name)
                    over -= self._entries[name].n_bytes
                    if over <= 0:
                        break
            if over > 0:
                return
            for name in going:
                self._drop(name)
            self._entries[agent_id] = entry
            self._n_bytes += entry.n_bytes

    def _drop(self, agent_id: str) -> None:
        entry = self._entries.pop(agent_id, None)
        if entry is not None:
            self._n_bytes -= entry.n_bytes

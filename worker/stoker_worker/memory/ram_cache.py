"""Keeps recently used agents' caches in RAM, so that their next turn skips the disk. Any thread; one lock, which is
not held while arrays are copied.

Entries hold arrays that others made anyway: what a restore assembled, what a turn handed over. They are lent to the
engine, which makes its own copy.
"""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from stoker_worker.memory.block_chain import BlockChain, common_length
from stoker_worker.memory.ram_cache_entry import OwnedSegment, RamCacheEntry, Segment, join
from stoker_worker.ports import AgentVersion, RestoredPrefix, Snapshot, Turn
from stoker_worker.ports.cache_spec import ModelCacheSpec

_log = logging.getLogger(__name__)

DEFAULT_SHARE: Final = 1 / 16
"""Of the machine's RAM: the model and the batch need the rest."""

MOST_AGENTS: Final = 2048
"""A cache of a few tokens is read from disk as fast, and many of them would take memory that no limit counts right."""

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
        self._running: frozenset[str] = frozenset()
        self._waiting: frozenset[str] = frozenset()
        self._model: str | None = None
        self._expected: str | None = None
        self._reserved_bytes = 0
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    def __contains__(self, agent_id: str) -> bool:
        return agent_id in self._entries

    def pin(self, running: frozenset[str], waiting: frozenset[str]) -> None:
        """From now on these agents, and no others, have work: they lose nothing, except that those that wait make room
        for others whose turn is sooner (see `reserve`)."""
        self._running, self._waiting = running, waiting

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
            continues = old is not None and old.belongs_to(turn.base.number, model, turn.cache_salt)
            if old is not None and continues and common_length(old.token_ids, token_ids) >= new.start:
                before = old.up_to(new.start)
            else:
                new = None
        if new is None:
            self.drop(turn.agent_id)
            return
        segments = (*before, Segment(new.start, new.stop, new.layers))
        entry = RamCacheEntry(
            turn.version, model, turn.cache_salt, token_ids[: new.stop], segments, new.snapshots, has_all=True
        )
        self._put(turn.agent_id, entry)

    def renumber(self, agent_id: str, old: int, new: int) -> None:
        """Version `new` has a transcript without a cache of its own; the cache of `old` serves as far as they agree."""
        with self._lock:
            entry = self._entries.get(agent_id)
            if entry is None:
                self._drop(agent_id)
            elif entry.version == old:
                self._entries[agent_id] = replace(entry, version=new, has_all=False)

    def drop(self, agent_id: str) -> None:
        with self._lock:
            self._drop(agent_id)

    def keep_only(self, model: str) -> None:
        """From now on keep nothing of another model than this fingerprint."""
        with self._lock:
            self._model = model
            for name in [name for name, entry in self._entries.items() if entry.model != model]:
                self._drop(name)

    def expect(self, agent_id: str) -> bool:
        """The agent's newest version is going to be read ahead, one agent at a time. Whatever happens to its entry
        before `arrive` makes that worthless: it may be an older version by then. ``False``: there is an entry."""
        with self._lock:
            if agent_id in self._entries:
                return False
            self._expected = agent_id
            return True

    def reserve(self, agent_id: str, n_bytes: int, order: Sequence[str]) -> bool:
        """Make room for the expected entry; ``False`` when there is not enough, or it is worthless by now.

        Args:
            order: the agents whose jobs are next, the next one first: those behind `agent_id` make room for it. For an
                agent that is not among them nobody does.
        """
        with self._lock:
            if self._expected != agent_id:
                return False
            others = self._less_urgent(agent_id, order) if agent_id in order else ()
            going = self._going(self._n_bytes - self._reserved_bytes + n_bytes, others)
            if going is None:
                return False
            for name in going:
                self._drop(name)
            self._n_bytes += n_bytes - self._reserved_bytes
            self._reserved_bytes = n_bytes
            return True

    def arrive(self, agent_id: str, entry: RamCacheEntry | None, *, goes_last: bool) -> None:
        """The end of what `expect` began; ``None``: nothing came of it.

        Args:
            goes_last: whether the entry counts as the one used last; else it is the first to go.
        """
        with self._lock:
            if self._expected != agent_id:
                return
            self._drop(agent_id)
            if entry is not None and self._n_bytes + entry.n_bytes <= self.max_bytes:
                self._add(agent_id, entry, goes_last=goes_last)

    def _less_urgent(self, agent_id: str, order: Sequence[str]) -> Iterator[str]:
        """The agents with an entry that is needed later than `agent_id`'s, the one needed last first."""
        soon, running, waiting = set(order), self._running, self._waiting
        others = [name for name in self._entries if name not in running and name not in soon]
        yield from (name for name in others if name not in waiting)
        # Agents take turns: of those that wait behind `order`, the one that ran last is probably the last to run again.
        yield from (name for name in reversed(others) if name in waiting)
        behind = order[order.index(agent_id) + 1 :]
        yield from (name for name in reversed(behind) if name in self._entries and name not in running)

    def _get(self, agent_id: str) -> RamCacheEntry | None:
        with self._lock:
            entry = self._entries.get(agent_id)
            if entry is not None:
                self._entries.move_to_end(agent_id)
            return entry

    def _put(self, agent_id: str, entry: RamCacheEntry) -> None:
        with self._lock:
            self._drop(agent_id)
            with_work = (self._running, self._waiting)
            others = (name for name in self._entries if not any(name in agents for agents in with_work))
            going = self._going(self._n_bytes + entry.n_bytes, others)
            if going is None:
                return
            for name in going:
                self._drop(name)
            self._add(agent_id, entry)

    def _going(self, n_bytes: int, others: Iterable[str]) -> list[str] | None:
        """Those of `others`, in this order, that have to go for one more agent and `n_bytes` in all; ``None``: that is
        not enough."""
        over, n_over, going = n_bytes - self.max_bytes, len(self._entries) + 1 - MOST_AGENTS, list[str]()
        for name in others if over > 0 or n_over > 0 else ():
            going.append(name)
            over -= self._entries[name].n_bytes
            n_over -= 1
            if over <= 0 and n_over <= 0:
                break
        return None if over > 0 or n_over > 0 else going

    def _add(self, agent_id: str, entry: RamCacheEntry, *, goes_last: bool = True) -> None:
        if self._model in (None, entry.model):
            self._entries[agent_id] = entry
            self._entries.move_to_end(agent_id, last=goes_last)
            self._n_bytes += entry.n_bytes

    def _drop(self, agent_id: str) -> None:
        if agent_id == self._expected:
            self._expected = None
            self._n_bytes -= self._reserved_bytes
            self._reserved_bytes = 0
        entry = self._entries.pop(agent_id, None)
        if entry is not None:
            self._n_bytes -= entry.n_bytes

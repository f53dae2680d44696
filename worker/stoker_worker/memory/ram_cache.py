"""Keeps recently used agents' caches in RAM, so that their next turn skips the disk. Any thread; one lock, which is not
held while arrays are copied. Entries hold arrays that exist anyway: of a restore or of a finished turn. The agent's
next turn takes them out again (`lookup.py`)."""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from stoker_worker.memory.blocks import BlockChain
from stoker_worker.ports import AgentVersion, Array, SequenceCache
from stoker_worker.ports.cache_spec import ModelCacheSpec
from stoker_worker.ports.memory import common_length


@dataclass(frozen=True)
class RamCacheEntry:
    """The cache of one agent's `version` in RAM; `chain` has its tokens."""

    version: int
    chain: BlockChain
    cache: SequenceCache

    @cached_property
    def n_bytes(self) -> int:
        """All memory that the arrays keep alive."""
        arrays = [array for pair in self.cache.layers for array in pair]
        arrays += [array for snapshot in self.cache.snapshots for state in snapshot.states for array in state]
        return sum(base.nbytes for base in {id(base): base for base in map(_base_of, arrays)}.values())


@dataclass
class ExpectedEntry:
    """An agent whose cache is being read ahead. `order`: the agents whose jobs are next, the next one first. `n_bytes`:
    reserved for it."""

    agent_id: str
    order: Sequence[str]
    n_bytes: int = 0

    @property
    def is_next(self) -> bool:
        return self.agent_id in self.order


def _base_of(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


_log = logging.getLogger(__name__)

DEFAULT_SHARE: Final = 1 / 16
"""The share of the machine's RAM: the model and the batch need the rest."""


MOST_AGENTS: Final = 2048
"""A cache of a few tokens is read from disk as fast, and many would take memory that the limit does not count."""


def default_memory_bytes() -> int:
    """The limit where none is given; logged, because it depends on the machine."""
    max_bytes = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * DEFAULT_SHARE)
    _log.info("recent agents' caches may take %.1f GB of RAM", max_bytes / 1e9)
    return max_bytes


class RamCache:
    """Drops the least recently used agents first, but none whose job runs: a new entry that does not fit is refused.
    `max_bytes`: 0 keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._n_bytes = 0
        self._entries: OrderedDict[str, RamCacheEntry] = OrderedDict()
        self._running: frozenset[str] = frozenset()
        self._waiting: frozenset[str] = frozenset()
        self._model: str | None = None
        self._expected: ExpectedEntry | None = None
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def __contains__(self, agent_id: str) -> bool:
        return agent_id in self._entries

    def pin(self, running: frozenset[str], waiting: frozenset[str]) -> None:
        """From now on these agents, and no others, have work: they lose nothing, except that waiting ones make room for
        others whose turn is sooner (see `reserve`)."""
        self._running, self._waiting = running, waiting

    def find(self, agent: AgentVersion, prompt: BlockChain, spec: ModelCacheSpec) -> SequenceCache | None:
        """The cached prefix of `prompt`, at most all but its last token, in the entry's own arrays; ``None``: no entry
        of this version, model and salt can be resumed in this prompt."""
        with self._lock:
            entry = self._entries.get(agent.agent_id)
            if entry is not None:
                self._entries.move_to_end(agent.agent_id)
        if entry is None or entry.version != agent.number:
            return None
        if (entry.chain.model, entry.chain.salt) != (prompt.model, prompt.salt):
            return None
        n_tokens = min(common_length(entry.chain.token_ids, prompt.token_ids), len(prompt.token_ids) - 1)
        if spec.snapshot_layers:
            usable = (one.n_tokens for one in entry.cache.snapshots if one.n_tokens <= n_tokens)
            n_tokens = max(usable, default=0)
        return entry.cache.up_to(n_tokens) if n_tokens > 0 else None

    def put(self, agent_id: str, entry: RamCacheEntry) -> None:
        """Keep a cache, the same arrays, if there is room beside those of agents with work. Its checkpoints are on disk
        only, because prompts of any agent use them."""
        entry = replace(entry, cache=replace(entry.cache, checkpoints=()))
        with self._lock:
            self._drop(agent_id)
            others = (name for name in self._entries if name not in self._running and name not in self._waiting)
            if self._make_room(self._n_bytes + entry.n_bytes, others):
                self._add(agent_id, entry)

    def drop(self, agent_id: str) -> None:
        with self._lock:
            self._drop(agent_id)

    def keep_only(self, model: str) -> None:
        """From now on keep only caches of the model with this fingerprint."""
        with self._lock:
            self._model = model
            for name in [name for name, entry in self._entries.items() if entry.chain.model != model]:
                self._drop(name)

    def expect(self, agent_id: str, order: Sequence[str]) -> bool:
        """Begin to read ahead the agent's newest version, one agent at a time; ``False``: there is an entry. Any change
        of its entry before `arrive` makes the read worthless: it may be an older version by then. `order`: the agents
        whose jobs are next, the next one first: those after `agent_id` make room for it. For an agent that is not among
        them nobody does, and its entry is the first to go."""
        with self._lock:
            if agent_id in self._entries:
                return False
            self._expected = ExpectedEntry(agent_id, order)
            return True

    def reserve(self, n_bytes: int) -> bool:
        """Make room for the expected entry; ``False``: there is not enough, or it is worthless by now."""
        with self._lock:
            expected = self._expected
            if expected is None:
                return False
            before = self._n_bytes - expected.n_bytes
            if not self._make_room(before + n_bytes, self._less_urgent(expected)):
                return False
            self._n_bytes += n_bytes - expected.n_bytes
            expected.n_bytes = n_bytes
            return True

    def arrive(self, entry: RamCacheEntry | None) -> None:
        """End what `expect` began; ``None``: nothing was read."""
        with self._lock:
            expected = self._expected
            if expected is None:
                return
            self._drop(expected.agent_id)
            if entry is not None and self._n_bytes + entry.n_bytes <= self.max_bytes:
                self._add(expected.agent_id, entry, goes_last=expected.is_next)

    def _less_urgent(self, expected: ExpectedEntry) -> Iterator[str]:
        """The agents whose entries are needed later than the expected one; those needed last first, as far as known."""
        if not expected.is_next:
            return
        order, running = expected.order, self._running
        soon = set(order)
        others = [name for name in self._entries if name not in running and name not in soon]
        yield from sorted(others, key=self._waiting.__contains__)
        behind = order[order.index(expected.agent_id) + 1 :]
        yield from (name for name in reversed(behind) if name in self._entries and name not in running)

    def _make_room(self, n_bytes: int, others: Iterable[str]) -> bool:
        """Drop those of `others`, in this order, that have to go for one more agent and `n_bytes` in all; none, if that
        is not enough."""
        over, n_over, going = n_bytes - self.max_bytes, len(self._entries) + 1 - MOST_AGENTS, list[str]()
        for name in others if over > 0 or n_over > 0 else ():
            going.append(name)
            over -= self._entries[name].n_bytes
            n_over -= 1
            if over <= 0 and n_over <= 0:
                break
        has_room = over <= 0 and n_over <= 0
        for name in going if has_room else ():
            self._drop(name)
        return has_room

    def _add(self, agent_id: str, entry: RamCacheEntry, *, goes_last: bool = True) -> None:
        if self._model in (None, entry.chain.model):
            self._entries[agent_id] = entry
            self._entries.move_to_end(agent_id, last=goes_last)
            self._n_bytes += entry.n_bytes

    def _drop(self, agent_id: str) -> None:
        if self._expected is not None and self._expected.agent_id == agent_id:
            self._n_bytes -= self._expected.n_bytes
            self._expected = None
        entry = self._entries.pop(agent_id, None)
        if entry is not None:
            self._n_bytes -= entry.n_bytes

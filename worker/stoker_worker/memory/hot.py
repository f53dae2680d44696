"""Recently used agents' caches in RAM, so that their next turn skips the disk. Any thread; one lock, not while copying.

An agent's entry is a run of segments, each the arrays somebody made anyway: what a restore assembled, what a turn
handed over. They are joined when a prompt takes up all of them, and lent to the engine, which makes its own copy.
"""

import logging
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from stoker_worker.memory.blocks import common_length
from stoker_worker.ports import AgentVersion, Array, LayerKV, LoadedModel, RestoredPrefix, Snapshot, Turn

_log = logging.getLogger(__name__)

DEFAULT_SHARE: Final = 1 / 16
"""Of the machine's RAM: the model and the batch need the rest."""

_NO_SNAPSHOT: Final = Snapshot(0, ())


def default_memory_bytes() -> int:
    """The limit for who gives none; logged, because it depends on the machine."""
    max_bytes = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * DEFAULT_SHARE)
    _log.info("recent agents' caches may take %.1f GB of RAM", max_bytes / 1e9)
    return max_bytes


@dataclass(frozen=True)
class Segment:
    """Cache of tokens [start, stop) of the full-attention layers."""

    start: int
    stop: int
    layers: tuple[LayerKV, ...]


@dataclass(frozen=True)
class HotCache:
    """One agent's cache in RAM.

    Attributes:
        version: which version of the agent it belongs to.
        token_ids: the tokens it covers, from the first on.
        segments: in order, without gaps.
        has_all: whether it is at least what the version's own files hold.
    """

    version: int
    model: str
    salt: str | None
    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    snapshots: tuple[Snapshot, ...]
    has_all: bool

    @cached_property
    def n_bytes(self) -> int:
        """Of all memory that these arrays keep alive."""
        arrays = [array for segment in self.segments for pair in segment.layers for array in pair]
        arrays += [array for snapshot in self.snapshots for state in snapshot.states for array in state]
        return sum(base.nbytes for base in {id(base): base for base in map(_base_of, arrays)}.values())

    def layers_of(self, n_tokens: int) -> tuple[LayerKV, ...]:
        """The first `n_tokens` tokens as contiguous arrays: copied, unless one segment is exactly that."""
        first = self.segments[0]
        if all(_is_exactly(array, n_tokens) for pair in first.layers for array in pair):
            return first.layers
        return _joined([_Part(x.start, x.stop, list(x.layers)) for x in self.up_to(n_tokens)], n_tokens)

    def up_to(self, n_tokens: int) -> tuple[Segment, ...]:
        """The segments as far as token `n_tokens`, as views of the same memory."""
        return tuple(_cut(segment, n_tokens) for segment in self.segments if segment.start < n_tokens)


class HotMemory:
    """Least recently used out, but never an agent with work: then a newcomer is not taken in. The limit always holds.

    Attributes:
        max_bytes: 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._n_bytes = 0
        self._caches: OrderedDict[str, HotCache] = OrderedDict()
        self._protected: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    def __contains__(self, agent_id: str) -> bool:
        return agent_id in self._caches

    def protect(self, agents: frozenset[str]) -> None:
        """Agents with work queued or running, as of now."""
        self._protected = agents

    def restore(
        self, prompt: tuple[int, ...], *, agent: AgentVersion, model: LoadedModel, salt: str | None, disk_tokens: int
    ) -> RestoredPrefix | None:
        """The cached prefix of `prompt`, at most all but its last token; ``None``: ask the disk.

        Args:
            disk_tokens: how many tokens the disk may have of it. Fewer are only given when the disk has no more.
        """
        cache = self._get(agent.agent_id)
        if cache is None or (cache.version, cache.model, cache.salt) != (agent.number, model.fingerprint, salt):
            return None
        shared = min(common_length(cache.token_ids, prompt), max(0, len(prompt) - 1))
        n_tokens, states = shared, _NO_SNAPSHOT.states
        if model.spec.snapshot_layers:
            usable = [snapshot for snapshot in cache.snapshots if snapshot.n_tokens <= shared]
            last = max(usable, key=lambda snapshot: snapshot.n_tokens, default=_NO_SNAPSHOT)
            n_tokens, states = last.n_tokens, last.states
        if not n_tokens or (n_tokens < disk_tokens and not (cache.has_all and model.spec.snapshot_layers)):
            return None
        if n_tokens < len(cache.token_ids) or len(cache.segments) == 1:
            return RestoredPrefix(n_tokens, cache.layers_of(n_tokens), states)
        rest, parts = replace(cache, segments=()), [_Part(x.start, x.stop, list(x.layers)) for x in cache.segments]
        self.drop(agent.agent_id)
        del cache  # joining frees each layer's parts as it goes: there is never a second copy of them all
        layers = _joined(parts, n_tokens)
        self._put(agent.agent_id, replace(rest, segments=(Segment(0, n_tokens, layers),)))
        return RestoredPrefix(n_tokens, layers, states)

    def loaded(
        self,
        prefix: RestoredPrefix,
        prompt: tuple[int, ...],
        *,
        agent: AgentVersion,
        model: LoadedModel,
        salt: str | None,
        has_all: bool,
    ) -> None:
        """Keep what was read from the disk, the same arrays. `has_all`: as in `HotCache`."""
        n_tokens = prefix.n_tokens
        snapshots = (Snapshot(n_tokens, prefix.states),) if prefix.states else ()
        segments = (Segment(0, n_tokens, prefix.layers),)
        token_ids = prompt[:n_tokens]
        cache = HotCache(agent.number, model.fingerprint, salt, token_ids, segments, snapshots, has_all)
        self._put(agent.agent_id, cache)

    def saved(self, turn: Turn) -> None:
        """Go on to the turn's version: what is held up to the turn's own cache, then that."""
        old, new = self._get(turn.agent_id), turn.cache
        token_ids, model = turn.transcript.token_ids, turn.model.fingerprint
        before: tuple[Segment, ...] = ()
        if new is not None and new.start:
            continues = old is not None and (old.version, old.model, old.salt) == (turn.parent, model, turn.cache_salt)
            if old is not None and continues and common_length(old.token_ids, token_ids) >= new.start:
                before = old.up_to(new.start)
            else:
                new = None
        if new is None:
            self.drop(turn.agent_id)
            return
        segments = (*before, Segment(new.start, new.stop, new.layers))
        cache = HotCache(
            turn.parent + 1, model, turn.cache_salt, token_ids[: new.stop], segments, new.snapshots, has_all=True
        )
        self._put(turn.agent_id, cache)

    def renumber(self, agent_id: str, old: int, new: int) -> None:
        """Version `new` has a transcript without a cache of its own; the cache of `old` serves as far as they agree."""
        with self._lock:
            cache = self._caches.get(agent_id)
            if cache is not None and cache.version == old:
                self._caches[agent_id] = replace(cache, version=new, has_all=False)

    def drop(self, agent_id: str) -> None:
        with self._lock:
            self._drop(agent_id)

    def _get(self, agent_id: str) -> HotCache | None:
        with self._lock:
            cache = self._caches.get(agent_id)
            if cache is not None:
                self._caches.move_to_end(agent_id)
            return cache

    def _put(self, agent_id: str, cache: HotCache) -> None:
        with self._lock:
            self._drop(agent_id)
            over = self._n_bytes + cache.n_bytes - self.max_bytes
            going = []
            for name in self._caches if over > 0 else ():
                if name not in self._protected:
                    going.append(name)
                    over -= self._caches[name].n_bytes
                    if over <= 0:
                        break
            if over > 0:
                return
            for name in going:
                self._drop(name)
            self._caches[agent_id] = cache
            self._n_bytes += cache.n_bytes

    def _drop(self, agent_id: str) -> None:
        cache = self._caches.pop(agent_id, None)
        if cache is not None:
            self._n_bytes -= cache.n_bytes


def _is_exactly(array: Array, n_tokens: int) -> bool:
    return array.shape[1] == n_tokens and array.flags.c_contiguous


@dataclass
class _Part:
    """A segment whose layers are let go of one by one."""

    start: int
    stop: int
    layers: list[LayerKV | None]


def _joined(parts: list[_Part], n_tokens: int) -> tuple[LayerKV, ...]:
    """Contiguous arrays of all parts; empties them."""
    joined: list[LayerKV] = []
    for index in range(len(parts[0].layers)):
        target: LayerKV | None = None
        for part in parts:
            source, part.layers[index] = part.layers[index], None
            assert source is not None
            if target is None:
                target = _empty(source[0], n_tokens), _empty(source[1], n_tokens)
            target[0][:, part.start : part.stop] = source[0]
            target[1][:, part.start : part.stop] = source[1]
        assert target is not None
        joined.append(target)
    return tuple(joined)


def _empty(like: Array, n_tokens: int) -> Array:
    return np.empty((like.shape[0], n_tokens, like.shape[2]), like.dtype)


def _cut(segment: Segment, stop: int) -> Segment:
    if segment.stop <= stop:
        return segment
    n_tokens = stop - segment.start
    layers = tuple((keys[:, :n_tokens], values[:, :n_tokens]) for keys, values in segment.layers)
    return Segment(segment.start, stop, layers)


def _base_of(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array

"""One agent's cache in RAM: arrays that others made anyway, joined only when a prompt uses all of them. Any thread."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stoker_worker.ports import Array, LayerKV, Snapshot


@dataclass(frozen=True)
class Segment:
    """Cache of tokens [start, stop) of the full-attention layers."""

    start: int
    stop: int
    layers: tuple[LayerKV, ...]

    def up_to(self, stop: int) -> "Segment":
        """A view of the same memory."""
        if self.stop <= stop:
            return self
        n_tokens = stop - self.start
        layers = tuple((keys[:, :n_tokens], values[:, :n_tokens]) for keys, values in self.layers)
        return Segment(self.start, stop, layers)


@dataclass(frozen=True)
class RamCacheEntry:
    """One agent's cache in RAM.

    Attributes:
        version: of the agent.
        model: fingerprint.
        token_ids: the tokens it covers, from the first on.
        segments: in order, without gaps.
        has_all: whether it covers everything that the version's own files hold.
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
        """Of all memory that the arrays keep alive."""
        arrays = [array for segment in self.segments for pair in segment.layers for array in pair]
        arrays += [array for snapshot in self.snapshots for state in snapshot.states for array in state]
        return sum(base.nbytes for base in {id(base): base for base in map(_base_of, arrays)}.values())

    def belongs_to(self, version: int, model: str, salt: str | None) -> bool:
        return (self.version, self.model, self.salt) == (version, model, salt)

    def layers_of(self, n_tokens: int) -> tuple[LayerKV, ...]:
        """The first `n_tokens` tokens as contiguous arrays: copied, unless one segment is exactly that."""
        first = self.segments[0]
        if all(_is_exactly(array, n_tokens) for pair in first.layers for array in pair):
            return first.layers
        return join([OwnedSegment(segment) for segment in self.up_to(n_tokens)], n_tokens)

    def up_to(self, n_tokens: int) -> tuple[Segment, ...]:
        """The segments as far as token `n_tokens`, as views of the same memory."""
        return tuple(segment.up_to(n_tokens) for segment in self.segments if segment.start < n_tokens)


class OwnedSegment:
    """A segment that gives up its layers one by one."""

    def __init__(self, segment: Segment) -> None:
        self.start = segment.start
        self.stop = segment.stop
        self._layers: list[LayerKV | None] = list(segment.layers)

    def __len__(self) -> int:
        return len(self._layers)

    def give_up(self, index: int) -> LayerKV:
        layer, self._layers[index] = self._layers[index], None
        assert layer is not None  # each is given up once
        return layer


def join(segments: list[OwnedSegment], n_tokens: int) -> tuple[LayerKV, ...]:
    """Contiguous arrays of all segments. Frees each layer's parts as it goes: there is never a second copy of all."""
    joined: list[LayerKV] = []
    for index in range(len(segments[0])):
        target: LayerKV | None = None
        for segment in segments:
            keys, values = segment.give_up(index)
            if target is None:
                target = _empty(keys, n_tokens), _empty(values, n_tokens)
            target[0][:, segment.start : segment.stop] = keys
            target[1][:, segment.start : segment.stop] = values
        assert target is not None  # there is at least one segment
        joined.append(target)
    return tuple(joined)


def _is_exactly(array: Array, n_tokens: int) -> bool:
    return array.shape[1] == n_tokens and array.flags.c_contiguous


def _empty(like: Array, n_tokens: int) -> Array:
    return np.empty((like.shape[0], n_tokens, like.shape[2]), like.dtype)


def _base_of(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array

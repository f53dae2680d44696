"""The K/V of a prompt's beginning, read from verified pieces into one array a side and a layer. Loader thread, and
threads of its own while a search lasts; writes nothing.

Two sources: full blocks of the prompt's own chain, whoever wrote them; and, where those end, the agent's own next
piece (its tail, or a full block from which the prompt turns away in the middle), as far as its tokens agree.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from stoker_worker.cache_spec import BLOCK_TOKENS, ModelCacheSpec
from stoker_worker.memory.blocks import chain, chain_root, common_length
from stoker_worker.memory.cache_file import CachePiece, Fault, bytes_of
from stoker_worker.memory.cache_layout import PieceKind, empty_layers
from stoker_worker.memory.files import is_there
from stoker_worker.ports import Array, LayerKV, LayerState

_MOST_READERS: Final = 4
"""Threads that read and verify while one restore lasts: a few use up a memory's bandwidth."""


@dataclass(frozen=True)
class OwnCache:
    """The cached part of the agent's transcript, made with this model and salt.

    Attributes:
        snapshots: where they stand, ascending, and their files.
    """

    token_ids: tuple[int, ...]
    tail: Path
    snapshots: tuple[tuple[int, Path], ...] = ()


@dataclass(frozen=True)
class FaultyPiece:
    """A file that was needed and could not be used."""

    path: Path
    kind: PieceKind
    fault: Fault


@dataclass(frozen=True)
class _Step:
    """A piece that should be there, and how many of its tokens the prompt can use."""

    piece: CachePiece
    path: Path
    use_tokens: int


@dataclass
class Found:
    """Result of a search. `n_tokens` of `layers` are filled and verified; `faults` in the order met."""

    n_tokens: int = 0
    saved_blocks: int = 0
    layers: tuple[LayerKV, ...] = ()
    states: tuple[LayerState, ...] = ()
    faults: list[FaultyPiece] = field(default_factory=list)

    def add(self, step: _Step, fault: Fault | None) -> bool:
        """Take note of what became of the next piece; false when it is no part of the prefix."""
        if fault is not None:
            self.faults.append(FaultyPiece(step.path, step.piece.kind, fault))
            return False
        self.n_tokens += step.use_tokens
        return True

    def cut(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens only."""
        self.n_tokens = n_tokens
        self.layers = tuple((_cut(keys, n_tokens), _cut(values, n_tokens)) for keys, values in self.layers)


@dataclass(frozen=True)
class Source:
    """Where a prompt's cache may come from: this model's and salt's blocks, and the agent's own pieces.

    Attributes:
        n_readers: threads that may read it.
    """

    model: str
    salt: str | None
    spec: ModelCacheSpec
    own: OwnCache | None
    path_of: Callable[[str, str], Path]
    n_readers: int


def n_readers(beside_others: bool) -> int:
    """How many threads may read. Beside rows that run: half of the cores, because a step of theirs waits for its
    slowest core (EXP-014)."""
    cores = os.cpu_count() or 1
    return max(1, min(_MOST_READERS, cores // 2 if beside_others else cores))


class BlockSearch:
    """One search for K/V: looks which pieces should be there, makes the arrays once, then fills them piece by piece."""

    def __init__(self, prompt_ids: tuple[int, ...], limit: int, source: Source) -> None:
        """
        Args:
            limit: most tokens to find.
        """
        self._prompt = prompt_ids
        self._limit = limit
        self._source = source
        self._chain = chain(chain_root(source.model, source.salt), prompt_ids)
        self._own = source.own or OwnCache((), Path())
        self._own_tokens = common_length(self._own.token_ids, prompt_ids[:limit])

    def run(self) -> Found:
        steps = self._block_steps()
        steps += [step for step in [self._own_step(len(steps))] if step is not None]
        starts = [index * BLOCK_TOKENS for index in range(len(steps))]  # only the last may be used in part
        planned_tokens = sum(step.use_tokens for step in steps)
        found = Found(layers=empty_layers(self._source.spec, planned_tokens))
        target = _Target(found.layers)
        for step, fault in zip(steps, _load_all(steps, starts, target, self._source.n_readers), strict=True):
            if found.add(step, fault):
                found.saved_blocks += step.path == self._block_path(found.saved_blocks)
                continue
            # The prompt's block failed; the agent's own piece at this place may be another file.
            other = self._own_step(found.n_tokens // BLOCK_TOKENS)
            if other is not None and other.path != step.path:
                found.add(other, target.load(other, found.n_tokens))
            break
        if found.n_tokens < planned_tokens:
            found.cut(found.n_tokens)
        return found

    def _block_steps(self) -> list[_Step]:
        """The prompt's leading full blocks that should be there: the agent's own, and others whose files exist."""
        steps: list[_Step] = []
        for index in range(len(self._chain) - 1):
            start = index * BLOCK_TOKENS
            path = self._path(self._chain[index + 1])
            is_own = self._own_tokens >= start + BLOCK_TOKENS
            if start >= self._limit or not (is_own or is_there(path)):
                break
            piece = self._piece("block", index, self._prompt[start : start + BLOCK_TOKENS])
            steps.append(_Step(piece, path, min(BLOCK_TOKENS, self._limit - start)))
        return steps

    def _own_step(self, index: int) -> _Step | None:
        """The agent's own piece behind `index` full blocks, if the prompt goes on as it does."""
        start = index * BLOCK_TOKENS
        use_tokens = min(self._own_tokens - start, BLOCK_TOKENS)
        if use_tokens <= 0:
            return None
        token_ids = self._own.token_ids[start : start + BLOCK_TOKENS]
        if len(token_ids) < BLOCK_TOKENS:
            return _Step(self._piece("tail", index, token_ids), self._own.tail, use_tokens)
        path = self._path(chain(self._chain[index], token_ids)[1])
        return _Step(self._piece("block", index, token_ids), path, use_tokens)

    def _piece(self, kind: PieceKind, index: int, token_ids: tuple[int, ...]) -> CachePiece:
        return CachePiece(kind, self._source.model, self._source.spec, self._chain[index], token_ids)

    def _block_path(self, index: int) -> Path | None:
        return self._path(self._chain[index + 1]) if index + 1 < len(self._chain) else None

    def _path(self, address: str) -> Path:
        return self._source.path_of(self._source.model, address)


class _Target:
    """K/V arrays that are being filled. Files are read right into place, head by head, as they have it."""

    def __init__(self, layers: tuple[LayerKV, ...]) -> None:
        self._layers = layers
        self._heads = [
            (bytes_of(head), head.shape[-1] * head.itemsize) for pair in layers for array in pair for head in array
        ]

    def load(self, step: _Step, start: int) -> Fault | None:
        """Verify one piece and put what is used of it at `start`; after a fault anything may stand there."""
        piece, stop = step.piece, start + step.use_tokens
        if step.use_tokens == len(piece.token_ids) and not piece.is_quantised:
            return piece.load(step.path, [head[start * size : stop * size] for head, size in self._heads])
        data = np.empty(piece.layout.n_bytes, np.uint8)
        fault = piece.load(step.path, [bytes_of(data)])
        if fault is None:
            piece.unpack(data, self._layers, start, step.use_tokens)
        return fault


def _load_all(steps: list[_Step], starts: list[int], target: _Target, n_readers: int) -> list[Fault | None]:
    """Load every piece to its place: a few at a time, because one core alone does not use a memory's bandwidth."""
    n_readers = min(n_readers, len(steps))
    # Dequantising is many short calls: there several threads wait for the interpreter's lock longer than they gain.
    if n_readers < 2 or any(step.piece.is_quantised for step in steps):
        return list(map(target.load, steps, starts))
    with ThreadPoolExecutor(n_readers, thread_name_prefix="loader") as readers:
        return list(readers.map(target.load, steps, starts))


def _cut(array: Array, n_tokens: int) -> Array:
    return np.ascontiguousarray(array[:, :n_tokens])

"""Loads the K/V of a prompt's beginning from verified files into one array per side and layer. Loader thread, and
threads of its own during a lookup; writes nothing.

Two sources: the full blocks of the prompt's own chain, whichever agent wrote them; and, where those end, the agent's
own next piece (its tail, or a full block that the prompt leaves in the middle), as far as the tokens agree.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, Self

import numpy as np

from stoker_worker.memory.block_chain import BlockChain, PathOf, block_address, common_length
from stoker_worker.memory.cache_file import CachePiece, Fault, bytes_of
from stoker_worker.memory.cache_folders import PieceFolder
from stoker_worker.memory.cache_layout import PieceKind, empty_layers, empty_states
from stoker_worker.memory.files import is_there
from stoker_worker.ports import AgentVersion, LayerKV, LayerState, PrefixRoom
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, ModelCacheSpec

_MOST_READERS: Final = 4
"""A few threads use up a memory's bandwidth."""


@dataclass(frozen=True)
class AgentBlocks:
    """The cached part of an agent's transcript: full blocks, a tail, snapshots.

    Attributes:
        snapshots: after how many tokens each was taken, ascending, and its file.
    """

    token_ids: tuple[int, ...] = ()
    tail: Path = Path()
    snapshots: tuple[tuple[int, Path], ...] = ()

    @classmethod
    def of(cls, agent: AgentVersion, pieces: PieceFolder) -> Self:
        """Everything that was saved of the version."""
        if agent.cache is None or agent.transcript is None:
            return cls()
        name, number = agent.agent_id, agent.number
        snapshots = [(n, pieces.snapshot_path(name, number, index)) for index, n in enumerate(agent.cache.snapshots)]
        tail = pieces.tail_path(name, number)
        return cls(agent.transcript.token_ids[: agent.cache.tokens], tail, tuple(snapshots))


@dataclass(frozen=True)
class FaultyPiece:
    """A file that was needed and could not be used."""

    path: Path
    kind: PieceKind
    fault: Fault


@dataclass(frozen=True)
class _Step:
    """A file that should be there, and how many of its tokens the prompt can use."""

    piece: CachePiece
    path: Path
    use_tokens: int


@dataclass
class DiskPrefix:
    """What a lookup found: `n_tokens` of `layers` are filled and verified; `faults` in the order met.

    Attributes:
        room: the memory that `layers` are views of; ``None``: they have their own.
    """

    n_tokens: int = 0
    saved_blocks: int = 0
    layers: tuple[LayerKV, ...] = ()
    states: tuple[LayerState, ...] = ()
    faults: list[FaultyPiece] = field(default_factory=list)
    room: PrefixRoom | None = None

    def add(self, step: _Step, fault: Fault | None) -> bool:
        """Count the next piece in, or note its fault and return false."""
        if fault is not None:
            self.faults.append(FaultyPiece(step.path, step.piece.kind, fault))
            return False
        self.n_tokens += step.use_tokens
        return True

    def cut(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens only."""
        self.n_tokens = n_tokens
        self.layers = tuple((keys[:, :n_tokens], values[:, :n_tokens]) for keys, values in self.layers)


def n_readers(beside_others: bool) -> int:
    """How many threads may read. Beside running sequences: half of the cores, because each of their steps waits for
    the slowest core (EXP-014)."""
    cores = os.cpu_count() or 1
    return max(1, min(_MOST_READERS, cores // 2 if beside_others else cores))


@dataclass(frozen=True)
class BlockLookup:
    """One lookup: lists the files that should be there, makes the arrays once, then fills them file by file.

    Attributes:
        limit: most tokens to find.
        own: of the prompt's model and salt; empty for a job without an agent.
        n_readers: threads that may read.
        before_each: called by them before each file; an exception ends the lookup.
        make_room: makes the memory to fill, for a number of tokens; ``None``: NumPy does.
    """

    prompt: BlockChain
    limit: int
    spec: ModelCacheSpec
    own: AgentBlocks
    path_of: PathOf
    n_readers: int
    before_each: Callable[[], None] = lambda: None
    make_room: Callable[[int], PrefixRoom] | None = None

    @cached_property
    def own_tokens(self) -> int:
        """How many tokens of the prompt the agent's own cache begins with."""
        return common_length(self.own.token_ids, self.prompt.token_ids[: self.limit])

    def run(self) -> DiskPrefix:
        steps = self._block_steps()
        steps += [step for step in [self._own_step(len(steps))] if step is not None]
        planned_tokens = sum(step.use_tokens for step in steps)
        room = self.make_room(planned_tokens) if self.make_room and planned_tokens else None
        found = DiskPrefix(layers=room.layers() if room else empty_layers(self.spec, planned_tokens), room=room)
        target = _Target(found.layers, self.before_each)
        for step, fault in zip(steps, target.load_all(steps, self.n_readers), strict=True):
            if found.add(step, fault):
                index = found.saved_blocks
                found.saved_blocks += index < self.prompt.n_blocks and step.path == self._path(index)
                continue
            # The prompt's block failed; the agent's own piece at this place may be another file.
            other = self._own_step(found.n_tokens // BLOCK_TOKENS)
            if other is not None and other.path != step.path:
                found.add(other, target.load(other, found.n_tokens))
            break
        found.cut(found.n_tokens)
        return found

    def _block_steps(self) -> list[_Step]:
        """The prompt's leading full blocks that should be there: the agent's own, and others whose files exist."""
        steps: list[_Step] = []
        for index in range(self.prompt.n_blocks):
            start, path = index * BLOCK_TOKENS, self._path(index)
            is_own = self.own_tokens >= start + BLOCK_TOKENS
            if start >= self.limit or not (is_own or is_there(path)):
                break
            piece = self._piece("block", index, self.prompt.block(index))
            steps.append(_Step(piece, path, min(BLOCK_TOKENS, self.limit - start)))
        return steps

    def _own_step(self, index: int) -> _Step | None:
        """The agent's own piece after `index` full blocks, if it begins with the prompt's next tokens."""
        start = index * BLOCK_TOKENS
        use_tokens = min(self.own_tokens - start, BLOCK_TOKENS)
        if use_tokens <= 0:
            return None
        token_ids = self.own.token_ids[start : start + BLOCK_TOKENS]
        if len(token_ids) < BLOCK_TOKENS:
            return _Step(self._piece("tail", index, token_ids), self.own.tail, use_tokens)
        path = self.path_of(self.prompt.model, block_address(self.prompt.parent(index), token_ids))
        return _Step(self._piece("block", index, token_ids), path, use_tokens)

    def _piece(self, kind: PieceKind, index: int, token_ids: tuple[int, ...]) -> CachePiece:
        return CachePiece(kind, self.prompt.model, self.spec, self.prompt.parent(index), token_ids)

    def _path(self, index: int) -> Path:
        return self.path_of(self.prompt.model, self.prompt.addresses[index])


def load_snapshot(path: Path, chain: BlockChain, spec: ModelCacheSpec) -> tuple[tuple[LayerState, ...], Fault | None]:
    """The states of the window and recurrent layers after all tokens of `chain`; after a fault they hold anything."""
    states = empty_states(spec, len(chain.token_ids))
    targets = [bytes_of(array) for arrays in states for array in arrays]
    return states, CachePiece.snapshot(spec, chain).load(path, targets)


class _Target:
    """K/V arrays that are being filled. A file's bytes go straight to their place, head by head."""

    def __init__(self, layers: tuple[LayerKV, ...], before_each: Callable[[], None]) -> None:
        self._layers = layers
        self._n_tokens = layers[0][0].shape[1]
        self._before_each = before_each
        self._heads = [
            (bytes_of(head), head.shape[-1] * head.itemsize) for pair in layers for array in pair for head in array
        ]

    def load(self, step: _Step, start: int) -> Fault | None:
        """Verify one file and put the used part of it at `start`; after a fault the arrays hold anything there.

        Where there is a place for the rest, that is read too: it costs less than another copy of the used part.
        """
        self._before_each()
        piece, stop = step.piece, start + len(step.piece.token_ids)
        if stop <= self._n_tokens and not piece.is_quantised:
            return piece.load(step.path, [head[start * size : stop * size] for head, size in self._heads])
        data = np.empty(piece.layout.n_bytes, np.uint8)
        fault = piece.load(step.path, [bytes_of(data)])
        if fault is None:
            piece.unpack(data, self._layers, start, step.use_tokens)
        return fault

    def load_all(self, steps: list[_Step], n_readers: int) -> list[Fault | None]:
        """Load every file, a few at a time: one core alone does not use a memory's bandwidth."""
        starts = [index * BLOCK_TOKENS for index in range(len(steps))]  # only the last may be used in part
        n_readers = min(n_readers, len(steps))
        # Dequantising is many short calls: several threads would wait longer for the interpreter's lock than they gain.
        if n_readers < 2 or any(step.piece.is_quantised for step in steps):
            return list(map(self.load, steps, starts))
        with ThreadPoolExecutor(n_readers, thread_name_prefix="loader") as readers:
            return list(readers.map(self.load, steps, starts))

"""The longest cached prefix of a prompt, put together from verified pieces. Loader thread; writes nothing.

Two sources: full blocks of the prompt's own chain, whoever wrote them; and, where those end, the agent's own next
piece (its tail, or a full block from which the prompt turns away in the middle), as far as its tokens agree.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stoker_worker.cache_spec import BLOCK_TOKENS, ModelCacheSpec
from stoker_worker.memory.blocks import chain, chain_root, common_length
from stoker_worker.memory.cache_file import CachePiece, Fault, PieceKind, empty_layers
from stoker_worker.ports import Array, LayerKV


@dataclass(frozen=True)
class OwnCache:
    """The cached part of the agent's transcript, made with this model and salt."""

    token_ids: tuple[int, ...]
    tail: Path


@dataclass(frozen=True)
class FaultyPiece:
    """A file that was needed and could not be used."""

    path: Path
    kind: PieceKind
    fault: Fault


@dataclass
class Found:
    """Result of a search. `n_tokens` of `layers` are filled and verified; `faults` in the order met."""

    n_tokens: int = 0
    saved_blocks: int = 0
    layers: tuple[LayerKV, ...] = ()
    faults: list[FaultyPiece] = field(default_factory=list)


@dataclass(frozen=True)
class _Step:
    piece: CachePiece
    path: Path
    use_tokens: int


class PrefixSearch:
    """One search: looks which pieces should be there, makes the arrays once, then verifies and fills piece by piece."""

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        *,
        model: str,
        salt: str | None,
        spec: ModelCacheSpec,
        own: OwnCache | None,
        path_of: Callable[[str, str], Path],
    ) -> None:
        self._prompt = prompt_ids
        self._limit = max(0, len(prompt_ids) - 1)  # the model must see at least the last token
        self._model = model
        self._spec = spec
        self._chain = chain(chain_root(model, salt), prompt_ids)
        self._own = own if own is not None else OwnCache((), Path())
        self._path_of = path_of
        self.own_tokens = common_length(self._own.token_ids, prompt_ids[: self._limit])
        """How much of the prompt the agent's own cache allows for."""

    def run(self) -> Found:
        blocks = self._block_steps()
        planned = [step for step in (*blocks, self._own_step(len(blocks))) if step is not None]
        planned_tokens = sum(step.use_tokens for step in planned)
        found = Found(layers=empty_layers(self._spec, planned_tokens))
        buffer = np.empty(self._spec.bytes_per_block, np.uint8)
        for step in planned:
            if self._take(step, found, buffer):
                found.saved_blocks += step.path == self._block_path(found.saved_blocks)
                continue
            # The prompt's block failed; the agent's own piece at this place may be another file.
            other = self._own_step(found.n_tokens // BLOCK_TOKENS)
            if other is not None and other.path != step.path:
                self._take(other, found, buffer)
            break
        if found.n_tokens < planned_tokens:
            found.layers = tuple(
                (_cut(keys, found.n_tokens), _cut(values, found.n_tokens)) for keys, values in found.layers
            )
        return found

    def _block_steps(self) -> list[_Step]:
        """The prompt's leading full blocks that should be there: the agent's own, and others whose files exist."""
        steps: list[_Step] = []
        for index in range(len(self._chain) - 1):
            start = index * BLOCK_TOKENS
            path = self._path_of(self._model, self._chain[index + 1])
            is_own = self.own_tokens >= start + BLOCK_TOKENS
            if start >= self._limit or not (is_own or path.exists()):
                break
            piece = self._piece("block", index, self._prompt[start : start + BLOCK_TOKENS])
            steps.append(_Step(piece, path, min(BLOCK_TOKENS, self._limit - start)))
        return steps

    def _own_step(self, index: int) -> _Step | None:
        """The agent's own piece behind `index` full blocks, if the prompt goes on as it does."""
        start = index * BLOCK_TOKENS
        use_tokens = min(self.own_tokens - start, BLOCK_TOKENS)
        if use_tokens <= 0:
            return None
        token_ids = self._own.token_ids[start : start + BLOCK_TOKENS]
        if len(token_ids) < BLOCK_TOKENS:
            return _Step(self._piece("tail", index, token_ids), self._own.tail, use_tokens)
        path = self._path_of(self._model, chain(self._chain[index], token_ids)[1])
        return _Step(self._piece("block", index, token_ids), path, use_tokens)

    def _take(self, step: _Step, found: Found, buffer: Array) -> bool:
        """Verify one piece and append it to what was found; false, with the fault noted, when it cannot be used."""
        fault = step.piece.load(step.path, buffer)
        if fault is not None:
            found.faults.append(FaultyPiece(step.path, step.piece.kind, fault))
            return False
        step.piece.copy(buffer, found.layers, found.n_tokens, step.use_tokens)
        found.n_tokens += step.use_tokens
        return True

    def _piece(self, kind: PieceKind, index: int, token_ids: tuple[int, ...]) -> CachePiece:
        return CachePiece(kind, self._model, self._spec, self._chain[index], token_ids)

    def _block_path(self, index: int) -> Path | None:
        return self._path_of(self._model, self._chain[index + 1]) if index + 1 < len(self._chain) else None


def _cut(array: Array, n_tokens: int) -> Array:
    return np.ascontiguousarray(array[:, :n_tokens])

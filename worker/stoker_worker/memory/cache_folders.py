"""The two folders of cache files: the full blocks, which all agents share, and the pieces: the tail and the snapshots
of each agent's newest version. Loader and finisher threads.

Files are immutable. A block is named by its address, so two threads may write or remove the same one: at worst it is
computed again. A version's pieces have names of their own, so the newest version's are never those being written, and
what a crash leaves is overwritten or found by `Upkeep`.
"""

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from stoker_worker.memory.block_chain import BlockChain
from stoker_worker.memory.cache_file import CachePiece
from stoker_worker.memory.files import Chunk, DurableWriter, allocated_bytes
from stoker_worker.ports import CacheSlice
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, ModelCacheSpec

MOST_SNAPSHOTS: Final = 2
"""Of one version: one before the prompt's last token, and one at the end of the turn."""

Pieces = Mapping[Path, Iterable[Chunk]]
"""The tail and the snapshots of a version: the bytes of each file."""


class BlockFolder:
    """``STORE/blocks``."""

    def __init__(self, path: Path, writer: DurableWriter) -> None:
        self.path = path
        self._writer = writer

    def path_of(self, model: str, address: str) -> Path:
        return self.path / model[:16] / address[:2] / f"{address}.safetensors"

    def save(self, chain: BlockChain, cache: CacheSlice, spec: ModelCacheSpec) -> dict[int, int]:
        """Make every full block of `chain` from `cache.start` on durable, except those that are there.

        Returns:
            the allocated bytes of each of them, by its index in the chain.

        Raises:
            OSError: not all of them could be written.
        """
        paths: dict[int, Path] = {}
        missing: dict[Path, Iterable[Chunk]] = {}
        # A model without full-attention layers has no blocks.
        for index in range(cache.start // BLOCK_TOKENS, chain.n_blocks) if spec.full_layers else ():
            piece = CachePiece("block", chain.model, spec, chain.parent(index), chain.block(index))
            paths[index] = path = self.path_of(chain.model, chain.addresses[index])
            if not _has_size(path, piece.n_bytes):
                missing[path] = piece.encode(cache.layers, index * BLOCK_TOKENS)
        self._writer.put_all(missing)
        return {index: allocated_bytes(path) for index, path in paths.items()}


class PieceFolder:
    """``STORE/pieces/<hh>/<first half of the SHA-256 of the agent id>-<version>-<piece>.safetensors``."""

    def __init__(self, path: Path, writer: DurableWriter) -> None:
        self.path = path
        self._writer = writer

    def tail_path(self, agent_id: str, version: int) -> Path:
        return self._path(agent_id, version, "tail")

    def snapshot_path(self, agent_id: str, version: int, index: int) -> Path:
        return self._path(agent_id, version, f"snapshot-{index}")

    def paths(self, agent_id: str, version: int) -> list[Path]:
        """Where the tail and the snapshots of this version may be, in this order."""
        snapshots = (self.snapshot_path(agent_id, version, index) for index in range(MOST_SNAPSHOTS))
        return [self.tail_path(agent_id, version), *snapshots]

    def write(self, pieces: Pieces) -> int:
        """Make the files durable; returns their allocated bytes.

        Raises:
            OSError: not all of them could be written; none is left.
        """
        try:
            self._writer.put_all(pieces)
            return sum(map(allocated_bytes, pieces))
        except OSError:
            self.remove(pieces)
            raise

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove those that are there. Never raises: `Upkeep` finds what is left."""
        for path in paths:
            with suppress(OSError):
                self._writer.files.remove(path)

    def _path(self, agent_id: str, version: int, piece: str) -> Path:
        name = hashlib.sha256(agent_id.encode()).hexdigest()
        return self.path / name[:2] / f"{name[:32]}-{version}-{piece}.safetensors"


def _has_size(path: Path, n_bytes: int) -> bool:
    """Whether the file is there, and not cut short. Its content is verified when it is loaded, not here."""
    try:
        return path.stat().st_size == n_bytes
    except FileNotFoundError:
        return False

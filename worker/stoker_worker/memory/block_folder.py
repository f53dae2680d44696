"""The folder of the full blocks, which all agents share. Loader and finisher threads.

Files are immutable and named by their address, so two threads may write or remove the same one: at worst a block is
computed again.
"""

from pathlib import Path

from stoker_worker.memory.block_chain import BlockChain
from stoker_worker.memory.cache_file import CachePiece
from stoker_worker.memory.files import DurableWriter, Files
from stoker_worker.ports import CacheSlice
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, ModelCacheSpec


class BlockFolder:
    """``STORE/blocks``."""

    def __init__(self, path: Path, *, files: Files, writer: DurableWriter) -> None:
        self.path = path
        self._files = files
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
        touched, sizes = set(), {}
        # A model without full-attention layers has no blocks.
        for index in range(cache.start // BLOCK_TOKENS, chain.n_blocks) if spec.full_layers else ():
            piece = CachePiece("block", chain.model, spec, chain.parent(index), chain.block(index))
            path = self.path_of(chain.model, chain.addresses[index])
            if not _has_size(path, piece):
                self._writer.make_folder(path.parent)
                self._writer.put(path, piece.encode(cache.layers, index * BLOCK_TOKENS - cache.start))
                touched.add(path.parent)
            sizes[index] = path.stat().st_blocks * 512
        for folder in sorted(touched):
            self._files.sync_folder(folder)
        return sizes


def _has_size(path: Path, piece: CachePiece) -> bool:
    """Whether the file is there, and not cut short. Its content is verified when it is loaded, not here."""
    try:
        return path.stat().st_size == piece.n_bytes
    except FileNotFoundError:
        return False

"""Full blocks on disk, shared by all agents: where they are and how they get there. Loader and finaliser threads.

Files are immutable and named by their address, so two threads that write or remove the same one do no harm: the worst
is a block that has to be computed again.
"""

from dataclasses import replace
from pathlib import Path

from stoker_worker.cache_spec import BLOCK_TOKENS
from stoker_worker.memory.blocks import chain
from stoker_worker.memory.cache_file import CachePiece
from stoker_worker.memory.files import DurableWriter, Files
from stoker_worker.ports import LayerKV


class BlockFolder:
    """``STORE/blocks``."""

    def __init__(self, path: Path, *, files: Files, writer: DurableWriter) -> None:
        self.path = path
        self._files = files
        self._writer = writer

    def path_of(self, model: str, address: str) -> Path:
        return self.path / model[:16] / address[:2] / f"{address}.safetensors"

    def save(self, run: CachePiece, layers: tuple[LayerKV, ...]) -> str:
        """Make every full block of a run of tokens durable, except those that are there.

        Args:
            run: the tokens, how many there are, and the address of the block before them.
            layers: their cache.

        Returns:
            address of the last full block (`run.parent` when there is none).
        """
        addresses = chain(run.parent, run.token_ids)
        touched = set()
        # Without full-attention layers a model has nothing that could be cut into blocks.
        for index, address in enumerate(addresses[1:] if run.spec.full_layers else ()):
            start = index * BLOCK_TOKENS
            ids = run.token_ids[start : start + BLOCK_TOKENS]
            piece = replace(run, kind="block", parent=addresses[index], token_ids=ids)
            path = self.path_of(run.model, address)
            if not _has_size(path, piece):
                self._writer.make_folder(path.parent)
                self._writer.put(path, piece.encode(layers, start))
                touched.add(path.parent)
        for folder in sorted(touched):
            self._files.sync_folder(folder)
        return addresses[-1]


def _has_size(path: Path, piece: CachePiece) -> bool:
    """Whether the file is there, and not cut short. Its content is verified when it is loaded, not here."""
    try:
        return path.stat().st_size == piece.n_bytes
    except FileNotFoundError:
        return False

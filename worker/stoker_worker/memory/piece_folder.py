"""The folder of the agents' own cache files: the tail and the snapshots of each agent's newest version. Finisher and
loader threads.

A version's files have names of their own, so the newest version's are never those being written, and what a crash
leaves is overwritten or found by `Upkeep`.
"""

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from stoker_worker.memory.files import Chunk, DurableWriter, Files

MOST_SNAPSHOTS: Final = 2
"""Of one version: one before the prompt's last token, and one at the end of the turn."""

Pieces = Mapping[Path, Iterable[Chunk]]
"""The tail and the snapshots of a version: the bytes of each file."""


class PieceFolder:
    """``STORE/pieces/<hh>/<first half of the SHA-256 of the agent id>-<version>-<piece>.safetensors``."""

    def __init__(self, path: Path, *, files: Files, writer: DurableWriter) -> None:
        self.path = path
        self._files = files
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
            for path, chunks in pieces.items():
                self._writer.make_folder(path.parent)
                self._writer.put(path, chunks)
            for folder in {path.parent for path in pieces}:
                self._files.sync_folder(folder)
        except OSError:
            self.remove(pieces)
            raise
        return sum(path.stat().st_blocks * 512 for path in pieces)

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove those that are there. Never raises: `Upkeep` finds what is left."""
        for path in paths:
            with suppress(OSError):
                self._files.remove(path)

    def _path(self, agent_id: str, version: int, piece: str) -> Path:
        name = hashlib.sha256(agent_id.encode()).hexdigest()
        return self.path / name[:2] / f"{name[:32]}-{version}-{piece}.safetensors"

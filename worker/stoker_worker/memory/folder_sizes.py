"""The allocated bytes of a store's folders, and of the files beside its database. Any thread.

There are a few hundred folders for each model, however many agents. A folder is measured when a file in it may have
been made or removed since; cache files are counted in the database.
"""

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from stoker_worker.memory.store_parts import StoreParts


class FolderSizes:
    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._sizes: dict[Path, int] = {}
        self._changed: set[Path] = set()
        self.measure_all()

    def changed(self, folders: Iterable[Path]) -> None:
        """Measure these with the next `total_bytes`, and those above them that are new."""
        with self._lock:
            self._changed.update(folders)

    def measure_all(self) -> None:
        store = self._parts.path
        with self._lock:
            self._sizes.clear()
            self._changed.update((store, self._parts.temp, self._parts.blocks.path, self._parts.pieces.path))
            self._changed.update((*store.glob("blocks/*/"), *store.glob("blocks/*/*/"), *store.glob("pieces/*/")))

    def total_bytes(self) -> int:
        """With the files in the store's own folder, those of the database among them."""
        with self._lock:
            while self._changed:
                self._measure(self._changed.pop())
            folders = sum(self._sizes.values())
        files = 0
        with os.scandir(self._parts.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    files += entry.stat().st_blocks * 512 if entry.is_file(follow_symlinks=False) else 0
        return folders + files

    def _measure(self, folder: Path) -> None:
        is_new = self._sizes.pop(folder, None) is None
        with suppress(OSError):
            self._sizes[folder] = folder.stat().st_blocks * 512
            if is_new and folder != self._parts.path:
                self._changed.add(folder.parent)

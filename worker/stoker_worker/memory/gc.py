"""Removes what nobody needs from a store: blocks that no agent uses, files that a crash left half-written.

The store must be held (see `access.hold`). Transcripts are never touched here.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.census import take_census


@dataclass(frozen=True)
class Collected:
    """What was removed, or would be; sizes in bytes.

    Attributes:
        unreadable: folders of the agents whose blocks could not be known, and so were not kept on their account.
    """

    blocks: int
    block_bytes: int
    temp_files: int
    temp_bytes: int
    unreadable: tuple[Path, ...]


def collect(store: StoreAccess, *, dry_run: bool = False) -> Collected:
    """Remove unused blocks and temp files, or with `dry_run` only count them.

    Raises:
        OSError: something could not be removed; running it again goes on from there.
    """
    entries = take_census(store)
    used = {path for entry in entries for path in entry.blocks}
    unused = [path for path in _files_below(store.blocks.path) if path.suffix == ".safetensors" and path not in used]
    temp = list(_files_below(store.temp))
    collected = Collected(
        len(unused),
        size_of(unused),
        len(temp),
        size_of(temp),
        tuple(entry.folder for entry in entries if not entry.knows_blocks),
    )
    if not dry_run:
        remove_blocks(store, unused)
        store.writer.clear()
    return collected


def remove_blocks(store: StoreAccess, paths: Iterable[Path]) -> tuple[int, int]:
    """Remove those of the blocks that are there, and folders that become empty; returns how many, and their bytes."""
    there = [path for path in paths if path.is_file()]
    n_bytes = size_of(there)
    for path in there:
        store.files.remove(path)
    for folder in {path.parent for path in there}:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
            folder.parent.rmdir()
    return len(there), n_bytes


def size_of(paths: Iterable[Path]) -> int:
    """Bytes of those of the files that are there."""
    n_bytes = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            n_bytes += path.lstat().st_size
    return n_bytes


def _files_below(folder: Path) -> Iterator[Path]:
    for path, _, names in os.walk(folder):  # follows no links
        yield from (Path(path, name) for name in names)

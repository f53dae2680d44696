"""Removes what a store does not need: unused blocks, cache files without a row, temp files of dead processes. A command
of the shell, also beside a worker.

A block that a worker begins to count on meanwhile is a miss, and is computed again.
"""

import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from stoker_worker.memory import cache_index
from stoker_worker.memory.cache_index import Block
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.orphans import YOUNG_S, cache_folders, orphans_in
from stoker_worker.memory.store_parts import StoreParts, is_in_use

_AT_ONCE: Final = 256


@dataclass(frozen=True)
class Collected:
    """What was removed, or is to be removed: numbers of files, and their allocated bytes.

    Attributes:
        orphans: cache files without a row.
    """

    blocks: int
    block_bytes: int
    orphans: int
    orphan_bytes: int
    temp_files: int
    temp_bytes: int


def collect(parts: StoreParts, *, dry_run: bool = False) -> Collected:
    """Remove all that, or with `dry_run` only count it. Beside a worker, what is younger than `YOUNG_S` stays.

    Raises:
        OSError: some file could not be removed; a second call removes the rest.
        Damaged: the database is damaged.
    """
    before = time.time() - YOUNG_S if is_in_use(parts.path) else float("inf")
    temp = {path: path.lstat().st_blocks * 512 for path in parts.writer.left_behind()}
    if not dry_run:
        parts.writer.clear()
    blocks = _all_unused(parts, before) if dry_run else _remove_unused(parts, before)
    orphans: dict[Path, int] = {}
    for folder in cache_folders(parts):
        orphans |= orphans_in(parts, folder, before=before)
    for path in () if dry_run else orphans:
        parts.files.remove(path)
    return Collected(
        len(blocks),
        sum(block.n_bytes for block in blocks),
        len(orphans),
        sum(orphans.values()),
        len(temp),
        sum(temp.values()),
    )


def _all_unused(parts: StoreParts, before: float) -> list[Block]:
    """The blocks that `_remove_unused` would remove: with each unused block the ones that only it follows."""
    found: list[Block] = []
    gone = Counter[str]()
    with parts.database.snapshot() as connection:
        for leaf in cache_index.unused_blocks(connection, limit=-1, before=before):
            for block in cache_index.chain_back(connection, bytes.fromhex(leaf.address), most_users=-1):
                if block.n_users > gone[block.address]:
                    break
                found.append(block)
                gone[block.parent] += 1
    return found


def _remove_unused(parts: StoreParts, before: float) -> list[Block]:
    removed: list[Block] = []
    while True:
        with parts.database.snapshot() as connection:
            found = cache_index.unused_blocks(connection, limit=_AT_ONCE, before=before)
        if not found:
            return removed
        for block in found:
            parts.files.remove(parts.blocks.path_of(block.model, block.address))
        parts.database.commit(partial(_remove_rows, blocks=found))
        removed += found


def _remove_rows(connection: Connection, blocks: list[Block]) -> None:
    for block in blocks:
        cache_index.remove_block(connection, block.address)

"""Removes what a store does not need: unused blocks, cache files without a row, temp files of dead processes. A command
of the shell, also beside a worker.

A block that a worker begins to count on meanwhile is a miss, and is computed again.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from stoker_worker.memory import cache_index
from stoker_worker.memory.database import Connection
from stoker_worker.memory.locks import is_in_use
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.upkeep import YOUNG_S, cache_folders, orphans_in

_AT_ONCE: Final = 256
_UNUSED: Final = (
    "WITH RECURSIVE kept (address) AS (SELECT last_block FROM agents WHERE last_block IS NOT NULL"
    " UNION SELECT address FROM blocks WHERE unused_since > ?"
    " UNION SELECT parent FROM blocks JOIN kept USING (address))"
    " SELECT lower(hex(address)), model, CAST(n_bytes + checkpoint_bytes AS INTEGER) FROM blocks"
    " WHERE address NOT IN kept"
)
"""The blocks that no agent uses and no young block needs."""


@dataclass(frozen=True)
class Collected:
    """The removed files, or those to be removed: numbers of files, and their allocated bytes.

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
    temp = [path.lstat().st_blocks * 512 for path in parts.writer.left_behind()]
    with parts.database.snapshot() as connection:
        blocks = connection.execute(_UNUSED, (before,)).fetchall()
    if not dry_run:
        parts.writer.clear()
        for start in range(0, len(blocks), _AT_ONCE):
            some = blocks[start : start + _AT_ONCE]
            for address, model, _ in some:
                for path in parts.blocks.both(model, address):
                    parts.files.remove(path)
            parts.database.commit(partial(_remove_rows, addresses=[address for address, *_ in some]))
    orphans: dict[Path, int] = {}
    for folder in cache_folders(parts):
        orphans |= orphans_in(parts, folder, before=before)
    for path in () if dry_run else orphans:
        parts.files.remove(path)
    n_bytes = sum(size for *_, size in blocks)
    return Collected(len(blocks), n_bytes, len(orphans), sum(orphans.values()), len(temp), sum(temp))


def _remove_rows(connection: Connection, addresses: list[str]) -> None:
    for address in addresses:
        cache_index.remove_block(connection, address)

"""Finds cache files that no row of the database names, as a crash leaves them. Any thread; removes nothing.

Looks folder by folder, so that a caller may rest in between. A save writes its files before its rows, so a caller gives
files some time before they count as orphans. If one is needed after all, its loss is a miss.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from stoker_worker.memory import cache_index
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.store_parts import StoreParts

YOUNG_S: Final = 600.0
"""A worker may just be saving a file that is younger."""

_BLOCK: Final = re.compile(r"([0-9a-f]{64})\.safetensors")
_PIECE: Final = re.compile(r"([0-9a-f]{32})-([1-9][0-9]{0,15})-(?:tail|snapshot-[0-9])\.safetensors")


def cache_folders(parts: StoreParts) -> Iterator[Path]:
    """Every folder that holds cache files."""
    yield from sorted(parts.blocks.path.glob("*/*/"))
    yield from sorted(parts.pieces.path.glob("*/"))


def orphans_in(parts: StoreParts, folder: Path, *, before: float) -> dict[Path, int]:
    """The files in `folder`, one of `cache_folders`, that were written before that Unix time and that no row names;
    with their allocated bytes. Files with other names than a store's are left alone.

    Raises:
        OSError: the folder or the database cannot be read now.
        Damaged: the database is damaged.
    """
    is_named: Callable[[Connection, re.Match[str]], bool]
    pattern, is_named = (_PIECE, _has_piece) if folder.parent == parts.pieces.path else (_BLOCK, _has_block)
    old: dict[Path, tuple[re.Match[str], int]] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if (match := pattern.fullmatch(entry.name)) is None:
                continue
            try:
                seen = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if seen.st_mtime < before:
                old[Path(entry.path)] = match, seen.st_blocks * 512
    with parts.database.snapshot() as connection:  # after the look at the folder: what was saved meanwhile has a row
        return {path: n_bytes for path, (match, n_bytes) in old.items() if not is_named(connection, match)}


def _has_block(connection: Connection, name: re.Match[str]) -> bool:
    return cache_index.has_block(connection, name[1])


def _has_piece(connection: Connection, name: re.Match[str]) -> bool:
    """Whether it belongs to the newest version of an agent."""
    key = bytes.fromhex(name[1])
    sql = "SELECT 1 FROM agents INDEXED BY agents_by_key WHERE key BETWEEN ? AND ? AND version = ?"
    return connection.execute(sql, (key, key + b"\xff" * 16, int(name[2]))).fetchone() is not None

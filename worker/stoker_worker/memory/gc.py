"""Removes from a store one agent, or unused blocks and the leftovers of crashes. The store must be locked."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker_shared.errors import AgentNotFound
from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.agent_index import history_blocks, newest_blocks, read_agent_index


@dataclass(frozen=True)
class Collected:
    """The number of files removed, or to be removed; sizes in bytes.

    Attributes:
        unreadable: folders of agents whose blocks are unknown, and so count as unused.
    """

    blocks: int
    block_bytes: int
    temp_files: int
    temp_bytes: int
    unreadable: tuple[Path, ...]


def collect(store: StoreAccess, *, dry_run: bool = False) -> Collected:
    """Remove unused blocks and temp files, or with `dry_run` only count them.

    Raises:
        OSError: some file could not be removed; a second call removes the rest.
    """
    entries = read_agent_index(store)
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
    """Remove blocks that are there, and folders that become empty; returns how many blocks, and their bytes."""
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


@dataclass(frozen=True)
class Removed:
    """The removed blocks and their bytes, and the blocks that other agents still use."""

    blocks: int
    block_bytes: int
    shared_blocks: int


def remove_agent(store: StoreAccess, agent_id: str) -> Removed:
    """Remove the agent, with its older versions' blocks. After a crash it is there whole or not at all.

    Raises:
        AgentNotFound: there is no such agent.
        OSError: it could not be removed, or not all of its blocks; `gc` finds those.
    """
    folder = store.agent(agent_id)
    if not folder.path.is_dir():
        raise AgentNotFound(f"there is no agent {agent_id!r}")
    path_of = store.blocks.path_of
    used = history_blocks(folder.read_records().values(), path_of).union(newest_blocks(folder.read(), path_of))
    others = {path for entry in read_agent_index(store) if entry.folder != folder.path for path in entry.blocks}
    store.discard(folder.path)
    shared = sum(path.exists() for path in used & others)  # some may be evicted, and some models have no blocks at all
    return Removed(*remove_blocks(store, used - others), shared)

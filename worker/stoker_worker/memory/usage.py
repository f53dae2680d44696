"""The files in a store and the agents that use them: bytes, and order of use.

`DiskBudget` keeps it up to date, under its lock. `StoreUsage` is bookkeeping without I/O; `scan_usage` and
`measure_again` fill it in, with sizes from the file system and users from the records.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.agent_index import read_agent_index
from stoker_worker.memory.disk_usage import NOTHING, STORE_PARTS, FolderUse, agent_use, allocated_bytes, store_parts


@dataclass(frozen=True)
class AgentUse:
    """One agent's bytes and blocks.

    Attributes:
        agent_id: ``None`` when no record of it can be read.
        folder: bytes of its own folder.
        blocks: files of its newest version's blocks in order of the chain, there or not.
        last_use: the larger, the later.
    """

    agent_id: str | None = None
    folder: FolderUse = NOTHING
    blocks: tuple[Path, ...] = ()
    last_use: int = 0


class StoreUsage:
    """All sizes are bytes allocated on disk; ``None``: the file is not there (any more).

    Attributes:
        total_bytes: of everything entered.
        agents: by their folder.
        blocks: bytes of each block file that is there.
        unused_since: when each block without a user lost its last one, or came; the oldest first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_bytes = 0
        self.agents: dict[Path, AgentUse] = {}
        self.blocks: dict[Path, int] = {}
        self.unused_since: dict[Path, float] = {}
        self._users: Counter[Path] = Counter()
        self._others: dict[Path, int] = {}
        self._uses = itertools.count(1)
        self._clock = clock

    def set_block(self, path: Path, n_bytes: int | None) -> None:
        self._set(self.blocks, path, n_bytes)
        self._note_unused(path)

    def set_other(self, path: Path, n_bytes: int | None) -> None:
        """Anything that is neither a block nor in an agent's folder."""
        self._set(self._others, path, n_bytes)

    def set_agent(self, folder: Path, agent_id: str | None, use: FolderUse | None) -> None:
        """An agent's folder; the blocks it uses stay as they are."""
        agent = self.agents.get(folder, AgentUse())
        if use is None:
            self.set_blocks_of(folder, ())
            self.agents.pop(folder, None)
        else:
            self.agents[folder] = replace(agent, agent_id=agent_id or agent.agent_id, folder=use)
        self.total_bytes += _bytes_of(use) - _bytes_of(agent.folder)

    def set_blocks_of(self, folder: Path, blocks: tuple[Path, ...]) -> None:
        """Which blocks an agent uses from now on."""
        agent = self.agents.get(folder, AgentUse())
        self.agents[folder] = replace(agent, blocks=blocks)
        self._users.update(blocks)
        self._users.subtract(agent.blocks)
        for path in dict.fromkeys((*reversed(agent.blocks), *blocks)):  # a chain is of use from its start only
            self._note_unused(path)
            if not self._users[path]:
                del self._users[path]

    def touch(self, folder: Path, agent_id: str | None) -> None:
        """The agent is used now."""
        if (agent := self.agents.get(folder)) is not None:
            self.agents[folder] = replace(agent, agent_id=agent_id, last_use=next(self._uses))

    def touch_unused(self, blocks: tuple[Path, ...]) -> None:
        """Blocks of a chain are used now, by a job without an agent."""
        for path in reversed(blocks):  # the start of a chain goes last
            if self.unused_since.pop(path, None) is not None:
                self.unused_since[path] = self._clock()

    def folder_use(self, folder: Path) -> FolderUse:
        return self.agents[folder].folder if folder in self.agents else NOTHING

    def n_users(self, block: Path) -> int:
        return self._users[block]

    def least_recently_used(self) -> Iterator[tuple[Path, AgentUse]]:
        yield from sorted(self.agents.items(), key=lambda item: item[1].last_use)

    def _set(self, sizes: dict[Path, int], path: Path, n_bytes: int | None) -> None:
        self.total_bytes += (n_bytes or 0) - sizes.pop(path, 0)
        if n_bytes is not None:
            sizes[path] = n_bytes

    def _note_unused(self, path: Path) -> None:
        if self._users[path] or path not in self.blocks:
            self.unused_since.pop(path, None)
        else:
            self.unused_since.setdefault(path, self._clock())


def _bytes_of(use: FolderUse | None) -> int:
    return use.kept_bytes + use.piece_bytes if use else 0


def scan_usage(store: StoreAccess, usage: StoreUsage) -> None:
    """Enter everything in `store`; agents count as used in the order in which they were saved. Raises `OSError`."""
    for path in store_parts(store.path):
        if path.parent.parent == store.agents and path.is_dir():
            usage.set_agent(path, None, agent_use(path))
        elif path.suffix == ".safetensors" and path.is_file():
            usage.set_block(path, allocated_bytes(path))
        else:
            usage.set_other(path, allocated_bytes(path))
    for entry in sorted(read_agent_index(store), key=lambda entry: _last_saved(entry.folder)):
        usage.set_blocks_of(entry.folder, entry.blocks)
        usage.touch(entry.folder, entry.agent_id)


def measure_again(store: StoreAccess, usage: StoreUsage, agent_id: str | None, blocks: Iterable[Path]) -> None:
    """Enter the agent's folder and these blocks as they are now. Raises `OSError`."""
    touched = {store.path, *(store.path / name for name in STORE_PARTS)}
    if agent_id is not None:
        folder = store.agent(agent_id).path
        touched.add(folder.parent)
        usage.set_agent(folder, agent_id, agent_use(folder, usage.folder_use(folder)))
    for path in blocks:
        usage.set_block(path, allocated_bytes(path))
        touched |= {path.parent, path.parent.parent}
    for path in touched:
        usage.set_other(path, allocated_bytes(path))


def _last_saved(folder: Path) -> float:
    """Unix time at which the agent's newest version was saved."""
    for name in ("HEAD", "HEAD.unsaved"):
        with suppress(OSError):
            return (folder / name).stat().st_mtime
    return 0.0

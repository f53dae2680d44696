"""The parts of a store by name, and how a store is made, checked and opened. Any thread.

Several processes may have a store open: the worker and the shell's commands. SQLite's locks and atomic renames keep
them apart. Only one of them is a worker (`locks.StoreLock`).
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from stoker_shared.errors import StoreUnusable
from stoker_worker.memory.blocks import BlockFolder, PieceFolder
from stoker_worker.memory.database import Connection, Database, connect
from stoker_worker.memory.database_file import (
    HOW_TO_GO_ON,
    create_database,
    has_database,
    open_database,
    refused_if_damaged,
    refused_if_unusable,
)
from stoker_worker.memory.files import CacheWriter, Disk
from stoker_worker.memory.transcripts import Ended, TurnRecord
from stoker_worker.memory.unsaved import UnsavedTurns
from stoker_worker.ports import LastVersion

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class NextVersion:
    """An agent's next version, before it is in the shared store, if there is one, and in the database.

    Attributes:
        record: ``None``: an empty version, of an agent that is forgotten or unknown.
        delivery: key of the delivery that makes it; ``None`` for a command.
        result: the answer to that delivery, as JSON.
        layout: cache layout of the model that made its cache.
    """

    agent_id: str
    number: int
    record: TurnRecord | None = None
    delivery: bytes | None = None
    result: str | None = None
    layout: str | None = None


@dataclass(frozen=True)
class Forgotten:
    """An agent whose newest version, `number`, is an empty one. `ended`: the ends of its deliveries, by their keys."""

    number: int = 0
    ended: Mapping[bytes, Ended] = field(default_factory=dict)


NEVER_MADE = Forgotten()


class Replica:
    """Keeps the database a copy of the shared store. This base class is for a store without one."""

    is_shared = False

    def meet(self) -> None:
        """As `AgentCacheStore.meet`."""

    def changing(self, agent_id: str) -> AbstractContextManager[object]:
        """Held while the agent's next version is made, there and here."""
        return nullcontext()

    def look(self, agent_id: str, last: LastVersion | None = None) -> bool:
        """As `CacheStorePort.look`. Raises `OSError`, `Damaged`: the database cannot be read or written."""
        return True  # there is no other worker

    def mend(self, agent_id: str) -> None:
        """Bring the agent in anew, because the copy here cannot be read. Raises as `look`."""

    def publish(self, version: NextVersion) -> None:
        """Make this the agent's newest version in the shared store. Raises `VersionTaken`: there is another one of this
        number, or a newer one; `SharedStoreAway`: it may be there or not."""

    def committed(self, connection: Connection, version: NextVersion) -> None:
        """Called in the transaction that makes it the newest version here."""

    def forgotten(self, agent_id: str) -> Forgotten:
        """An agent that is unknown here, as the last look found it in the shared store."""
        return NEVER_MADE

    def result_in(self, agent_id: str, version: int, key: bytes) -> str | None:
        """The answer to the delivery of this key, from the version in the shared store; ``None``: it is gone. Raises
        `SharedStoreAway`, `Damaged`: that cannot be known."""
        return None

    def expire(self, agent_id: str, unused_s: float) -> bool:
        """True if the agent, unused here for so long, may be removed here. It is forgotten everywhere if its newest
        version is as old."""
        return True


class Holds:
    """The cache that work in this process counts on; none in a command of the shell. `lock`: never held while waiting
    for a transaction."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._pinned = (frozenset[str](), frozenset[str](), False)  # replaced as a whole, so no look sees half of it
        self._in_use: Counter[str] = Counter()
        self._held: Counter[str] = Counter()

    def pin(self, running: frozenset[str], waiting: frozenset[str], *, is_all: bool = True) -> None:
        """From now on these agents, and no others, have work: those that run lose nothing, those that wait lose theirs
        last. Never blocks. `is_all`: no other agent has work waiting."""
        self._pinned = (running, waiting, is_all)

    def has_work(self, agent_id: str) -> bool:
        """True if the agent has, or may have, work that runs or waits."""
        running, waiting, is_all = self._pinned
        return not is_all or any(agent_id in agents for agents in (running, waiting, self._in_use))

    @contextmanager
    def using(self, agent_id: str | None, blocks: Iterable[str]) -> Iterator[None]:
        """Inside, the agent, if any, loses nothing, and the blocks of these addresses stay."""
        agents, held = () if agent_id is None else (agent_id,), tuple(blocks)
        with self.lock:
            self._in_use.update(agents)
            self._held.update(held)
        try:
            yield
        finally:
            with self.lock:
                _release(self._in_use, agents)
                _release(self._held, held)

    def is_held(self, address: str) -> bool:
        """True if work counts on the block."""
        with self.lock:
            return address in self._held

    def agents(self) -> frozenset[str]:
        """The agents with work. With `lock` held."""
        running, waiting, _ = self._pinned
        return running.union(waiting, self._in_use)

    def is_running(self, agent_id: str) -> bool:
        """True if the agent may lose nothing. With `lock` held."""
        return agent_id in self._pinned[0] or agent_id in self._in_use

    def waits(self, agent_id: str) -> bool:
        return agent_id in self._pinned[1]

    def blocks(self) -> frozenset[str]:
        """Addresses of the blocks that stay. With `lock` held."""
        return frozenset(self._held)


def _release(counts: Counter[str], names: Iterable[str]) -> None:
    """Looks at these names only: subtracting from a `Counter` goes through all that it has."""
    for name in names:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]


@dataclass
class StoreParts:
    """An open store.

    Attributes:
        replica: its shared store, if there is one.
        holds: the cache that this process counts on.
        unsaved: the agents whose last turn is lost, as far as the database does not have that yet.
    """

    path: Path
    files: Disk
    database: Database
    writer: CacheWriter
    blocks: BlockFolder
    pieces: PieceFolder
    replica: Replica = field(default_factory=Replica)
    holds: Holds = field(default_factory=Holds)
    unsaved: Container[str] = frozenset()

    @property
    def temp(self) -> Path:
        return self.path / "tmp"

    def commit_next(self, version: NextVersion, change: Callable[[Connection], T]) -> T | None:
        """Make the version the agent's newest one, there and here, by the transaction of `change`.

        Returns:
            what `change` returned; ``None``: it failed here, but the version is there. The next look brings it in.

        Raises:
            VersionTaken, SharedStoreAway: as `Replica.publish`; nothing has changed here.
            Exception: there is no shared store, and `change` failed; nothing has changed.
        """
        if not self.replica.is_shared:
            return self.database.commit(change)
        self.replica.publish(version)

        def run(connection: Connection) -> T:
            result = change(connection)
            self.replica.committed(connection, version)
            return result

        try:
            return self.database.commit(run)
        except Exception as error:
            _log.warning(
                "agent %r: version %d is in the shared store, and comes here later: %s",
                version.agent_id,
                version.number,
                error,
            )
            return None

    def close(self) -> None:
        self.database.close()


def open_parts(
    path: Path,
    files: Disk | None = None,
    *,
    create: bool = False,
    connector: Callable[[Path], Connection] = connect,
) -> StoreParts:
    """Open the store at `path`. `create`: make it if there is none, or if a crash left it half made. Raises
    `StoreUnusable`: there is none, it is damaged or of another format, or it cannot be used."""
    files = Disk() if files is None else files
    writer = CacheWriter(files, path / "tmp")

    def make() -> None:
        make_folders(path, writer)
        has_caches = any(True for name in ("blocks", "pieces") for _ in (path / name).iterdir())
        if has_caches and not has_database(path):  # there is one as soon as another process has made it
            raise StoreUnusable(f"there are caches at {path}, and no database; {HOW_TO_GO_ON}")
        create_database(path, files, connector)

    with refused_if_unusable(path):
        database = open_database(path, connector, make=make if create else None)
    blocks, pieces = BlockFolder(path / "blocks", writer), PieceFolder(path / "pieces", writer)
    return StoreParts(path, files, database, writer, blocks, pieces)


def make_folders(path: Path, writer: CacheWriter) -> None:
    """Raises `OSError`."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
    for name in ("", "tmp", "blocks", "pieces"):
        writer.make_folder(path / name)


@contextmanager
def opened(path: Path) -> Iterator[StoreParts]:
    """An existing store, for one command; a worker may have it open too. Raises `StoreUnusable` as `open_parts`, and
    when the command meets a damaged page."""
    with closing(open_parts(path)) as parts, refused_if_damaged(path):
        with refused_if_unusable(path):
            parts.unsaved = unsaved = UnsavedTurns(path, parts.database, parts.files)
            unsaved.move_all()
        yield parts

"""The parts of a store by name, and the two ways to open one from a shell: to read, or locked. Any thread.

Reading needs no lock: a worker makes files whole and then renames them, so a reader beside it sees old or new, never
half. Every change of the store needs the lock, which a running worker holds.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from stoker_shared.errors import (
    AgentExists,
    AgentMemoryError,
    AgentNotFound,
    AgentTranscriptUnreadable,
    StoreUnusable,
)
from stoker_shared.request import AgentId
from stoker_worker.memory.agent_folder import AgentFolder
from stoker_worker.memory.agent_writer import AgentWriter
from stoker_worker.memory.block_folder import BlockFolder
from stoker_worker.memory.files import Disk, DurableWriter, Files
from stoker_worker.memory.record import AgentState
from stoker_worker.memory.store_folder import StoreFolder, check_format
from stoker_worker.memory.tombstones import Tombstones
from stoker_worker.memory.verify import verify_agents, verify_blocks

_AGENT_ID: Final[TypeAdapter[str]] = TypeAdapter(AgentId)


@dataclass(frozen=True)
class StoreAccess:
    """The store at `path`."""

    path: Path
    files: Files = field(default_factory=Disk)

    @property
    def agents(self) -> Path:
        return self.path / "agents"

    @property
    def temp(self) -> Path:
        return self.path / "tmp"

    @property
    def tombstones(self) -> Tombstones:
        return Tombstones(self.path / "forgotten", self.files, self.writer)

    @property
    def writer(self) -> DurableWriter:
        return DurableWriter(self.files, self.temp)

    @property
    def blocks(self) -> BlockFolder:
        return BlockFolder(self.path / "blocks", files=self.files, writer=self.writer)

    def agent(self, agent_id: str) -> AgentFolder:
        return AgentFolder(self.agents, agent_id)

    def agent_writer(self, agent_id: str) -> AgentWriter:
        return AgentWriter(self.agent(agent_id), files=self.files, writer=self.writer)

    def readable(self, agent_id: str) -> AgentState:
        """The state of an agent whose transcript is intact.

        Raises:
            AgentNotFound: there is no such agent.
            AgentTranscriptUnreadable: it is damaged, or the last turn is not in it.
        """
        state = self.agent(agent_id).read()
        if state.problem is not None:
            why = f"the transcript of agent {agent_id!r}: {state.problem}"
            raise AgentTranscriptUnreadable(why, usable=state.version)
        if state.version.transcript is None:
            raise AgentNotFound(f"there is no agent {agent_id!r}")
        return state

    def vacant(self, agent_id: str) -> AgentState:
        """The state of an agent that does not exist yet.

        Raises:
            AgentExists: it exists.
            AgentMemoryError: no agent can have this id.
        """
        try:
            _AGENT_ID.validate_python(agent_id)
        except ValidationError as error:
            raise AgentMemoryError(f"{agent_id!r} cannot be an agent's id: {error.errors()[0]['msg']}") from None
        state = self.agent(agent_id).read()
        if state.version.number or state.problem is not None:
            raise AgentExists(f"there is an agent {agent_id!r} already")
        return state

    def verify(self) -> list[str]:
        """One line for everything in the store that is not as it was written; reads all of it."""
        return [*verify_blocks(self.blocks.path), *verify_agents(self.agents)]

    def discard(self, folder: Path) -> None:
        """Remove an agent's folder: first a durable rename into the temp folder, then the files.

        Raises:
            OSError: it is whole and where it was, or in the temp folder, which the next opening empties.
        """
        gone = self.temp / f"{folder.name}.removed"
        self.files.rename(folder, gone)
        self.files.flush(folder.parent)
        self.files.flush(self.temp)
        self.files.remove_folder(gone)


def look_at(path: Path) -> StoreAccess:
    """The store, to read only.

    Raises:
        StoreUnusable: there is none at `path`, or it is of an unknown format.
    """
    if not (path / "store.json").exists():
        raise StoreUnusable(f"there is no store at {path}")
    check_format(path / "store.json")
    return StoreAccess(path)


@contextmanager
def hold(path: Path, *, clear: bool = True) -> Iterator[StoreAccess]:
    """The store, locked; `clear` removes what a crash left in its temp folder.

    Raises:
        StoreUnusable: as `look_at`; or a worker has it, and the message names it.
    """
    access = look_at(path)
    with closing(StoreFolder(path, access.files, clear=clear)):
        yield access

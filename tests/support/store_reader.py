"""Reads the histories of a store's agents, as a test that looks at it from outside does."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker_worker.memory import transcripts
from stoker_worker.memory.admin.verify import verify_store
from stoker_worker.memory.database import Connection, Damaged
from stoker_worker.memory.database_file import has_database, open_database
from stoker_worker.memory.store_parts import opened
from stoker_worker.ports import AgentVersion, CachedPrefix, Transcript


@dataclass(frozen=True)
class Kept:
    """A version of an agent that is kept.

    Attributes:
        delivery: the key of the delivery that made it.
        result: the answer to that delivery; ``None`` if it is forgotten, or if a command made the version.
    """

    number: int
    job_id: str | None
    delivery: bytes | None
    transcript: Transcript
    cache: CachedPrefix | None
    result: Mapping[str, Any] | None


class StoreReader:
    """A store that nobody writes to meanwhile: its worker is gone or paused.

    Reads a copy of the database, because the first to open one after a crash repairs it: that is the next worker's
    part.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self, agent_id: str) -> AgentVersion:
        with self._snapshot() as connection:
            state = transcripts.read_agent(connection, agent_id)
        assert state.problem is None, state.problem
        return state.version

    def history(self, agent_id: str) -> list[Kept]:
        """The versions that are kept, oldest first. Each is whole."""
        with self._snapshot() as connection:
            row = transcripts.find_agent(connection, agent_id)
            if row is None:
                return []
            assert row.problem is None, row.problem
            return list(_history(connection, row))

    def turns(self, agent_id: str) -> list[str | None]:
        """The jobs that made its versions, oldest first."""
        return [kept.job_id for kept in self.history(agent_id)]

    def heads(self) -> dict[str, bytes]:
        """The newest version of each agent, by a checksum of it."""
        with self._snapshot() as connection:
            return {row.agent_id: row.head for row in transcripts.agent_rows(connection, "")}

    def problems(self) -> list[str]:
        """What `verify` finds in the store itself."""
        with opened(self._folder) as parts:
            return list(verify_store(parts))

    @contextmanager
    def _snapshot(self) -> Iterator[Connection]:
        with tempfile.TemporaryDirectory() as copy:
            for path in self._folder.glob("agents.*"):
                if not path.name.endswith("-shm"):
                    shutil.copy(path, copy)
            with closing(open_database(Path(copy))) as database, database.snapshot() as connection:
                yield connection


def is_made(folder: Path) -> bool:
    """Whether a worker has made the store, and not only its folder."""
    return has_database(folder)


def _history(connection: Connection, row: transcripts.AgentRow) -> Iterator[Kept]:
    for record, can_return in transcripts.read_history(connection, row):
        assert can_return, record
        transcript, cache = transcripts.read_version(connection, row, record.version)
        result = None
        if record.delivery is not None:
            with suppress(Damaged):
                known = transcripts.read_answer(connection, row.number, record.delivery)
                result = known if isinstance(known, Mapping) else None
        yield Kept(record.version, record.about.job_id, record.delivery, transcript, cache, result)

"""Reads an agent's newest version and the answers to its jobs, and refuses it when a turn is missing. Loader and
finisher threads.
"""

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from stoker_shared.errors import AgentTranscriptUnreadable
from stoker_worker.memory import agent_table, deliveries, turn_table
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.database_file import with_way_on
from stoker_worker.memory.in_flight import InFlight
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.unsaved import UnsavedTurns
from stoker_worker.ports import UNKNOWN_VERSION, AgentVersion, Delivery, HomeOf

_log = logging.getLogger(__name__)


class AgentReading:
    """
    Attributes:
        unsaved: the turns that are lost, and that the database has not heard of.
        home_of: as `CacheStorePort.know_homes` was told.
    """

    def __init__(self, parts: StoreParts, in_flight: InFlight) -> None:
        """Raises `OSError`."""
        self.unsaved = UnsavedTurns(parts.path, parts.database, parts.files)
        self.unsaved.reserve()
        self.home_of: HomeOf = lambda agent_id: None
        self._database = parts.database
        self._in_flight = in_flight

    def open(self, agent_id: str) -> AgentVersion:
        """See `CacheStorePort.open_agent`."""
        self._in_flight.wait_for(agent_id)
        home = self.home_of(agent_id)
        try:
            self.note_missing(agent_id)
            with self._database.snapshot() as connection:
                state = agent_table.read_agent(connection, agent_id)
            version = state.version
        except (Damaged, OSError) as error:
            log_way_on(agent_id, error)
            unknown = AgentVersion(agent_id, UNKNOWN_VERSION, None)
            raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {error}", usable=unknown) from error
        problem = "its last turn was not saved" if agent_id in self.unsaved else state.problem
        if home is not None and version.number == home.version and not version.head and version.number:
            problem = f"worker {home.kept_by!r} made version {home.version}, which is not here"
        if home is not None and home.is_unnoted and not version.number:
            problem = f"worker {home.kept_by!r} has it, and has not written it to the shared store"
        if problem is not None:
            raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {problem}", usable=version)
        return version

    def note_missing(self, agent_id: str) -> None:
        """If the newest version of the agent was made on another machine and is not here, the agent is at that version
        from now on, and cannot be read. Raises `OSError`, `Damaged`."""
        home = self.home_of(agent_id)
        if home is None:
            return
        with self._database.snapshot() as connection:
            row = agent_table.find_agent(connection, agent_id)
        if home.version > (row.version if row else 0):
            change = partial(agent_table.set_missing, agent_id=agent_id, version=home.version, now=time.time())
            self._database.commit(change)

    def answer(self, agent_id: str, delivery: Delivery) -> Mapping[str, Any] | None:
        """See `CacheStorePort.answer`."""
        self._in_flight.wait_for(agent_id)
        key = deliveries.delivery_key(agent_id, delivery)
        try:
            with self._database.snapshot() as connection:
                row = agent_table.find_agent(connection, agent_id)
                known = None if row is None else deliveries.read_answer(connection, row.number, key)
                is_whole = row is not None and known is not None and turn_table.is_newest(connection, row, key)
        except (Damaged, OSError) as error:
            log_way_on(agent_id, error)
            raise AgentTranscriptUnreadable(f"the answers of agent {agent_id!r}: {error}") from error
        if row is not None and is_whole and (row.unsaved or agent_id in self.unsaved):
            self._is_saved(agent_id)  # the disk failed after its version was written
        return known

    def _is_saved(self, agent_id: str) -> None:
        self.unsaved.discard(agent_id)
        try:
            change = partial(agent_table.set_unsaved, agent_id=agent_id, unsaved=False, now=time.time())
            self._database.commit(change)
        except (OSError, Damaged) as error:
            _log.error("agent %r: could not note that its last turn is saved: %s", agent_id, error)


def log_way_on(agent_id: str, error: Exception) -> None:
    """Damage is the operator's to mend: the producer is told of it, without the commands of this machine."""
    if isinstance(error, Damaged):
        _log.error("agent %r: %s", agent_id, with_way_on(error))

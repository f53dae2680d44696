"""Reads an agent's newest version and the answers to its jobs, and refuses it when a turn is missing. Loader and
finisher threads.
"""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from stoker_shared.errors import AgentTranscriptUnreadable, AgentVersionConflict
from stoker_worker.memory import agent_table, deliveries, turn_table
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.database_file import with_way_on
from stoker_worker.memory.locks import InFlight
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.unsaved import UnsavedTurns
from stoker_worker.ports import UNKNOWN_VERSION, AgentVersion, Delivery

_log = logging.getLogger(__name__)


class AgentReading:
    """
    Attributes:
        unsaved: the turns that are lost, and that the database has not heard of.
    """

    def __init__(self, parts: StoreParts, in_flight: InFlight) -> None:
        """Raises `OSError`."""
        self.unsaved = UnsavedTurns(parts.path, parts.database, parts.files)
        self.unsaved.reserve()
        self._parts = parts
        self._database = parts.database
        self._in_flight = in_flight

    def open(self, agent_id: str) -> AgentVersion:
        """See `CacheStorePort.open_agent`."""
        self._in_flight.wait_for(agent_id)
        try:
            with self._database.snapshot() as connection:
                state = agent_table.read_agent(connection, agent_id)
        except (Damaged, OSError) as error:
            log_way_on(agent_id, error)
            unknown = AgentVersion(agent_id, UNKNOWN_VERSION, None)
            raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {error}", usable=unknown) from error
        version = state.version
        if not version.number and (after := self._parts.replica.forgotten(agent_id).number):
            version = replace(version, number=after, begins_again=True)
        problem = "its last turn was not saved" if agent_id in self.unsaved else state.problem
        if problem is not None:
            raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {problem}", usable=version)
        return version

    def answer(self, agent_id: str, delivery: Delivery) -> Mapping[str, Any] | None:
        """See `CacheStorePort.answer`."""
        self._in_flight.wait_for(agent_id)
        key = deliveries.delivery_key(agent_id, delivery)
        try:
            with self._database.snapshot() as connection:
                row = agent_table.find_agent(connection, agent_id)
                known = None if row is None else deliveries.read_answer(connection, row.number, key)
                is_whole = row is not None and known is not None and turn_table.is_newest(connection, row, key)
            if row is None and (ended := self._parts.replica.forgotten(agent_id).ended.get(key)):
                known = deliveries.AnswerIn(ended.version)
            if isinstance(known, deliveries.AnswerIn):
                return self._answer_there(agent_id, known.version, key)
        except (Damaged, OSError) as error:
            log_way_on(agent_id, error)
            raise AgentTranscriptUnreadable(f"the answers of agent {agent_id!r}: {error}") from error
        if row is not None and is_whole and (row.unsaved or agent_id in self.unsaved):
            self._is_saved(agent_id)  # the disk failed after its version was written
        return known

    def _answer_there(self, agent_id: str, version: int, key: bytes) -> Mapping[str, Any]:
        """Raises `SharedStoreAway`, `Damaged`; `AgentVersionConflict`: the agent was forgotten since, or the version is
        too old. The job would bring back what is gone."""
        text = self._parts.replica.result_in(agent_id, version, key)
        if text is None:
            raise AgentVersionConflict(
                f"this delivery has made version {version} of agent {agent_id!r}, and its answer is not kept any more"
            )
        answer: Mapping[str, Any] = json.loads(text)
        return answer

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

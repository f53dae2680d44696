"""Carries out jobs about an agent's memory in the running worker: info, forget, fork, rollback. Finisher threads,
beside saves and restores of other agents.

The commands of the shell make the same changes; here the worker's own state (budget, RAM) follows them.
"""

from dataclasses import asdict, replace
from typing import Final

from stoker_shared.agents import AgentForgotten, AgentInfo, AgentRequest, AgentResult, read_agent_result
from stoker_shared.errors import AgentExists, AgentTranscriptUnreadable
from stoker_worker.memory import agent_table, deliveries
from stoker_worker.memory.agent_changes import Asked, forget_agent, fork_agent, naming, roll_back
from stoker_worker.memory.agent_reading import AgentReading
from stoker_worker.memory.eviction import DiskBudget
from stoker_worker.memory.locks import InFlight
from stoker_worker.memory.ram_cache import RamCache
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.summary import AgentSummary, versions_of
from stoker_worker.ports import AgentJobsPort, Delivery

_MOST_VERSIONS: Final = 100


class AgentJobs(AgentJobsPort):
    def __init__(
        self,
        parts: StoreParts,
        in_flight: InFlight,
        budget: DiskBudget,
        ram_cache: RamCache,
        agents: AgentReading,
        *,
        keep_versions: int,
    ) -> None:
        self._parts = parts
        self._in_flight = in_flight
        self._budget = budget
        self._ram_cache = ram_cache
        self._agents = agents
        self._unsaved = agents.unsaved
        self._keep_versions = keep_versions

    def answer(self, request: AgentRequest, delivery: Delivery) -> AgentResult | None:
        """See `AgentJobsPort.answer`.

        Raises:
            AgentTranscriptUnreadable, OSError: that cannot be known.
        """
        agent_id = request.changed_agent
        if request.action == "info":
            return None
        known = None
        if request.action == "forget":  # no agent is left that could have the answer
            key = deliveries.delivery_key(agent_id, delivery)
            with naming(agent_id), self._parts.database.snapshot() as connection:
                found = deliveries.read_answer(connection, deliveries.FORGETTER, key)
            known = None if isinstance(found, deliveries.AnswerIn) else found
        if known is None:
            known = self._agents.answer(agent_id, delivery)
        return None if known is None else read_agent_result(known)

    def run(self, request: AgentRequest, delivery: Delivery) -> AgentResult:
        """See `AgentJobsPort.run`: once for each delivery, if `answer` was called first.

        Raises:
            AgentNotFound, AgentExists, AgentVersionConflict, AgentTranscriptUnreadable, AgentBusy: it cannot be done,
                and nothing has changed.
            OSError: nothing has changed, or it is done and `answer` returns its result.
        """
        agent_id, asked = request.agent_id, Asked(delivery, request.expect_version, self._keep_versions)
        if request.action == "info":
            return self._info(agent_id, delivery)
        with self._in_flight.working_on(request.changed_agent), self._budget.holds.using(agent_id, ()):
            if request.action == "forget":
                return self._forget(agent_id, asked)
            if request.action == "fork":
                assert request.target is not None  # the request is valid
                result: AgentResult = self._fork(agent_id, request.target, asked)
            else:
                result = self._roll_back(agent_id, request.version, asked)
        self._budget.make_room()
        return result

    def _info(self, agent_id: str, delivery: Delivery) -> AgentInfo:
        with naming(agent_id), self._parts.database.snapshot() as connection:
            state = agent_table.read_agent(connection, agent_id)
            if state.row is None:
                return AgentInfo(job_id=delivery.job_id, agent_id=agent_id, exists=False)
            seen, versions = AgentSummary.of(connection, state), versions_of(connection, state.row)
        if agent_id in self._unsaved:
            seen = replace(seen, state="unsaved", problem="its last turn was not saved")
        kept = [asdict(version) for version in versions if version.can_return][-_MOST_VERSIONS:]
        fields = {"job_id": delivery.job_id, "exists": True, "own_bytes": seen.own_bytes, "versions": kept}
        return AgentInfo.model_validate(asdict(seen) | fields)  # it takes those that it has

    def _forget(self, agent_id: str, asked: Asked) -> AgentForgotten:
        def is_held(address: str) -> bool:
            return self._budget.holds.is_held(address, but_by=agent_id)

        try:
            return forget_agent(self._parts, agent_id, asked, is_held=is_held)
        finally:  # also if it is forgotten, and a file could not be removed
            self._ram_cache.drop(agent_id)
            self._unsaved.discard(agent_id)
            self._budget.saved(agent_id)

    def _fork(self, source: str, target: str, asked: Asked) -> AgentResult:
        if source in self._unsaved:
            raise AgentTranscriptUnreadable(f"the transcript of agent {source!r}: its last turn was not saved")
        if target in self._unsaved:
            raise AgentExists(f"there is an agent {target!r} already")
        with self._budget.holds.using(target, ()):
            forked = fork_agent(self._parts, source, target, asked)
        self._budget.saved(target)
        return forked

    def _roll_back(self, agent_id: str, version: int | None, asked: Asked) -> AgentResult:
        back = roll_back(self._parts, agent_id, version, asked)
        self._unsaved.discard(agent_id)
        self._ram_cache.renumber(agent_id, back.from_version, back.version)
        self._budget.saved(agent_id)
        return back

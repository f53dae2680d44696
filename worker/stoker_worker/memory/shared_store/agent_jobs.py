"""Jobs about an agent's memory where there is a shared store: what others have done comes in before, and what was done
here is written through after. Finisher threads.
"""

from functools import partial

from stoker_shared.agent_request import AgentRequest
from stoker_shared.agent_result import AgentResult
from stoker_shared.errors import AgentVersionConflict
from stoker_worker.memory.agent_changes import naming
from stoker_worker.memory.database import Database
from stoker_worker.memory.deliveries import FORGETTER, delivery_key, take_back
from stoker_worker.memory.shared_store.versions import SharedVersions
from stoker_worker.memory.shared_store.write_through import WriteThrough
from stoker_worker.ports import AgentJobsPort, Delivery


class SharedAgentJobs(AgentJobsPort):
    def __init__(
        self, local: AgentJobsPort, database: Database, versions: SharedVersions, write_through: WriteThrough
    ) -> None:
        self._local = local
        self._database = database
        self._versions = versions
        self._write_through = write_through

    def answer(self, request: AgentRequest, delivery: Delivery) -> AgentResult | None:
        self._look(request)
        return self._local.answer(request, delivery)

    def run(self, request: AgentRequest, delivery: Delivery) -> AgentResult:
        """Raises `AgentVersionConflict`, too: another worker has changed the agent at the same time."""
        self._look(request)
        result = self._local.run(request, delivery)
        if request.action != "info":
            try:
                self._versions.publish(request.changed_agent)
            except AgentVersionConflict:
                if request.action == "forget":  # the answers to other jobs went with their versions
                    key = delivery_key(request.changed_agent, delivery)
                    self._database.commit(partial(take_back, agent=FORGETTER, key=key))
                raise
            self._write_through.add(request.changed_agent)
        return result

    def _look(self, request: AgentRequest) -> None:
        for agent_id in {request.agent_id, request.changed_agent}:
            with naming(agent_id):
                self._versions.look(agent_id)

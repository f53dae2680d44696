"""The interface of jobs about an agent's memory. No I/O."""

from typing import Protocol

from stoker_shared.agents import AgentRequest, AgentResult
from stoker_worker.ports.agents import Delivery


class AgentJobsPort(Protocol):
    """Jobs about an agent's memory. Finisher threads; never two jobs of one agent at once."""

    def answer(self, request: AgentRequest, delivery: Delivery) -> AgentResult | None:
        """The answer of this delivery, if it has taken effect.

        Raises:
            AgentTranscriptUnreadable, AgentBusy, SharedStoreAway, OSError: that cannot be known.
        """
        ...

    def run(self, request: AgentRequest, delivery: Delivery) -> AgentResult:
        """Carry the job out, durably, in one step that remembers the delivery.

        Raises:
            AgentMemoryError: it cannot be done, and nothing has changed.
            VersionTaken: the same, because another worker has changed the agent at the same time.
            SharedStoreAway: it may have been done or not; `answer` tells later.
            OSError: nothing has changed, or it is done and `answer` returns its result.
        """
        ...

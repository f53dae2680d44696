"""What the end of a job changes in its agent's entry of `HOMES_KEY`. Pure, no I/O."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from stoker_shared.agent_request import AgentRequest
from stoker_shared.request import GenerationRequest
from stoker_worker.queue.waiting_job import Granted


class Keeping(NamedTuple):
    """An agent whose memory a job writes.

    Attributes:
        version: the newest version whose job had ended before.
        is_here: whether the entry already names this worker's store.
        forgets: whether the job removes the agent.
        came_from: the queues of the models that have been asked before, where the agent's later jobs wait for `job_id`.
    """

    agent_id: str
    version: int = 0
    is_here: bool = False
    forgets: bool = False
    came_from: tuple[str, ...] = ()
    job_id: str = ""

    @classmethod
    def of(
        cls, request: GenerationRequest | AgentRequest, granted: Granted, store: str, *, n_tried: int = 0
    ) -> Self | None:
        """
        Args:
            store: the name of this worker's store.
            n_tried: how many models of its route have been asked.
        """
        if isinstance(request, AgentRequest) and request.target is not None:
            return cls(request.target)
        if request.access != "write" or request.agent_id is None:
            return None
        is_here = granted.store == store
        if isinstance(request, AgentRequest):
            return cls(request.agent_id, granted.version, is_here, forgets=request.action == "forget")
        came_from = tuple(dict.fromkeys(step.queue for step in request.route[:n_tried]))
        return cls(request.agent_id, granted.version, is_here, came_from=came_from, job_id=granted.job_id)

    def unshared_version_after(self, result: Mapping[str, Any]) -> int:
        """The same at a worker without a shared store: a number that no shared store has; 0: none was noted before."""
        return max(self.version_after(result), self.version + (not self.is_here)) if self.version else 0

    def version_after(self, result: Mapping[str, Any]) -> int:
        """The newest version once the job has ended with this result (as JSON); 0: there is none.

        A turn that is answered and could not be saved uses up a number: a version that nobody has is missed by every
        worker, and `append` does not go on without that turn. So does the mark that the agent was forgotten. An answer
        that is given a second time is older than versions after it.
        """
        if self.forgets:
            return max(self.version, result["version"] + 1) if result.get("existed") else self.version
        if (cache := result.get("cache")) is not None and not cache["saved"]:
            return max(self.version, cache["agent_version"] or 0) + 1
        return max(self.version, (cache["agent_version"] if cache is not None else result.get("version")) or 0)

"""A job about an agent's memory, carried out: never twice, and in the order of the agent's jobs. Finaliser threads.

Owns the order: an answer given before, then the job's chances, then the change. The change itself is the store's.
"""

import logging
from collections.abc import Mapping
from typing import Any

from stoker_shared.agent_request import AgentRequest
from stoker_shared.errors import AgentVersionNotSaved, WorkerLostTooOften
from stoker_shared.wire import MAX_ATTEMPTS
from stoker_worker.ports import AgentJobsPort, ClaimedJob

log = logging.getLogger(__name__)


def carry_out(request: AgentRequest, job: ClaimedJob, store: AgentJobsPort) -> Mapping[str, Any]:
    """The result to post.

    Raises:
        AgentMemoryError: it cannot be done; `AgentVersionNotSaved` for what the disk did.
        WorkerLostTooOften: it was begun too often, and has not taken effect.
    """
    try:
        answer = store.answer(request, job.delivery)
        if answer is not None:
            log.info("job %s had taken effect already", job.job_id)
            return answer.model_dump(mode="json")
        if job.lost_alone >= MAX_ATTEMPTS:
            raise WorkerLostTooOften(f"alone in flight while {job.lost_alone} workers died")
        return store.run(request, job.delivery).model_dump(mode="json")
    except OSError as error:
        raise AgentVersionNotSaved(f"{type(error).__name__}: {error}") from error


def let_go(request: AgentRequest, job: ClaimedJob, store: AgentJobsPort) -> None:
    """The job's end is written. Nothing that fails here changes it."""
    try:
        store.ended(request, job.delivery)
    except OSError as error:
        log.warning("what job %s left in the store could not be removed: %s", job.job_id, error)

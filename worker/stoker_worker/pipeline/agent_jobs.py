"""Carries out a job about an agent's memory: never twice, and in the order of the agent's jobs. Finisher threads.

Owns the order of the steps: an earlier answer, then the limit on lost workers, then the change. The store changes.
"""

import logging
from collections.abc import Mapping
from typing import Any

from stoker_shared.agents import AgentRequest
from stoker_shared.errors import AgentVersionConflict, AgentVersionNotSaved, WorkerLostTooOften
from stoker_shared.wire import MAX_ATTEMPTS
from stoker_worker.ports import AgentJobsPort, ClaimedJob

log = logging.getLogger(__name__)


def carry_out(request: AgentRequest, job: ClaimedJob, store: AgentJobsPort) -> Mapping[str, Any]:
    """The result to post.

    Raises:
        AgentMemoryError: it cannot be done; `AgentVersionNotSaved` where the disk failed.
        WorkerLostTooOften: it was begun too often, and has not taken effect.
    """
    try:
        answer = store.answer(request, job.delivery)
        if answer is not None:
            log.info("job %s had taken effect already", job.job_id)
            return answer.model_dump(mode="json")
        if job.losses_alone >= MAX_ATTEMPTS:
            raise WorkerLostTooOften(f"alone in flight while {job.losses_alone} workers died")
        try:
            return store.run(request, job.delivery).model_dump(mode="json")
        except AgentVersionConflict:  # a worker that slept and was taken for dead can have carried it out
            if (answer := store.answer(request, job.delivery)) is None:
                raise
            return answer.model_dump(mode="json")
    except OSError as error:
        raise AgentVersionNotSaved(f"{type(error).__name__}: {error}") from error

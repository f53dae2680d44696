"""A turn that has been generated, made durable together with its result. Finaliser threads.

Owns what a save that fails means for the job: an `append` turn fails with it, any other is answered all the same.
"""

import logging
from collections.abc import Mapping
from typing import Any

from stoker_shared.errors import AgentVersionConflict, AgentVersionNotSaved
from stoker_worker.cache_spec import BLOCK_TOKENS
from stoker_worker.conversation import next_transcript
from stoker_worker.loader import Prepared
from stoker_worker.ports import CacheStorePort, Completion, LoadedModel, Turn
from stoker_worker.results import build_result, cache_report

log = logging.getLogger(__name__)


def save_turn(
    prepared: Prepared, completion: Completion, store: CacheStorePort, model: LoadedModel
) -> Mapping[str, Any]:
    """The result to post.

    Raises:
        AgentVersionNotSaved: an `append` turn could not be saved.
        AgentVersionConflict: nor where another job has made the agent meanwhile.
    """
    job, agent, request = prepared.job, prepared.agent, prepared.work.request

    def result(version: int | None, saved: bool, save_error: str | None = None) -> Mapping[str, Any]:
        report = cache_report(prepared, completion, agent_version=version, saved=saved, save_error=save_error)
        return build_result(job, prepared, completion, model, report).model_dump(mode="json")

    if agent is None:
        _save_shared(prepared, completion, store, model)
        return result(None, saved=False)
    if request.cache != "readwrite":
        return result(agent.number or None, saved=False)
    turn = Turn(
        agent_id=agent.agent_id,
        parent=agent.number,
        delivery=job.delivery,
        transcript=next_transcript(prepared.prompt, completion, model),
        model=model,
        cache_salt=prepared.salt,
        cache=completion.cache,
        result_of=lambda version: result(version, saved=True),
    )
    try:
        _, saved_result = store.save(turn)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        log.error("agent version of job %s not saved: %s", job.job_id, reason)
        if request.context == "append":
            raise error if isinstance(error, AgentVersionConflict) else AgentVersionNotSaved(reason) from error
        if not isinstance(error, AgentVersionConflict):  # then a newer version is there, and sound
            store.mark_unsaved(agent.agent_id)
        return result(agent.number or None, saved=False, save_error=reason)
    return saved_result


def _save_shared(prepared: Prepared, completion: Completion, store: CacheStorePort, model: LoadedModel) -> None:
    """Save the beginning that other jobs without an agent have too. Its loss costs them time only."""
    cache, n_shared = completion.cache, prepared.restored.shared_blocks * BLOCK_TOKENS
    if cache is None or not cache.start < n_shared <= cache.stop:
        return
    try:
        store.save_blocks(prepared.prompt.ids[:n_shared], cache, model=model, salt=prepared.salt)
    except Exception as error:
        log.warning("job %s: its blocks are not saved: %s: %s", prepared.job.job_id, type(error).__name__, error)

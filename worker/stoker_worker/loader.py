"""The loader thread: from a claimed job to work the engine can start on.

Owns reading agent memory and turning requests into tokens. Touches neither Redis nor MLX.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

from stoker_shared.errors import AgentTranscriptUnreadable, ModelMismatch, WorkerLostTooOften
from stoker_shared.request import GenerationRequest
from stoker_shared.wire import MAX_ATTEMPTS
from stoker_worker.cache_spec import BLOCK_TOKENS
from stoker_worker.conversation import Prompt, build_prompt
from stoker_worker.ports import (
    AgentVersion,
    CacheStorePort,
    ClaimedJob,
    Completion,
    GenerationWork,
    LoadedModel,
    Restored,
)

log = logging.getLogger(__name__)

_NOT_USED = Restored(prefix=None, source="none")


@dataclass(frozen=True)
class Prepared:
    """A job ready for the engine.

    Attributes:
        agent: ``None`` for a job that uses no agent's memory.
        salt: what its cached blocks are addressed with.
        submitted_at: Unix time.
        has_next: whether the loader had its next job already.
    """

    job: ClaimedJob
    agent: AgentVersion | None
    prompt: Prompt
    restored: Restored
    work: GenerationWork
    salt: str | None
    submitted_at: float
    has_next: bool = False

    def without_arrays(self) -> "Prepared":
        """The same without the restored cache: once the engine has its own copy, nobody else needs one."""
        return replace(self, restored=replace(self.restored, prefix=None), work=replace(self.work, prefix=None))


@dataclass(frozen=True)
class Ended:
    """A job on its way to the finaliser. Exactly one of the last three is set, or the job's `cancel` says why."""

    job: ClaimedJob
    prepared: Prepared | None = None
    completion: Completion | None = None
    error: Exception | None = None
    answer: Mapping[str, Any] | None = None


class Loader(threading.Thread):
    """Takes claimed jobs in order, one at a time: reading ahead while the engine decodes."""

    def __init__(
        self,
        store: CacheStorePort,
        model: LoadedModel,
        *,
        to_engine: Callable[[Prepared], None],
        to_finaliser: Callable[[Ended], None],
        rows_run: Callable[[], bool],
        share_prefixes: bool = True,
    ) -> None:
        """
        Args:
            rows_run: whether the engine is at work.
            share_prefixes: whether agents of one `cache_salt` use each other's blocks.
        """
        super().__init__(name="loader", daemon=True)
        self._store = store
        self._model = model
        self._codec = model.codec.fork()
        self._to_engine = to_engine
        self._to_finaliser = to_finaliser
        self._rows_run = rows_run
        self._share_prefixes = share_prefixes
        self._claimed: SimpleQueue[ClaimedJob | None] = SimpleQueue()

    def put(self, job: ClaimedJob) -> None:
        self._claimed.put(job)

    def finish(self) -> None:
        """Let the thread end after what it has been given."""
        self._claimed.put(None)

    def run(self) -> None:
        while (job := self._claimed.get()) is not None:
            if job.cancel.reason is not None:
                self._to_finaliser(Ended(job))
                continue
            try:
                prepared = self._prepare(job)
            except Exception as error:  # whatever a request or a damaged file does, it does to one job
                self._to_finaliser(Ended(job, error=error))
                continue
            if isinstance(prepared, Ended):
                self._to_finaliser(prepared)
            else:
                self._to_engine(prepared)

    def _prepare(self, job: ClaimedJob) -> Prepared | Ended:
        request, model = job.request, self._model
        if request.model is not None and request.model != model.name:
            raise ModelMismatch(f"the job asks for model {request.model!r}; this worker has loaded {model.name!r}")
        agent = self._agent(job)
        if agent is not None and (answer := agent.answer_to(job.delivery)) is not None:
            log.info("job %s answered from the agent's history, version %d", job.job_id, agent.number)
            return Ended(job, answer=answer)
        if job.lost_alone >= MAX_ATTEMPTS:
            # Asked only after the history: a turn that was saved by the last worker to die did happen.
            raise WorkerLostTooOften(f"alone in flight while {job.lost_alone} workers died")
        prompt = build_prompt(request, agent.transcript if agent else None, model, self._codec)
        restored, salt = _NOT_USED, self._salt(request)
        if request.cache != "off" and model.has_memory and (agent is not None or self._share_prefixes):
            restored = self._store.restore(
                prompt.ids, agent=agent, model=model, salt=salt, beside_others=self._rows_run()
            )
        work = GenerationWork(
            request=request,
            prompt_ids=prompt.ids,
            prefix=restored.prefix,
            save_from=restored.saved_blocks * BLOCK_TOKENS if _is_to_be_saved(request, restored) else None,
        )
        has_next = not self._claimed.empty()
        return Prepared(job, agent, prompt, restored, work, salt, time.time(), has_next)

    def _salt(self, request: GenerationRequest) -> str | None:
        if self._share_prefixes:
            return request.cache_salt
        return f"{request.agent_id}\n{request.cache_salt or ''}"  # an agent id holds no newline

    def _agent(self, job: ClaimedJob) -> AgentVersion | None:
        request = job.request
        if request.agent_id is None or request.cache == "off":
            return None
        try:
            return self._store.open_agent(request.agent_id)
        except AgentTranscriptUnreadable as error:
            usable: AgentVersion | None = error.usable
            if usable is None:
                raise
            # `full` brings the whole conversation along, so a damaged record costs it only time; and a turn that was
            # applied stays applied, whatever became of the record of another.
            if request.context == "append" and usable.answer_to(job.delivery) is None:
                raise
            log.warning("agent of job %s: %s", job.job_id, error)
            return usable


def _is_to_be_saved(request: GenerationRequest, restored: Restored) -> bool:
    """Of a job without an agent only what another one begins with too, and is not there yet."""
    if request.cache != "readwrite":
        return False
    return request.agent_id is not None or restored.shared_blocks > restored.saved_blocks

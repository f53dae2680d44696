"""The loader thread: reads a job's agent memory and tokenizes its request. Touches neither Redis nor the model."""

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final

from stoker_shared.agents import AgentRequest
from stoker_shared.check import make_ready
from stoker_shared.errors import (
    AgentTranscriptUnreadable,
    ModelMismatch,
    SharedStoreAway,
    StokerError,
    WorkerLostTooOften,
)
from stoker_shared.request import GenerationRequest
from stoker_shared.wire import MAX_ATTEMPTS
from stoker_worker.pipeline.engine_thread import EngineThread
from stoker_worker.pipeline.finisher import Finisher
from stoker_worker.pipeline.job import AgentChange, Failed, Finished, Job, Outcome, Replayed, RunsAgain, cut_short
from stoker_worker.pipeline.prompt import SystemPrompts, build_prompt, check_expectations, fitted, reusable_ids
from stoker_worker.ports import (
    NOT_COUNTED,
    AgentVersion,
    CacheStorePort,
    CompletedGeneration,
    LastVersion,
    LoadedModel,
    MetricsPort,
    TokenizerPort,
)
from stoker_worker.ports.model import NO_DEFAULTS, RequestDefaults

log = logging.getLogger(__name__)

_NO_ANSWER: Final = CompletedGeneration(uid=0, outcome="finished", ended_by="length")


class Loader(threading.Thread):
    """Loads claimed jobs in order, one at a time, while the engine decodes."""

    def __init__(
        self,
        store: CacheStorePort,
        loaded: Future[LoadedModel],
        engine: EngineThread,
        finisher: Finisher,
        *,
        share_prefixes: bool = True,
        metrics: MetricsPort = NOT_COUNTED,
        defaults: RequestDefaults = NO_DEFAULTS,
    ) -> None:
        """
        Args:
            loaded: the model; waited for when the thread starts.
            share_prefixes: whether agents with the same `cache_salt` use each other's blocks.
            defaults: for fields that a request does not set.
        """
        super().__init__(name="loader", daemon=True)
        self._store = store
        self._loaded = loaded
        self._engine = engine
        self._finisher = finisher
        self._share_prefixes = share_prefixes
        self._metrics = metrics
        self._defaults = defaults
        self._systems = SystemPrompts()
        self._claimed: SimpleQueue[Job | None] = SimpleQueue()

    def put(self, job: Job) -> None:
        self._claimed.put(job)

    def finish(self) -> None:
        """Let the thread end after the jobs that were put."""
        self._claimed.put(None)

    def run(self) -> None:
        model = self._loaded.result()
        tokenizer = model.tokenizer.fork()
        while (job := self._claimed.get()) is not None:
            if job.cancel.reason in ("withdrawn", "stopping"):
                self._finisher.put(job, cut_short(job))
                continue
            if isinstance(job.claimed.request, AgentRequest):
                self._finisher.put(job, AgentChange(job.claimed.request))
                continue
            try:
                outcome = self._load(job, model, tokenizer)
            except SharedStoreAway as error:
                self._finisher.put(job, RunsAgain(error))
                continue
            except BaseException as error:  # a bad request or a damaged file fails one job only
                self._finisher.put(job, Failed.by(error))
                continue
            if outcome is not None:
                self._finisher.put(job, outcome)
            else:
                job.has_next = not self._claimed.empty()
                self._engine.put(job)

    def _load(self, job: Job, model: LoadedModel, tokenizer: TokenizerPort) -> Outcome | None:
        """Prepare a job for the engine; returns its outcome if it does not need the engine."""
        unreadable, is_certain = self._look(job, job.claimed.last)
        try:
            return self._prepare(job, model, tokenizer, unreadable)
        except StokerError:
            if is_certain:
                raise
        unreadable, _ = self._look(job, None)  # the version may not have been the newest, so look before failing
        return self._prepare(job, model, tokenizer, unreadable)

    def _look(self, job: Job, last: LastVersion | None) -> tuple[AgentVersion | None, bool]:
        """Bring in what other workers have written of the job's agent. Returns the version that a `full` job may
        replace, if the newest one is unreadable; and whether the agent is certainly at its newest version here."""
        request = job.request
        if request.agent_id is None or request.cache == "off":
            return None, True
        try:
            return None, self._store.look(request.agent_id, last)
        except AgentTranscriptUnreadable as error:
            return self._usable(job, error), True

    def _prepare(
        self, job: Job, model: LoadedModel, tokenizer: TokenizerPort, unreadable: AgentVersion | None
    ) -> Outcome | None:
        """`unreadable`: as `_look` returned it. The history comes first: no job may fail whose turn is saved."""
        claimed = job.claimed
        if (answer := self._answer(job)) is not None:
            return Replayed(answer)
        if job.cancel.reason is not None:
            return cut_short(job)
        if claimed.model is not None and claimed.model != model.name:
            raise ModelMismatch(f"the job asks for model {claimed.model!r}; this worker has loaded {model.name!r}")
        job.filled_in = request = self._defaults.filled_in(job.request)
        job.agent = agent = unreadable or self._agent(job)
        if claimed.losses_alone >= MAX_ATTEMPTS:
            raise WorkerLostTooOften(f"alone in flight while {claimed.losses_alone} workers died")
        if agent is not None:
            check_expectations(request, agent)
        if request.check is not None:
            make_ready(request.check)
        job.prompt = build_prompt(request, agent.transcript if agent else None, model, tokenizer)
        if request.only_counts:
            job.further_choices = (_NO_ANSWER,) * (request.n - 1)
            return Finished(_NO_ANSWER)
        job.filled_in = request = fitted(request, len(job.prompt.ids), model)
        if model.guides is not None and request.is_guided:
            job.guide = model.guides.guide_for(request, job.prompt.ids)
        job.salt = self._salt(request)
        has_own = agent is not None or request.session is not None
        if request.cache != "off" and model.has_memory and (has_own or self._share_prefixes):
            job.shares = (job.salt,)
            self._restore(job, model, tokenizer)
        # A job without agent and session saves only a beginning that other jobs share and that is not saved yet.
        job.is_saved = request.cache == "readwrite" and (has_own or job.restored.to_share > 0)
        return None

    def _restore(self, job: Job, model: LoadedModel, tokenizer: TokenizerPort) -> None:
        request, reusable = job.request, reusable_ids(job.request, job.prompt)
        n_system = 0 if _goes_on(job, model) else self._systems.n_tokens(request, job.prompt, tokenizer)
        began = time.perf_counter()
        job.restored = self._store.restore(
            reusable,
            agent=job.agent,
            model=model,
            salt=job.salt,
            session=request.session,
            max_tokens=len(job.prompt.ids) - len(reusable) + request.max_tokens,
            is_saved=request.cache == "readwrite",
            beside_others=self._engine.is_busy(),
            system_tokens=n_system,
        )
        self._metrics.restored(time.perf_counter() - began, job.restored.source)

    def _salt(self, request: GenerationRequest) -> str | None:
        if self._share_prefixes:
            return request.cache_salt
        own = request.agent_id if request.session is None else f"\n{request.session}"  # an agent id holds no newline
        return f"{own}\n{request.cache_salt or ''}"

    def _answer(self, job: Job) -> Mapping[str, Any] | None:
        """The result of the turn that this delivery has made already; ``None``: it has made none.

        Raises:
            AgentTranscriptUnreadable: that is unknown, and an `append` job must not make its turn twice.
        """
        request = job.request
        if request.agent_id is None or request.cache == "off":
            return None
        try:
            return self._store.answer(request.agent_id, job.claimed.delivery)
        except AgentTranscriptUnreadable as error:
            if request.context == "append":
                raise
            log.warning("agent of job %s: %s", job.job_id, error)
            return None

    def _agent(self, job: Job) -> AgentVersion | None:
        request = job.request
        if request.agent_id is None or request.cache == "off":
            return None
        try:
            return self._store.open_agent(request.agent_id)
        except AgentTranscriptUnreadable as error:
            return self._usable(job, error)

    def _usable(self, job: Job, error: AgentTranscriptUnreadable) -> AgentVersion:
        """The version that a `full` job may replace: it carries the whole conversation, so a damaged version costs it
        only time. Raises `error` for any other job."""
        usable: AgentVersion | None = error.usable
        if usable is None or job.request.context == "append":
            raise error
        log.warning("agent of job %s: %s", job.job_id, error)
        return usable


def _goes_on(job: Job, model: LoadedModel) -> bool:
    """True if the prompt begins with all the cached tokens of its agent, the system prompt among them."""
    cache, stored = (job.agent.cache, job.agent.transcript) if job.agent and not job.agent.evicted else (None, None)
    if cache is None or stored is None or (cache.model, cache.salt) != (model.fingerprint, job.salt):
        return False
    return job.prompt.ids[: cache.tokens] == stored.token_ids[: cache.tokens]

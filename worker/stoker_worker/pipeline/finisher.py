"""The finisher threads: save the agent's version, then end the job. In that order, always.

They own the saves of turns and the end of each job. They never touch MLX: their arrays are evaluated. While Redis is
away they wait and try again, so a finished result is neither lost nor a failure. A job whose turn cannot be put into
the shared store waits aside, without a thread, and goes back to the queue after a while. There are a few threads,
because a disk may take seconds to sync one agent while the results of others are ready.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar, assert_never

from stoker_shared.agents import AgentRequest
from stoker_shared.errors import (
    AgentVersionConflict,
    AgentVersionNotSaved,
    JobLost,
    OwnershipLost,
    RedisUnavailable,
    SharedStoreAway,
    VersionTaken,
    WorkerLostTooOften,
)
from stoker_shared.wire import MAX_ATTEMPTS
from stoker_worker.events import Outage, log_answer, log_failure, log_job
from stoker_worker.pipeline.answer import Answer, build_result, cache_report, read_answers, with_total_until_now
from stoker_worker.pipeline.job import (
    AgentChange,
    Cancelled,
    Failed,
    Finished,
    GivenBack,
    Job,
    Outcome,
    Replayed,
    RunsAgain,
    cut_short,
)
from stoker_worker.pipeline.prompt import next_transcript
from stoker_worker.ports import (
    NOT_COUNTED,
    AgentVersion,
    CacheStorePort,
    ClaimedJob,
    CompletedGeneration,
    LoadedModel,
    MetricsPort,
    Turn,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS: Final = 4
_STORE_WAIT_S: Final = 30.0
"""How long a finished turn waits for the shared store before its job runs again."""
_LOOK_S: Final = 0.25


class Finisher:
    """Ends jobs in the order in which they were put, four at a time. No two of them write one agent."""

    def __init__(
        self,
        store: CacheStorePort,
        loaded: Future[LoadedModel],
        metrics: MetricsPort = NOT_COUNTED,
        *,
        outage: Outage | None = None,
        retry_s: float = 0.5,
    ) -> None:
        """`loaded`: the model, set before the first job is put. `retry_s`: pause between two tries without Redis."""
        names = (f"finisher-{n}" for n in range(1, _THREADS + 1))
        self.threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        self._leaving = itertools.count(1)
        self._store = store
        self._loaded = loaded
        self._metrics = metrics
        self._outage = outage or Outage("Redis")
        self._retry_s = retry_s
        self._abandoned = threading.Event()
        self._ended: SimpleQueue[tuple[Job, Outcome] | None] = SimpleQueue()
        self._to_give_back: list[tuple[Job, GivenBack]] = []
        self._waiting: deque[tuple[Job, Outcome]] = deque()  # for the shared store
        self._hurries = threading.Event()

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def put(self, job: Job, outcome: Outcome) -> None:
        self._ended.put((job, outcome))

    def finish(self) -> None:
        """Let the threads end after the jobs that were put; the last thread gives back the jobs that were cut short."""
        for _ in self.threads:
            self._ended.put(None)

    def is_alive(self) -> bool:
        """True if all threads live: one that died took a job with it."""
        return all(thread.is_alive() for thread in self.threads)

    def hurry(self) -> None:
        """Let no job wait for the shared store any more, because the worker stops. Any thread."""
        self._hurries.set()

    def abandon(self) -> None:
        """Wait no more for a Redis that is away: recovery puts back the jobs that are left. Any thread."""
        self._abandoned.set()

    def n_to_give_back(self) -> int:
        """How many jobs in flight only wait for `finish` to go back to the queue. Any thread."""
        return len(self._to_give_back)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            self._take(*item)
            del item  # its arrays go now, not when the next job ends
        if next(self._leaving) == len(self.threads):  # the others have ended their last jobs too
            self._hurries.set()
            while self._waiting:
                self._take(*self._waiting.popleft())
            self._give_back_all()

    def _next(self) -> tuple[Job, Outcome] | None:
        while True:
            with suppress(IndexError):  # nothing waits, or another thread has just taken it
                if not self._store.is_away() or not self._may_wait(self._waiting[0][0]):
                    return self._waiting.popleft()
            with suppress(Empty):
                return self._ended.get(timeout=_LOOK_S)

    def _take(self, job: Job, outcome: Outcome) -> None:
        if isinstance(outcome, AgentChange) and job.cancel.reason is not None:
            outcome = cut_short(job)
        if isinstance(outcome, GivenBack):
            self._to_give_back.append((job, outcome))
            return
        try:
            if not self._is_ended(job, outcome):
                self._waiting.append((job, outcome))
                return
        except OwnershipLost as error:
            if isinstance(error, JobLost):
                log_job("lost", job.job_id, logging.WARNING, agent=job.claimed.request.agent_id, reason=str(error))
            else:
                log_job("dropped", job.job_id, logging.WARNING)
            self._metrics.ended("dropped")
            try:
                job.claimed.drop()
            except Exception as failure:  # what is left of it expires by itself, or is recovered
                log.warning("job %s: nothing could be cleaned up (%s)", job.job_id, type(failure).__name__)
        except RedisUnavailable as error:  # only after `abandon`: a stop fails no job
            log.warning("job %s is left to recovery: %s", job.job_id, error)
        except Exception as error:
            log.exception("job %s could not be ended as it should", job.job_id)
            self._fail_at_last(job, error)
        job.claimed.release()

    def _is_ended(self, job: Job, outcome: Finished | Failed | Cancelled | Replayed | RunsAgain | AgentChange) -> bool:
        """End a job; ``False`` if its turn waits for the shared store."""
        try:
            self._end(job, outcome)
        except SharedStoreAway as error:
            if self._may_wait(job):
                return False
            self._run_again(job, error)
        except VersionTaken as error:
            self._run_again(job, error)
        return True

    def _end(self, job: Job, outcome: Finished | Failed | Cancelled | Replayed | RunsAgain | AgentChange) -> None:
        match outcome:
            case Finished(completion):
                self._finish(job, completion)
            case Replayed(answer):
                self._once_redis_answers(partial(job.claimed.finish, answer))
                self._metrics.answered(answer, replayed=True)
                log_answer("replayed", job.job_id, answer, agent=job.request.agent_id)
                self._forget_delivery(job)
            case AgentChange(request):
                self._change_agent(job, request)
            case Failed(error, partial_text):
                self._fail(job, error, partial_text)
            case RunsAgain(why):
                self._run_again(job, why)
            case Cancelled():
                self._close_number(job)
                self._once_redis_answers(job.claimed.stop)
                self._metrics.ended("withdrawn")
                log_job("cancelled", job.job_id)
            case _:
                assert_never(outcome)

    def _finish(self, job: Job, completion: CompletedGeneration) -> None:
        model = self._loaded.result()
        answers = read_answers(job, completion, model)
        if job.claimed.memory_use.access == "write":
            self._begin_save(job)
        try:
            saved = self._save_turn(job, completion, answers, model)
        except AgentVersionNotSaved as error:
            if job.waits_since is None:
                self._fail(job, error)
            else:  # an earlier try may have been sent: the next run finds out
                self._run_again(job, error)
            return
        result = with_total_until_now(saved, job)
        if not self._once_redis_answers(partial(job.claimed.finish, result)):
            self._metrics.escalated(len(job.prompt.ids) - completion.cached_tokens)
            return
        self._metrics.answered(result, save_s=result["timing"]["total_s"] - saved["timing"]["total_s"])
        if result["cache"]["saved"]:
            self._forget_delivery(job)
        log_answer("finished", job.job_id, result, agent=job.request.agent_id)

    def _save_turn(
        self, job: Job, completion: CompletedGeneration, answers: Sequence[Answer], model: LoadedModel
    ) -> Mapping[str, Any]:
        """Save the turn; returns the result as JSON. If the save of a `full` turn fails, it is noted that the turn is
        missing, and the result has the reason.

        Raises:
            AgentVersionNotSaved: an `append` turn, or one that waited for the shared store, could not be saved; or of
                another one, it could not be noted that it is missing.
            VersionTaken: another worker, or a command of the shell, has changed the agent meanwhile.
            SharedStoreAway: it may be saved or not.
        """
        agent, request = job.agent, job.request

        def result(version: int | None, saved: bool, save_error: str | None = None) -> Mapping[str, Any]:
            report = cache_report(job, completion, agent_version=version, saved=saved, save_error=save_error)
            return build_result(job, completion, answers, model, report).model_dump(mode="json")

        if agent is None:
            self._save_for_others(job, completion, model)
            return result(None, saved=False)
        if request.cache != "readwrite":
            return result(_number_of(agent), saved=False)
        turn = Turn(
            base=agent,
            delivery=job.claimed.delivery,
            transcript=next_transcript(job.prompt, completion, answers[0].message(), model),
            model=model,
            cache_salt=job.salt,
            cache=completion.cache,
            result=result(agent.number + 1, saved=True),
        )
        try:
            return self._store.save(turn)
        except AgentVersionConflict as error:
            raise VersionTaken(str(error)) from error
        except (VersionTaken, SharedStoreAway):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if request.context == "append" or job.waits_since is not None:
                raise AgentVersionNotSaved(reason) from error
            try:
                self._store.mark_unsaved(agent.agent_id)
            except OSError as not_noted:
                raise AgentVersionNotSaved(f"{reason}; and it cannot be noted: {not_noted}") from error
            return result(_number_of(agent), saved=False, save_error=reason)

    def _save_for_others(self, job: Job, completion: CompletedGeneration, model: LoadedModel) -> None:
        """Save the cache of a job without an agent: all of it for the session's next call, or the beginning that other
        jobs share. A failure costs only time."""
        cache, n_shared, session = completion.cache, job.restored.to_share, job.request.session
        if cache is None or (session is None and not 0 < n_shared <= cache.n_tokens):
            return
        ids = job.prompt.ids
        try:
            if session is None:
                self._store.save_blocks(ids[:n_shared], cache, model=model, salt=job.salt)
            else:
                token_ids = (*ids, *completion.generated_ids[: completion.kept])[: cache.n_tokens]
                self._store.save_session(session, token_ids, cache, prompt_tokens=len(ids), model=model, salt=job.salt)
        except Exception as error:
            log.info("job %s: its blocks are not saved: %s: %s", job.job_id, type(error).__name__, error)

    def _begin_save(self, job: Job) -> None:
        """Refuse to cancel the job from here on. If Redis is away and not waited for any more, the turn is saved all
        the same, and answered from the history later. No other worker can make the same version: this process has the
        store locked, and a shared store takes one of each number (docs/adr/0058-a-stop-while-redis-is-away.md)."""
        with suppress(RedisUnavailable):
            self._once_redis_answers(job.claimed.begin_save)

    def _change_agent(self, job: Job, request: AgentRequest) -> None:
        claimed = job.claimed
        self._once_redis_answers(claimed.begin_save)
        try:
            result = self._carry_out(request, claimed)
        except (SharedStoreAway, VersionTaken) as error:
            self._run_again(job, error)  # without waiting: nothing has to be computed anew
            return
        except Exception as error:  # a damaged file fails one job only
            self._fail(job, error)
            return
        self._once_redis_answers(partial(claimed.finish, result))
        self._metrics.ended("agent_job")
        self._forget_delivery(job)
        log_job("finished", job.job_id, agent=request.agent_id, action=request.action)

    def _carry_out(self, request: AgentRequest, job: ClaimedJob) -> Mapping[str, Any]:
        """Change an agent, unless this delivery has done so already; returns the result.

        Raises:
            AgentMemoryError: it cannot be done; `AgentVersionNotSaved` if the disk failed.
            WorkerLostTooOften: too many workers were lost with it, and it has not taken effect.
        """
        store = self._store.agent_jobs
        try:
            if (answer := store.answer(request, job.delivery)) is not None:
                log.info("job %s had taken effect already", job.job_id)
            elif job.losses_alone >= MAX_ATTEMPTS:
                raise WorkerLostTooOften(f"alone in flight while {job.losses_alone} workers died")
            else:
                try:
                    answer = store.run(request, job.delivery)
                except AgentVersionConflict:  # a worker that slept and was taken for dead can have carried it out
                    if (answer := store.answer(request, job.delivery)) is None:
                        raise
        except OSError as error:
            raise AgentVersionNotSaved(f"{type(error).__name__}: {error}") from error
        return answer.model_dump(mode="json")

    def _forget_delivery(self, job: Job) -> None:
        """Tell the store, once the end is recorded, that it may forget the replay answer when the job expires."""
        if (agent_id := job.changed_agent) is not None:
            self._store.ended(agent_id, job.claimed.delivery, remember_s=job.claimed.lives_s)

    def _fail(self, job: Job, error: Exception, partial_text: str | None = None) -> None:
        self._close_number(job)
        may_retry = not isinstance(error, WorkerLostTooOften)  # a retry counts the lost workers from zero again
        if not self._once_redis_answers(partial(job.claimed.fail, error, partial_text, may_retry=may_retry)):
            self._metrics.escalated(0)
            return
        log_failure(job.job_id, error, agent=job.claimed.request.agent_id)
        self._metrics.failed(error)

    def _close_number(self, job: Job) -> None:
        """Before a job ends without a turn: make sure that a turn which an earlier run has sent cannot arrive any more.
        Raises as `CacheStorePort.close_number` does."""
        if job.claimed.was_saving and (agent_id := job.changed_agent) is not None:
            self._store.close_number(agent_id)

    def _once_redis_answers(self, call: Callable[[], T]) -> T:
        """The value of `call`, which is repeated while Redis is away. Raises `RedisUnavailable` after `abandon`."""
        while True:
            try:
                return call()
            except RedisUnavailable as error:
                if self._abandoned.is_set():
                    raise
                self._outage.met(error)
                self._abandoned.wait(self._retry_s)

    def _may_wait(self, job: Job) -> bool:
        """True if a finished turn may still wait for the shared store, because to generate it again costs more."""
        now = time.monotonic()
        job.waits_since = job.waits_since or now
        is_stopping = self._hurries.is_set() or job.cancel.reason is not None
        return now - job.waits_since < _STORE_WAIT_S and not is_stopping

    def _run_again(self, job: Job, why: Exception) -> None:
        if self._once_redis_answers(partial(job.claimed.give_back, counts_as_attempt=False)):
            log_job("given back", job.job_id, agent=job.claimed.request.agent_id, reason=f"{type(why).__name__}: {why}")
            self._metrics.ended("given_back")

    def _fail_at_last(self, job: Job, error: Exception) -> None:
        try:
            job.claimed.fail(error, may_retry=False)
            self._metrics.failed(error)
        except Exception:
            log.exception("job %s could not be failed either: it has used up a try", job.job_id)
            try:
                job.claimed.give_back(counts_as_attempt=True, alone=True)
            except Exception:
                log.exception("job %s could not be given back; recovery takes it up", job.job_id)

    def _give_back_all(self) -> None:
        """Give back jobs that a stop cut short, as if never claimed, and those of a broken engine, as an attempt."""
        jobs = sorted(self._to_give_back, key=lambda entry: entry[0].claimed.claim_number, reverse=True)
        alone = sum(how.counts_as_attempt for _, how in jobs) == 1  # in the engine, when it broke
        given_back = 0
        for job, how in jobs:  # each goes to the very front, so the first one goes last
            try:
                if self._once_redis_answers(
                    partial(job.claimed.give_back, counts_as_attempt=how.counts_as_attempt, alone=alone)
                ):
                    given_back += 1
                    log_job("given back", job.job_id)
            except RedisUnavailable as error:  # only after `abandon`: the others would fail too
                log.warning("%s", error)
                break
            except Exception:
                log.exception("job %s could not be given back", job.job_id)
        for job, _ in jobs:
            job.claimed.release()
        if given_back:
            log.info("%d jobs given back", given_back)
            self._metrics.ended("given_back", given_back)
        if missing := len(jobs) - given_back:
            log.warning("%d jobs not given back: ended meanwhile, or left to the next worker", missing)


def _number_of(agent: AgentVersion) -> int | None:
    return agent.known_number if agent.known_number > 0 else None

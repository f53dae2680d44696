"""The finaliser: save the agent's version, then end the job. In that order, always.

Owns disk writes of agent memory and the last word on a job. Never touches MLX: bytes come to it already evaluated. When
Redis is away it waits and tries again: a finished result is not lost and does not turn into a failure. A few threads of
one kind, because a disk may take seconds for one agent's sync while the others' results are ready.
"""

import itertools
import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from stoker_shared.agent_request import AgentRequest
from stoker_shared.errors import (
    AgentVersionConflict,
    AgentVersionNotSaved,
    EngineFailed,
    GenerationTimedOut,
    OwnershipLost,
    WorkerLostTooOften,
)
from stoker_worker.agent_work import carry_out, let_go
from stoker_worker.loader import Ended, Prepared
from stoker_worker.outage import may_pass
from stoker_worker.ports import CacheStorePort, ClaimedJob, Completion, LoadedModel, QueuePort
from stoker_worker.turn_work import save_turn

log = logging.getLogger(__name__)

T = TypeVar("T")


class Finaliser:
    """Ends jobs in the order their sequences ended, `n_threads` at a time; never two of one agent (admission)."""

    def __init__(
        self,
        queue: QueuePort,
        store: CacheStorePort,
        model: LoadedModel,
        *,
        on_ended: Callable[[ClaimedJob], None],
        retry_s: float = 0.5,
        n_threads: int = 4,
    ) -> None:
        """
        Args:
            on_ended: called with a job once this worker has nothing more to do with it.
            retry_s: pause between two tries while Redis is away.
        """
        names = (f"finaliser-{n}" for n in range(1, n_threads + 1))
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        self._leaving = itertools.count(1)
        self._drops = itertools.count(1)
        self._queue = queue
        self._store = store
        self._model = model
        self._on_ended = on_ended
        self._retry_s = retry_s
        self._ended: SimpleQueue[Ended | None] = SimpleQueue()
        self._abandon = threading.Event()
        self._left: list[tuple[ClaimedJob, bool]] = []  # jobs to give back, and whether that counts as an attempt

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, ended: Ended) -> None:
        self._ended.put(ended)

    def finish(self) -> None:
        """Let the threads end after what they have been given; jobs cut short by the stop then go back to the queue."""
        for _ in self._threads:
            self._ended.put(None)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def is_alive(self) -> bool:
        """Whether all of it is: a thread that died took a job with it."""
        return all(thread.is_alive() for thread in self._threads)

    def abandon(self) -> None:
        """Stop waiting for a Redis that is away: the next worker recovers what is left."""
        self._abandon.set()

    def _run(self) -> None:
        while (ended := self._ended.get()) is not None:
            try:
                self._end(ended)
            except OwnershipLost as error:
                log.warning("result dropped, number %d of this worker: %s", next(self._drops), error)
                self._drop(ended.job)
            except Exception as error:
                if may_pass(error):  # only after `abandon`: a stop fails nothing, so the job is left as it stands
                    log.warning("job %s is left to recovery: Redis is away", ended.job.job_id)
                else:
                    log.exception("job %s could not be ended as it should", ended.job.job_id)
                    self._fail_at_last(ended.job, error)
            self._on_ended(ended.job)
        if next(self._leaving) == len(self._threads):  # the others have ended their last jobs too
            self._give_back()

    def _end(self, ended: Ended) -> None:
        job = ended.job
        if ended.answer is not None:
            answer = ended.answer
            self._when_redis_is_there(lambda: self._queue.finish(job, answer))
        elif ended.agent_request is not None and job.cancel.reason is None:
            self._carry_out(job, ended.agent_request)
        elif ended.completion is not None and ended.completion.outcome == "finished":
            assert ended.prepared is not None
            self._finish(ended.prepared, ended.completion)
        elif isinstance(ended.error, EngineFailed) and ended.completion is None:
            self._left.append((job, True))
        elif ended.error is not None or (ended.completion is not None and ended.completion.error is not None):
            error = ended.error or (ended.completion.error if ended.completion else None)
            self._fail(job, error or EngineFailed("unknown"))
        else:
            self._end_cancelled(job, ended.completion)

    def _end_cancelled(self, job: ClaimedJob, completion: Completion | None) -> None:
        if job.cancel.reason == "stopping":
            self._left.append((job, False))
        elif job.cancel.reason == "timed out":
            tokens = len(completion.generated_ids) if completion else 0
            error = GenerationTimedOut(f"the job's timeout passed after {tokens} generated tokens")
            self._fail(job, error, partial_text=completion.text if completion else "")
        else:
            self._when_redis_is_there(lambda: self._queue.stopped(job))
            log.info("job %s withdrawn", job.job_id)

    def _finish(self, prepared: Prepared, completion: Completion) -> None:
        job = prepared.job
        if not self._when_redis_is_there(lambda: self._queue.owns(job)):
            raise OwnershipLost(f"job {job.job_id} is no longer this worker's")
        try:
            result = save_turn(prepared, completion, self._store, self._model)
        except (AgentVersionNotSaved, AgentVersionConflict) as error:
            self._fail(job, error)
            return
        self._when_redis_is_there(lambda: self._queue.finish(job, result))
        usage = result["usage"]
        log.info(
            "job %s finished: %s, prompt %d, cached %d, generated %d, version %s",
            job.job_id,
            result["finish_reason"],
            usage["prompt_tokens"],
            usage["cached_tokens"],
            usage["completion_tokens"],
            result["cache"]["agent_version"],
        )

    def _carry_out(self, job: ClaimedJob, request: AgentRequest) -> None:
        if not self._when_redis_is_there(lambda: self._queue.owns(job)):
            raise OwnershipLost(f"job {job.job_id} is no longer this worker's")
        store = self._store.agent_jobs
        try:
            result = carry_out(request, job, store)
        except Exception as error:  # whatever a damaged file does, it does to one job
            self._fail(job, error)
            return
        self._when_redis_is_there(lambda: self._queue.finish(job, result))
        let_go(request, job, store)
        log.info("job %s finished: %s of agent %r", job.job_id, request.action, request.agent_id)

    def _fail(self, job: ClaimedJob, error: Exception, partial_text: str | None = None) -> None:
        log.warning("job %s failed: %s: %s", job.job_id, type(error).__name__, error)
        may_retry = not isinstance(error, WorkerLostTooOften)
        self._when_redis_is_there(lambda: self._queue.fail(job, error, partial_text, may_retry=may_retry))

    def _drop(self, job: ClaimedJob) -> None:
        try:
            self._queue.drop(job)
        except Exception as error:  # what is left of it expires by itself, or is recovered
            log.warning("job %s: nothing could be cleaned up (%s)", job.job_id, type(error).__name__)

    def _fail_at_last(self, job: ClaimedJob, error: Exception) -> None:
        try:
            self._queue.fail(job, error, may_retry=False)
        except Exception:
            log.exception("job %s could not be failed either: it has used up a try", job.job_id)
            self._give_back_now(job)

    def _give_back_now(self, job: ClaimedJob) -> None:
        try:
            self._queue.give_back([job], counts_as_attempt=True, alone=True)
        except Exception:
            log.exception("job %s could not be given back; recovery takes it up", job.job_id)

    def _give_back(self) -> None:
        """What the stop cut short goes back as if never claimed; what was in a broken engine has used up a try."""
        left = sorted(self._left, key=lambda entry: entry[0].claim_number, reverse=True)  # the first has to go last
        given_back = 0
        alone = sum(counts for _, counts in left) == 1  # in the engine, when it broke
        for job, counts in left:
            give_back = partial(self._queue.give_back, [job], counts_as_attempt=counts, alone=alone)
            try:
                given_back += self._when_redis_is_there(give_back)
            except Exception as error:
                if may_pass(error):  # only after `abandon`: no use in asking for each
                    log.warning("Redis is away (%s)", type(error).__name__)
                    break
                log.exception("job %s could not be given back", job.job_id)
        if given_back:
            log.info("%d jobs given back", given_back)
        if missing := len(left) - given_back:
            log.warning("%d jobs not given back: ended meanwhile, or left to whoever has the queue next", missing)

    def _when_redis_is_there(self, call: Callable[[], T]) -> T:
        while True:
            try:
                return call()
            except Exception as error:
                if not may_pass(error):
                    raise
                log.warning("Redis is away (%s); trying again", type(error).__name__)
                if self._abandon.wait(self._retry_s):
                    raise

"""Tickets: each waits for one job, streams its text, reads its state or cancels it.

A ticket owns a job's id and shares its producer's connection. The tickets of an `AsyncProducer` share a few connections
and one wait for all their results, for any number of tasks.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, NoReturn

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from stoker.canceling import cancel_job
from stoker.cascade.trust import give_feedback
from stoker.connection import blocking_slice_s
from stoker.job_record import JobRecord, queue_key
from stoker.operations import Operation, T, ask, run, run_async
from stoker.presence import unready
from stoker.streaming import StreamEvent, StreamReader
from stoker.waiting import Patience, Waiter, wait_for_end
from stoker_shared.errors import JobNotFound, RedisUnavailable
from stoker_shared.result import GenerationResult


@dataclass(frozen=True)
class TicketStatus:
    """A snapshot of one job.

    Attributes:
        state: RQ's own name: ``queued``, ``started``, ``finished``, ``failed``, ``canceled``, ``stopped``,
            ``deferred``, ``scheduled`` and rarer ones.
        position: number of jobs before it in its queue, 0 if it is next; ``None`` unless it waits there.
        worker: name of the worker that runs it; ``None`` unless it runs.
        stage: ``loading`` its agent's memory, ``waiting`` for a place in the batch, ``prefill`` or ``decode``. Like
            `tokens` and `tokens_per_s`, it is about a second old, and ``None`` unless the job runs.
        tokens: tokens generated so far.
        tokens_per_s: mean rate since the first token.
        warning: why no job of its queue can begin now: no worker listens to it, or its workers still load their model
            or are suspended. ``None`` unless the job waits there.
    """

    state: str
    position: int | None = None
    worker: str | None = None
    stage: str | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    warning: str | None = None


def status_of(job_id: str) -> Operation[TicketStatus]:
    """Raises `JobNotFound`: the job does not exist (any more)."""
    record = yield from JobRecord.read(job_id)
    if not record.state:
        raise JobNotFound(job_id)
    if record.state == "queued":
        # The position is ``None`` in the moment between a worker's claim and the job's start.
        position = yield from ask("LPOS", queue_key(record.queue), job_id)
        warning = yield from unready(record.queue)
        return TicketStatus("queued", position=position if isinstance(position, int) else None, warning=warning)
    if record.state == "started":
        progress = asdict(record.progress) if record.progress else {}
        return TicketStatus("started", worker=record.worker, **progress)
    return TicketStatus(record.state)


class AnyTicket:
    """The part that both kinds share. `_ended` is the job's end, once a wait for many tickets has found it;
    `_was_awaited`: there was such a wait."""

    def __init__(self, job_id: str, *, is_new: bool) -> None:
        """Raises `ValueError`: `job_id` is empty or has characters that no job id has. `is_new`: the job was enqueued
        just now, under a generated id."""
        if not job_id or not job_id.isprintable():
            raise ValueError("a job id is a non-empty printable string")
        self._job_id = job_id
        self._is_new = is_new
        self._was_awaited = False
        self._ended: JobRecord | None = None

    @property
    def job_id(self) -> str:
        return self._job_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._job_id!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ticket holds a connection and cannot be pickled; send its job_id, and call a producer's `ticket` there"
        )


class Ticket(AnyTicket):
    """One job by its id, from any producer. Cheap to make; safe to use from any thread, and in a forked child.

    It cannot be pickled: send its `job_id`, and call `Producer.ticket` there. Every method raises `RedisUnavailable` if
    no server answers or it refuses the client.
    """

    def __init__(self, connection: Redis, job_id: str, *, is_new: bool = False) -> None:
        super().__init__(job_id, is_new=is_new)
        self._connection = connection

    def result(self, timeout_s: float | None = None) -> GenerationResult:
        """Wait for the job's end and return its result.

        The wait endures a lost connection until `timeout_s` (for a minute if that is ``None``). For many jobs,
        `Producer.results` and `Producer.as_completed` send far fewer commands; a ticket that they return has its job's
        end already.

        Args:
            timeout_s: how long to wait, in seconds; ``None`` for no limit, 0 to check once. The job continues
                regardless.

        Raises:
            JobFailed: the worker failed it; the error has the reason, and the text so far if the job timed out.
            JobCanceled: it was canceled, or stopped by RQ's command.
            JobNotFound: no such job, or its result has expired.
            ResultTimeout: it has not ended within `timeout_s`.
            RedisUnavailable: no server answers.
        """
        if self._ended is not None:
            return self._ended.outcome()
        slice_s = blocking_slice_s(self._connection)
        return run(self._connection, wait_for_end(self._job_id, timeout_s, slice_s, is_new=self._is_new)).outcome()

    def stream(self, timeout_s: float | None = None) -> Iterator[StreamEvent]:
        """The text as it is generated: first the text so far, then each new piece until the job has ended.

        The chunks since the last `Restarted` together are exactly `result().text`. A lost connection is endured, as by
        `result`.

        Args:
            timeout_s: how long to read in all, in seconds; ``None`` until the job ends.

        Raises:
            JobFailed, JobCanceled, JobNotFound, ResultTimeout, RedisUnavailable: as `result`, after the last event.
        """
        slice_s = blocking_slice_s(self._connection)
        reader = StreamReader(self._job_id, timeout_s, slice_s, was_answered=self._is_new)
        while not reader.is_over:
            yield from run(self._connection, reader.read())

    def status(self) -> TicketStatus:
        """The job's state, and its place in the queue or its progress.

        Raises:
            JobNotFound: no such job (any more).
            RedisUnavailable: no server answers.
        """
        return run(self._connection, status_of(self._job_id))

    def feedback(self, *, accepted: bool) -> bool:
        """Count a verdict on the answer, of a person or a program, once for a job. It replaces the verdict of the job's
        check, and with all others decides how far the model is trusted with such tasks.

        Returns:
            ``False`` if the opposite verdict was given before; that one stays.

        Raises:
            InvalidRequest: the job had no `task`, no `check`, and no `models` or `route`.
            JobFailed, JobCanceled, JobNotFound, ResultTimeout, RedisUnavailable: as `result`, without a wait.
        """
        return run(self._connection, give_feedback(self.result(timeout_s=0), accepted=accepted))

    def cancel(self) -> bool:
        """Cancel the job, whatever it is doing: waiting, running, failing, being retried or repeated.

        Returns:
            ``True`` if it was canceled: from now on `result` raises `JobCanceled`, and the job never runs again (its
            worker needs a moment to notice). ``False`` if it had ended, or if its agent's turn is being saved, so that
            it goes on to its result.

        Raises:
            JobNotFound: no such job (any more).
            RedisUnavailable: no server answers.
        """
        self._is_new = False  # its end may be there already, without an entry to wait for
        return run(self._connection, cancel_job(self._job_id))


_AT_A_TIME: Final = 16  # each operation uses a connection
_SLICE_S: Final = 0.2  # the longest delay before a job added during a blocking read is waited for
_SETTLED_AT_ONCE: Final = 50  # each end wakes a task, which then reads its result


class SharedConnection:
    """The connection of an `AsyncProducer` and its tickets; the producer owns and closes it."""

    def __init__(self, connection: AsyncRedis) -> None:
        self.connection = connection
        self._few = asyncio.Semaphore(_AT_A_TIME)
        self._waiter = Waiter()
        self._futures: dict[str, list[asyncio.Future[JobRecord]]] = defaultdict(list)
        self._wait: asyncio.Task[None] | None = None
        self._was_answered = False

    async def run(self, operation: Operation[T]) -> T:
        """As `run_async`; not for operations that block."""
        async with self._few:
            result = await run_async(self.connection, operation)
        self._was_answered = True
        return result

    async def end_of(self, job_id: str, timeout_s: float | None, *, is_new: bool) -> JobRecord:
        """The job's end. One wait serves all jobs of this producer.

        Raises:
            ResultTimeout: it has not ended within `timeout_s`.
            RedisUnavailable: no server answers, or the producer was closed meanwhile.
        """
        if timeout_s is None or timeout_s > 0:
            future: asyncio.Future[JobRecord] = asyncio.get_running_loop().create_future()
            self._futures[job_id].append(future)
            self._waiter.add(job_id, is_new=is_new)
            if self._wait is None or self._wait.done():
                self._begin_wait()
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        return await future
            finally:
                self._leave(job_id, future)
        return await self.run(wait_for_end(job_id, 0, 0, waited_s=timeout_s or 0.0))

    async def aclose(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.cancel()
            with suppress(asyncio.CancelledError):
                await wait
        self._fail_all(RedisUnavailable("the producer was closed during a wait for its results"))

    def _begin_wait(self) -> None:
        self._wait = asyncio.create_task(self._wait_for_all())
        self._wait.add_done_callback(self._when_wait_ends)

    def _when_wait_ends(self, wait: "asyncio.Task[None]") -> None:
        """Begin the wait again if a task still needs it: a program that ends cancels all tasks, this one too, but some
        of them may still wait for a result."""
        waited_for = (future for futures in self._futures.values() for future in futures)
        if wait is self._wait and not all(future.done() for future in waited_for):
            self._begin_wait()

    async def _wait_for_all(self) -> None:
        slice_s = min(_SLICE_S, blocking_slice_s(self.connection))
        patience = Patience(None, was_answered=self._was_answered)
        try:
            while len(self._waiter):
                ended = await run_async(self.connection, self._waiter.wait(patience, slice_s))
                left = iter(ended)
                try:
                    for count, end in enumerate(left):
                        self._settle(end)
                        if count % _SETTLED_AT_ONCE == _SETTLED_AT_ONCE - 1:
                            await asyncio.sleep(0)
                finally:  # if this task is canceled: the waiter does not know these jobs any more
                    for end in left:
                        self._settle(end)
        except Exception as error:
            self._fail_all(error)

    def _settle(self, end: JobRecord) -> None:
        for future in self._futures.pop(end.job_id, ()):
            if not future.done():
                future.set_result(end)

    def _leave(self, job_id: str, future: "asyncio.Future[JobRecord]") -> None:
        futures = self._futures.get(job_id, [])
        if future in futures:
            futures.remove(future)
        if not futures:
            self._futures.pop(job_id, None)
            self._waiter.discard(job_id)

    def _fail_all(self, error: Exception) -> None:
        futures, self._futures = self._futures, defaultdict(list)
        self._waiter = Waiter()
        for future in (future for of_job in futures.values() for future in of_job):
            if not future.done():
                future.set_exception(error)


class AsyncTicket(AnyTicket):
    """One job by its id, from any producer. For the tasks of one event loop.

    It cannot be pickled: send its `job_id`. Every method raises the errors of the same method of `Ticket`.
    """

    def __init__(self, shared: SharedConnection, job_id: str, *, is_new: bool = False) -> None:
        super().__init__(job_id, is_new=is_new)
        self._shared = shared

    async def result(self, timeout_s: float | None = None) -> GenerationResult:
        """As `Ticket.result`, but thousands of tasks can wait at the same time: they share one connection and one wait.

        The wait ends with `RedisUnavailable` once the server has been away for a minute, even if `timeout_s` is longer.
        """
        ended = self._ended or await self._shared.end_of(self._job_id, timeout_s, is_new=self._is_new)
        return ended.outcome()

    async def stream(self, timeout_s: float | None = None) -> AsyncGenerator[StreamEvent]:
        """As `Ticket.stream`."""
        connection = self._shared.connection
        reader = StreamReader(self._job_id, timeout_s, blocking_slice_s(connection), was_answered=self._is_new)
        while not reader.is_over:
            for event in await run_async(connection, reader.read()):
                yield event

    async def status(self) -> TicketStatus:
        """As `Ticket.status`."""
        return await self._shared.run(status_of(self._job_id))

    async def feedback(self, *, accepted: bool) -> bool:
        """As `Ticket.feedback`."""
        result = await self.result(timeout_s=0)
        return await self._shared.run(give_feedback(result, accepted=accepted))

    async def cancel(self) -> bool:
        """As `Ticket.cancel`."""
        self._is_new = False
        return await self._shared.run(cancel_job(self._job_id))

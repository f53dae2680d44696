"""The producers, which enqueue generation requests as RQ jobs: `Producer`, and `AsyncProducer` for asyncio. Both are
thin: they share operations, which do the work."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, overload

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from stoker.agents import Agents, AsyncAgents
from stoker.cascade.routing import Routing
from stoker.connection import AnyRedis, address, blocking_slice_s, open_async_connection, open_connection, usual_url
from stoker.new_job import checked_queue_name
from stoker.operations import Operation, Pause, ask, run, run_async
from stoker.overview import Overview, QueueStatus, overview, queues_now
from stoker.presence import Attendance, LiveWorker, live_workers, unattended
from stoker.submitting import ManyFields, SubmitFields, Submitted, submit, submit_many
from stoker.tickets import AnyTicket, AsyncTicket, SharedConnection, Ticket
from stoker.waiting import Patience, Waiter
from stoker_shared.errors import JobError, ResultTimeout
from stoker_shared.request import GenerationRequest
from stoker_shared.result import GenerationResult
from stoker_shared.wire import DEFAULT_QUEUE

TicketT = TypeVar("TicketT", bound=AnyTicket)


class Outstanding(Generic[TicketT]):
    """One wait for the jobs of many tickets; several tickets may have the same job. As a condition, it is true until
    `next` has returned all tickets.

    Args:
        timeout_s: how long to wait for all of them together, in seconds; ``None`` for no limit.
    """

    def __init__(self, tickets: Iterable[TicketT], timeout_s: float | None, connection: AnyRedis) -> None:
        self._waiter = Waiter()
        self._slice_s = blocking_slice_s(connection)
        self._ended: list[TicketT] = []
        self._by_job_id: dict[str, list[TicketT]] = defaultdict(list)
        waits = timeout_s is None or timeout_s > 0
        was_answered = False
        for ticket in tickets:
            was_answered |= ticket._is_new
            if ticket._ended is not None:
                self._ended.append(ticket)
            else:
                self._by_job_id[ticket.job_id].append(ticket)
                # A wait that looks once, or is repeated with short time limits, must find an end without an entry too.
                is_new = ticket._is_new and waits and not ticket._was_awaited
                self._waiter.add(ticket.job_id, is_new=is_new)
                ticket._was_awaited = True
        self._patience = Patience(timeout_s, was_answered=was_answered)

    def __bool__(self) -> bool:
        return bool(self._ended or self._by_job_id)

    def next(self) -> Operation[list[TicketT]]:
        """One or more tickets whose jobs have ended: first those whose jobs were known to have ended, then those of the
        next jobs to end. Each ticket keeps its job's end. Raises `ResultTimeout`: the time is over;
        `redis.exceptions.RedisError`: as `Patience.enduring`."""
        if self._ended:
            known, self._ended = self._ended, []
            return known
        yield Pause(0)
        ended = yield from self._waiter.wait(self._patience, self._slice_s)
        if not ended:
            job_id, others = next(iter(self._by_job_id)), len(self._by_job_id) - 1
            beside = f", nor have {others} others" if others else ""
            raise ResultTimeout(job_id, f"has not ended after {self._patience.timeout_s:g} s{beside}; they continue")
        tickets = []
        for end in ended:
            for ticket in self._by_job_id.pop(end.job_id, ()):
                ticket._ended = end
                tickets.append(ticket)
        return tickets


def outcomes_of(
    tickets: Iterable[AnyTicket], timeout_s: float | None, connection: AnyRedis, *, return_errors: bool
) -> Operation[list[Any]]:
    """As `Producer.results`."""
    wanted, late = list(tickets), "has not ended in time; it continues"
    outstanding, found = Outstanding(wanted, timeout_s, connection), dict[str, GenerationResult | JobError]()
    while outstanding:
        try:
            ended = yield from outstanding.next()
        except ResultTimeout:
            if not return_errors:
                raise
            break
        for ticket in ended:
            assert ticket._ended is not None
            try:
                found[ticket.job_id] = ticket._ended.outcome()
            except JobError as error:
                if not return_errors:
                    raise
                found[ticket.job_id] = error
    return [found.get(ticket.job_id) or ResultTimeout(ticket.job_id, late) for ticket in wanted]


class AnyProducer:
    """The part that both producers share."""

    def __init__(self, redis: object, open_: Callable[[Any], AnyRedis], queue: str) -> None:
        redis = usual_url() if redis is None else redis
        self._queue = checked_queue_name(queue)
        self._connection = open_(redis)
        self._url = redis if isinstance(redis, str) else None
        self._attendance = Attendance()
        self._routing = Routing(self._queue)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(redis at {address(self._connection)}, queue={self._queue!r})"

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        if self._url is None:
            raise TypeError(f"a {type(self).__name__} made from a connection cannot be pickled; make it from a URL")
        return partial(type(self), self._url, queue=self._queue), ()

    def _queue_for(self, name: str | None) -> str:
        return self._queue if name is None else checked_queue_name(name)

    def _submitted(self, queue: str | None, fields: Mapping[str, Any], job_id: str | None) -> Operation[Submitted]:
        done = yield from submit(self._queue_for(queue), self._routing, fields, job_id)
        yield from self._attendance.check(done.queue)
        return done

    def _many_submitted(
        self, queue: str | None, requests: Iterable[Any], options: Mapping[str, Any], job_ids: Sequence[str] | None
    ) -> Operation[list[Submitted]]:
        done = yield from submit_many(self._queue_for(queue), requests, self._routing, options, job_ids)
        for name in {one.queue for one in done}:
            yield from self._attendance.check(name)
        return done


class Producer(AnyProducer):
    """Enqueues generation jobs. Safe to use from any thread; share one per process.

    A forked child can continue to use it, because redis-py opens new connections there. It can be pickled if it was
    made from a URL; the pickle then contains the URL with its password.

    Nothing is sent before the first call. Every method that uses the server raises `RedisUnavailable` if no server
    answers or it refuses the client, and `WrongKeyType` if a key there has another type than stoker's; neither a
    message nor any repr contains the password.

    Attributes:
        agents: agents' memory and jobs: `info`, `forget`, `fork`, `rollback`, `jobs`.
    """

    _connection: Redis

    def __init__(self, redis: str | Redis | None = None, *, queue: str = DEFAULT_QUEUE) -> None:
        """
        Args:
            redis: a URL (``redis://``, ``rediss://``, ``unix://``), or a connection, which is used as it is and never
                closed. By default, the URL that the `stoker` command uses: ``$STOKER_REDIS_URL``, else that of this
                user's embedded server, else ``redis://127.0.0.1:6379``.
            queue: RQ queue of jobs that name none.

        Raises:
            InvalidRequest: no worker could listen to a queue of this name.
            ValueError: not a Redis URL, or a connection that decodes responses.
            TypeError: neither a string nor a connection.
        """
        super().__init__(redis, open_connection, queue)
        self.agents = Agents(self._connection, self._queue)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection if it was made from a URL; its tickets open it again when they are used."""
        if self._url is not None:
            self._connection.close()

    def ping(self) -> None:
        """Raises `RedisUnavailable`: no server answers, or it refuses the client."""
        run(self._connection, ask("PING"))

    def submit(self, *, queue: str | None = None, job_id: str | None = None, **fields: Unpack[SubmitFields]) -> Ticket:
        """Enqueue one generation job.

        A lost reply makes no second job. With a `job_id`, you can repeat the whole call: as long as Redis keeps the
        job, in any state, the same id, request and queue return its ticket.

        Args:
            queue: a queue other than the producer's own.
            job_id: letters, digits, ``-`` and ``_``; generated if not given.
            fields: the request's fields, as in `GenerationRequest`, and the job's options, as in `JobOptions`
                (`job_timeout_s`, `result_ttl_s`, `failure_ttl_s`, `ttl_s`: whole seconds; `at_front`, `retry`,
                `depends_on`, `allow_dependency_failures`, `stream`). `models`, `min_trust`: docs/cheaper-first.md.

        Raises:
            InvalidRequest: a field is missing, unknown, of the wrong type or out of range; the message names it.
            RequestTooLarge: the request is over ``MAX_REQUEST_BYTES``, or has more values or levels than a worker
                reads.
            NobodyServes: no live worker serves one of the `models`; nothing was enqueued.
            DuplicateJob: `job_id` names a job with another request or queue.
            JobNotFound: a job in `depends_on` does not exist (any more).
            RedisUnavailable: no server answers. Whether the job was enqueued is then unknown.
        """
        done = run(self._connection, self._submitted(queue, fields, job_id))
        return Ticket(self._connection, done.job_id, is_new=done.is_new)

    def submit_many(
        self,
        requests: Iterable[GenerationRequest | Mapping[str, Any]],
        *,
        queue: str | None = None,
        job_ids: Sequence[str] | None = None,
        **options: Unpack[ManyFields],
    ) -> list[Ticket]:
        """Enqueue many jobs, in chunks of up to a hundred; the tickets are in the order of `requests`.

        All requests of a sequence are validated before the first one is enqueued. Those of another iterable, such as a
        generator, are never all held at once; requests before an invalid one may then have been enqueued. A chunk is
        enqueued in one transaction for each queue: if the server goes away in the middle, only the earlier transactions
        have happened. With `job_ids`, you can repeat the call, which enqueues the missing jobs.

        Args:
            queue: a queue other than the producer's own.
            job_ids: one for each request, as `job_id` of `submit`; the requests are then all held at once.
            options: options of all jobs, those of `submit` without `at_front`.

        Raises:
            InvalidRequest, RequestTooLarge, RequestVersionTooNew: as for `submit`; the message has the request's index.
            NobodyServes: as for `submit`; earlier chunks of another iterable than a sequence have been enqueued.
            DuplicateJob, JobNotFound: as for `submit`; no job of the same chunk and queue was enqueued.
            RedisUnavailable: no server answers.
        """
        done = run(self._connection, self._many_submitted(queue, requests, options, job_ids))
        return [Ticket(self._connection, one.job_id, is_new=one.is_new) for one in done]

    def queues(self) -> list[QueueStatus]:
        """All queues that have had a job or that a worker listens to, sorted by name. Raises `RedisUnavailable`."""
        return run(self._connection, queues_now())

    def workers(self) -> list[LiveWorker]:
        """Stoker's live workers, sorted by name. A killed worker is listed until its lease runs out (after 4 s by
        default). Raises `RedisUnavailable`."""
        return run(self._connection, live_workers())

    def overview(self) -> Overview:
        """The queues with the time that is left, the workers, including dead ones, and the jobs that have run the
        longest. Raises `RedisUnavailable`."""
        return run(self._connection, overview())

    def unattended(self, queue: str | None = None) -> str | None:
        """A warning that no worker listens to a queue, with the queues that have one; ``None`` if a worker listens.

        A job may be enqueued before its queue has a worker, so `submit` only logs this warning, once for each queue.
        Raises `RedisUnavailable`: no server answers.

        Args:
            queue: a queue other than the producer's own.
        """
        return run(self._connection, unattended(self._queue_for(queue)))

    def ticket(self, job_id: str) -> Ticket:
        """The ticket of a job that was enqueued elsewhere. Sends nothing to the server.

        Raises:
            ValueError: `job_id` is empty or has characters that no job id has.
        """
        return Ticket(self._connection, job_id)

    def as_completed(self, tickets: Iterable[Ticket], timeout_s: float | None = None) -> Iterator[Ticket]:
        """The tickets, each as soon as its job has ended in any way; `Ticket.result` then needs no round trip.

        All jobs are waited for together, with one or two Redis commands for each. A cancel or a delete is noticed a
        second late, or a second for each 250 jobs; among more than a thousand jobs, this also holds for an end that is
        out of order.

        Args:
            tickets: of any queues of this producer's server; several may have the same job.
            timeout_s: limit for all of them together, in seconds; ``None`` for no limit, 0 to check once.

        Raises:
            ResultTimeout: some jobs have not ended by then; they continue.
            RedisUnavailable: no server answers. The wait endures an outage until `timeout_s`; without one, for a
                minute.
        """
        outstanding = Outstanding(tickets, timeout_s, self._connection)
        while outstanding:
            yield from run(self._connection, outstanding.next())

    @overload
    def results(
        self, tickets: Iterable[Ticket], timeout_s: float | None = None, *, return_errors: Literal[False] = False
    ) -> list[GenerationResult]: ...

    @overload
    def results(
        self, tickets: Iterable[Ticket], timeout_s: float | None = None, *, return_errors: bool
    ) -> list[GenerationResult | JobError]: ...

    def results(
        self, tickets: Iterable[Ticket], timeout_s: float | None = None, *, return_errors: bool = False
    ) -> list[GenerationResult] | list[GenerationResult | JobError]:
        """The results, in the order of `tickets`. All jobs are waited for together, as by `as_completed`.

        Args:
            tickets, timeout_s: as for `as_completed`.
            return_errors: return a job's error, also `ResultTimeout`, in place of its result. Otherwise the first error
                is raised, without waiting for the other jobs.

        Raises:
            JobFailed, JobCanceled, JobNotFound, ResultTimeout: as `Ticket.result`, unless `return_errors`.
            RedisUnavailable: as `as_completed`.
        """
        return run(self._connection, outcomes_of(tickets, timeout_s, self._connection, return_errors=return_errors))


class AsyncProducer(AnyProducer):
    """Enqueues generation jobs from the tasks of one event loop; share one per loop. Never use it across a fork.

    Any number of tasks share about twenty connections, and all tasks in `AsyncTicket.result` share one of them; each
    running `stream`, `as_completed`, `results` or call of `agents` takes one more. It can be pickled if it was made
    from a URL; the pickle then contains the URL with its password.

    Nothing is sent before the first call. Every method raises the errors of the same method of `Producer`.

    Attributes:
        agents: agents' memory and jobs: `info`, `forget`, `fork`, `rollback`, `jobs`.
    """

    _connection: AsyncRedis

    def __init__(self, redis: str | AsyncRedis | None = None, *, queue: str = DEFAULT_QUEUE) -> None:
        """
        Args:
            redis: as for `Producer`, but a connection of redis.asyncio.
            queue: RQ queue of jobs that name none.

        Raises:
            InvalidRequest, ValueError, TypeError: as `Producer`.
        """
        super().__init__(redis, open_async_connection, queue)
        self._shared = SharedConnection(self._connection)
        self.agents = AsyncAgents(self._shared.connection, self._queue)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End all waits for results, and close the connection if it was made from a URL."""
        await self._shared.aclose()
        if self._url is not None:
            await self._connection.aclose()

    async def ping(self) -> None:
        """As `Producer.ping`."""
        await self._shared.run(ask("PING"))

    async def submit(
        self, *, queue: str | None = None, job_id: str | None = None, **fields: Unpack[SubmitFields]
    ) -> AsyncTicket:
        """As `Producer.submit`."""
        done = await self._shared.run(self._submitted(queue, fields, job_id))
        return AsyncTicket(self._shared, done.job_id, is_new=done.is_new)

    async def submit_many(
        self,
        requests: Iterable[GenerationRequest | Mapping[str, Any]],
        *,
        queue: str | None = None,
        job_ids: Sequence[str] | None = None,
        **options: Unpack[ManyFields],
    ) -> list[AsyncTicket]:
        """As `Producer.submit_many`; other tasks run meanwhile."""
        done = await self._shared.run(self._many_submitted(queue, requests, options, job_ids))
        return [AsyncTicket(self._shared, one.job_id, is_new=one.is_new) for one in done]

    async def queues(self) -> list[QueueStatus]:
        """As `Producer.queues`."""
        return await self._shared.run(queues_now())

    async def workers(self) -> list[LiveWorker]:
        """As `Producer.workers`."""
        return await self._shared.run(live_workers())

    async def overview(self) -> Overview:
        """As `Producer.overview`."""
        return await self._shared.run(overview())

    async def unattended(self, queue: str | None = None) -> str | None:
        """As `Producer.unattended`."""
        return await self._shared.run(unattended(self._queue_for(queue)))

    def ticket(self, job_id: str) -> AsyncTicket:
        """As `Producer.ticket`."""
        return AsyncTicket(self._shared, job_id)

    async def as_completed(
        self, tickets: Iterable[AsyncTicket], timeout_s: float | None = None
    ) -> AsyncIterator[AsyncTicket]:
        """As `Producer.as_completed`: ``async for ticket in producer.as_completed(tickets)``."""
        outstanding = Outstanding(tickets, timeout_s, self._connection)
        while outstanding:
            for ticket in await run_async(self._connection, outstanding.next()):
                yield ticket

    @overload
    async def results(
        self, tickets: Iterable[AsyncTicket], timeout_s: float | None = None, *, return_errors: Literal[False] = False
    ) -> list[GenerationResult]: ...

    @overload
    async def results(
        self, tickets: Iterable[AsyncTicket], timeout_s: float | None = None, *, return_errors: bool
    ) -> list[GenerationResult | JobError]: ...

    async def results(
        self, tickets: Iterable[AsyncTicket], timeout_s: float | None = None, *, return_errors: bool = False
    ) -> list[GenerationResult] | list[GenerationResult | JobError]:
        """As `Producer.results`."""
        outcomes = outcomes_of(tickets, timeout_s, self._connection, return_errors=return_errors)
        return await run_async(self._connection, outcomes)

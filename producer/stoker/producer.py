"""The producer: enqueues generation requests as RQ jobs. Thin: the work is in operations, as for `AsyncProducer`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from redis import Redis

from stoker.connection import address, blocking_slice_s, open_connection
from stoker.driver import run
from stoker.job_options import JobOptions
from stoker.operations import ask
from stoker.outstanding import Outcomes, Outstanding
from stoker.patience import Patience
from stoker.queue_name import checked_queue_name
from stoker.submitting import ManyFields, SubmitFields, submit, submit_many
from stoker.ticket import Ticket
from stoker.ticket_status import TicketStatus
from stoker.waiting import wait_for_some
from stoker_shared.errors import JobError, ResultTimeout
from stoker_shared.request import GenerationRequest
from stoker_shared.result import GenerationResult
from stoker_shared.wire import DEFAULT_QUEUE


class Producer:
    """Enqueues generation jobs. Safe to use from any thread; share one per process.

    A forked child may go on using it: redis-py opens connections of its own there. It can be pickled if it was made
    from a URL; the pickle holds the URL with its password.

    Nothing is sent before the first call. Every method raises `RedisUnavailable` when no server answers at the URL or
    it refuses us; no message and no repr holds the password.
    """

    def __init__(self, redis: str | Redis, *, queue: str = DEFAULT_QUEUE) -> None:
        """
        Args:
            redis: a URL (``redis://``, ``rediss://``, ``unix://``), or a connection, used as it is and never closed.
            queue: RQ queue for jobs that name none.

        Raises:
            InvalidRequest: no worker could listen to a queue of this name.
            ValueError: not a Redis URL, or a connection that decodes responses.
        """
        self._queue = checked_queue_name(queue)
        self._connection = open_connection(redis)
        self._url = redis if isinstance(redis, str) else None

    def __repr__(self) -> str:
        return f"Producer(redis at {address(self._connection)}, queue={self._queue!r})"

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        if self._url is None:
            raise TypeError("a Producer with a connection of yours cannot be pickled; make it from a URL")
        return partial(type(self), self._url, queue=self._queue), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection if it was opened here from a URL; its tickets open it again when used."""
        if self._url is not None:
            self._connection.close()

    def ping(self) -> None:
        """
        Raises:
            RedisUnavailable: no server answers, or it refuses us.
        """
        run(self._connection, ask("PING"))

    def submit(self, *, queue: str | None = None, job_id: str | None = None, **fields: Unpack[SubmitFields]) -> Ticket:
        """Enqueue one generation job.

        A reply that is lost on the way makes no second job. With a `job_id` of the caller's the whole call may be
        made again: the same id, request and queue are the job that is there, in whatever state, as long as Redis
        keeps it.

        Args:
            queue: another queue than the producer's own.
            job_id: letters, digits, ``-`` and ``_``; made up where it is not given.
            fields: the request's fields, as in `GenerationRequest`, and how RQ keeps the job, as in `JobOptions`
                (`job_timeout_s`, `result_ttl_s`, `failure_ttl_s`, `ttl_s`: whole seconds; `at_front`, `retry`,
                `depends_on`, `allow_dependency_failures`).

        Raises:
            InvalidRequest: a field is missing, unknown, of the wrong type or out of range; the message names it.
            RequestTooLarge: over ``MAX_REQUEST_BYTES``.
            DuplicateJob: `job_id` names a job with another request or queue.
            JobNotFound: a job in `depends_on` is not there (any more).
            RedisUnavailable: no server answers. Whether the job was enqueued is then unknown.
        """
        name = self._queue_for(queue)
        submitted = run(self._connection, submit(name, fields, job_id))
        return Ticket(self._connection, submitted, queue_if_new=name if job_id is None else None)

    def submit_many(
        self,
        requests: Iterable[GenerationRequest | Mapping[str, Any]],
        *,
        queue: str | None = None,
        job_ids: Sequence[str] | None = None,
        **options: Unpack[ManyFields],
    ) -> list[Ticket]:
        """Enqueue many jobs, hundreds in one transaction; tickets come in the order of `requests`.

        Requests in a list are all validated before the first is enqueued. Those of another iterable, such as a
        generator, are taken as they come and never held all at once; those before a bad one may be enqueued then.
        Each chunk is one transaction: when the server goes away in the middle, earlier chunks are enqueued and later
        ones are not. With `job_ids` the same call may then be made again, and enqueues what is missing.

        Args:
            job_ids: one for each request, as `job_id` of `submit`; the requests are then held all at once.
            options: for all jobs: those of `submit`, without `at_front`.

        Raises:
            InvalidRequest, RequestTooLarge, RequestVersionTooNew: as for `submit`; the message says which request.
            DuplicateJob, JobNotFound: as for `submit`; nothing of the chunk it is in was enqueued.
            RedisUnavailable: no server answers.
        """
        name = self._queue_for(queue)
        submitted = run(self._connection, submit_many(name, requests, JobOptions(**options), job_ids))
        queue_if_new = name if job_ids is None else None
        return [Ticket(self._connection, job_id, queue_if_new=queue_if_new) for job_id in submitted]

    def ticket(self, job_id: str) -> Ticket:
        """The ticket of a job that was enqueued elsewhere; asks the server nothing.

        Raises:
            ValueError: `job_id` is empty or holds characters no job id has.
        """
        return Ticket(self._connection, job_id)

    def as_completed(self, tickets: Iterable[Ticket], timeout_s: float | None = None) -> Iterator[Ticket]:
        """The tickets, each as soon as its job has ended, however it ended; `Ticket.result` then asks nothing.

        All jobs are waited for together, at one or two Redis commands a job. Of more than a thousand, ends out of
        their order may be seen some seconds late; so may cancels and deletes.

        Args:
            tickets: of any queues of this producer's server; one job may have several.
            timeout_s: for all of them together; ``None`` for as long as it takes, 0 to look once.

        Raises:
            ResultTimeout: some have not ended by then; they go on.
            RedisUnavailable: no server answers; one that goes away is waited for until `timeout_s`, or for a minute.
        """
        outstanding = Outstanding(tickets)
        yield from outstanding.ended_before
        patience, slice_s = Patience(timeout_s), blocking_slice_s(self._connection)
        while outstanding:
            ended = run(self._connection, wait_for_some(outstanding.waiter, patience, slice_s))
            yield from outstanding.settle(ended, timeout_s)

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
            return_errors: put the error of a job that did not finish in its place, also `ResultTimeout`; without, the
                first one found is raised, without waiting for the other jobs.

        Raises:
            JobFailed, JobCanceled, JobNotFound, ResultTimeout: as `Ticket.result`, unless `return_errors`.
            RedisUnavailable: as `as_completed`.
        """
        wanted = list(tickets)
        outcomes = Outcomes(return_errors)
        try:
            for ticket in self.as_completed(wanted, timeout_s):
                outcomes.add(ticket)
        except ResultTimeout as error:
            outcomes.end_early(error)
        return outcomes.of(wanted)

    def result(self, job_id: str, timeout_s: float | None = None) -> GenerationResult:
        """`Ticket.result` by id."""
        return self.ticket(job_id).result(timeout_s)

    def status(self, job_id: str) -> TicketStatus:
        """`Ticket.status` by id."""
        return self.ticket(job_id).status()

    def cancel(self, job_id: str) -> bool:
        """`Ticket.cancel` by id."""
        return self.ticket(job_id).cancel()

    def _queue_for(self, name: str | None) -> str:
        return self._queue if name is None else checked_queue_name(name)

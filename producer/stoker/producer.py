"""The producer: enqueues generation requests as RQ jobs. Thin: the work is in operations, as for `AsyncProducer`."""

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from redis import Redis

from stoker.connection import address, open_connection
from stoker.driver import run
from stoker.job_options import JobOptions
from stoker.operations import ask
from stoker.queue_name import checked_queue_name
from stoker.submitting import ManyFields, SubmitFields, submit, submit_many
from stoker.ticket import Ticket
from stoker.ticket_status import TicketStatus
from stoker_shared.request import GenerationRequest
from stoker_shared.result import GenerationResult
from stoker_shared.wire import DEFAULT_QUEUE


class Producer:
    """Enqueues generation jobs. Safe to use from any thread; share one per process.

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
        self._owns_connection = isinstance(redis, str)

    def __repr__(self) -> str:
        return f"Producer(redis at {address(self._connection)}, queue={self._queue!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection if it was opened here from a URL; its tickets open it again when used."""
        if self._owns_connection:
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
        return self.ticket(run(self._connection, submit(self._queue_for(queue), fields, job_id)))

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
        operation = submit_many(self._queue_for(queue), requests, JobOptions(**options), job_ids)
        return [self.ticket(job_id) for job_id in run(self._connection, operation)]

    def ticket(self, job_id: str) -> Ticket:
        """The ticket of a job that was enqueued elsewhere; asks the server nothing.

        Raises:
            ValueError: `job_id` is empty or holds characters no job id has.
        """
        return Ticket(self._connection, job_id)

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

"""The producer: validates generation requests and enqueues them as RQ jobs. Owns the enqueueing, not the waiting."""

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from redis import Redis
from rq.queue import EnqueueData, Queue

from stoker.connection import address, open_connection, redis_errors
from stoker.enqueueing import chunks_of, enqueue, job_data, require_job_ids
from stoker.job_options import JobOptions
from stoker.ticket import Ticket
from stoker.ticket_status import TicketStatus
from stoker.wire_json import WireJson
from stoker_shared.errors import InvalidRequest, RequestError
from stoker_shared.request import GenerationRequest, Message, build_request
from stoker_shared.result import GenerationResult
from stoker_shared.wire import (
    DEFAULT_FAILURE_TTL_S,
    DEFAULT_JOB_TIMEOUT_S,
    DEFAULT_QUEUE,
    DEFAULT_RESULT_TTL_S,
)


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
        self._queue_name = _checked_queue_name(queue)
        self._connection = open_connection(redis)
        self._own_queue = self._opened(self._queue_name)
        self._owns_connection = isinstance(redis, str)

    def __repr__(self) -> str:
        return f"Producer(redis at {address(self._connection)}, queue={self._queue_name!r})"

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
        with redis_errors(self._connection):
            self._connection.ping()

    def submit(
        self,
        *,
        agent_id: str | None = None,
        prompt: str | None = None,
        messages: Sequence[Message | Mapping[str, Any]] | None = None,
        context: Literal["full", "append"] = "full",
        expect_version: int | None = None,
        must_exist: bool = False,
        cache: Literal["readwrite", "read", "off"] = "readwrite",
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        repetition_penalty: float | None = None,
        logprobs: bool = False,
        top_logprobs: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
        queue: str | None = None,
        job_timeout_s: int = DEFAULT_JOB_TIMEOUT_S,
        result_ttl_s: int = DEFAULT_RESULT_TTL_S,
        failure_ttl_s: int = DEFAULT_FAILURE_TTL_S,
        ttl_s: int | None = None,
        at_front: bool = False,
        job_id: str | None = None,
    ) -> Ticket:
        """Enqueue one generation job. The request's fields are those of `GenerationRequest`.

        A reply that is lost on the way makes no second job. With a `job_id` of the caller's the whole call may be
        made again: the same id, request and queue are the job that is there, in whatever state, as long as Redis
        keeps it.

        Args:
            queue: another queue than the producer's own.
            job_id: letters, digits, ``-`` and ``_``; made up where it is not given.
            job_timeout_s, result_ttl_s, failure_ttl_s, ttl_s, at_front: see `JobOptions`; whole seconds.

        Raises:
            InvalidRequest: a field is missing, of the wrong type or out of range; the message names it.
            RequestTooLarge: over ``MAX_REQUEST_BYTES``.
            JobIdTaken: `job_id` names a job with another request or queue.
            RedisUnavailable: no server answers. Whether the job was enqueued is then unknown.
        """
        options = JobOptions(job_timeout_s, result_ttl_s, failure_ttl_s, ttl_s, at_front)
        fields: dict[str, Any] = {
            "agent_id": agent_id,
            "prompt": prompt,
            "messages": _plain(messages),
            "context": context,
            "expect_version": expect_version,
            "must_exist": must_exist,
            "cache": cache,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "seed": seed,
            "stop": stop,
            "repetition_penalty": repetition_penalty,
            "logprobs": logprobs,
            "top_logprobs": top_logprobs,
            "tools": _plain(tools),
            "chat_template_kwargs": _plain(chat_template_kwargs),
            "cache_salt": cache_salt,
            "model": model,
            "metadata": _plain(metadata) or {},
        }
        payload = build_request(fields).as_payload()
        if job_id is not None:
            require_job_ids([job_id])
        return self._enqueue(self._queue(queue), [job_data(payload, options, job_id)], ids_are_new=job_id is None)[0]

    def submit_many(
        self,
        requests: Iterable[GenerationRequest | Mapping[str, Any]],
        *,
        queue: str | None = None,
        job_timeout_s: int = DEFAULT_JOB_TIMEOUT_S,
        result_ttl_s: int = DEFAULT_RESULT_TTL_S,
        failure_ttl_s: int = DEFAULT_FAILURE_TTL_S,
        ttl_s: int | None = None,
        job_ids: Sequence[str] | None = None,
    ) -> list[Ticket]:
        """Enqueue many jobs, hundreds in one transaction; tickets come in the order of `requests`.

        All requests are validated before the first is enqueued. Each chunk is one transaction: when the server goes
        away in the middle, earlier chunks are enqueued and later ones are not. With `job_ids` the same call may then
        be made again, and enqueues what is missing.

        Args:
            job_ids: one for each request, as `job_id` of `submit`.

        Raises:
            InvalidRequest, RequestTooLarge, RequestVersionTooNew: as for `submit`; the message says which request.
            JobIdTaken: as for `submit`; nothing of the chunk it is in was enqueued.
            RedisUnavailable: no server answers.
        """
        options = JobOptions(job_timeout_s, result_ttl_s, failure_ttl_s, ttl_s)
        rq_queue = self._queue(queue)
        payloads = [_checked_payload(index, request) for index, request in enumerate(requests)]
        ids: Sequence[str | None] = [None] * len(payloads) if job_ids is None else job_ids
        if job_ids is not None:
            require_job_ids(job_ids)
        if len(ids) != len(payloads):
            raise InvalidRequest(f"job_ids: {len(ids)} for {len(payloads)} requests")
        left = iter(ids)
        tickets: list[Ticket] = []
        for chunk in chunks_of(payloads):
            jobs = [job_data(payload, options, next(left)) for payload in chunk]
            tickets += self._enqueue(rq_queue, jobs, ids_are_new=job_ids is None)
        return tickets

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

    def _queue(self, name: str | None) -> Queue:
        return self._own_queue if name is None else self._opened(_checked_queue_name(name))

    def _opened(self, name: str) -> Queue:
        return Queue(name, connection=self._connection, serializer=WireJson)

    def _enqueue(self, queue: Queue, jobs: list[EnqueueData], *, ids_are_new: bool) -> list[Ticket]:
        with redis_errors(self._connection):
            enqueue(queue, jobs, ids_are_new=ids_are_new)
        return [Ticket(self._connection, str(job.job_id)) for job in jobs]


def _checked_payload(index: int, request: GenerationRequest | Mapping[str, Any]) -> dict[str, Any]:
    try:
        return (request if isinstance(request, GenerationRequest) else build_request(request)).as_payload()
    except RequestError as error:
        raise type(error)(f"request {index}: {error}") from None


def _plain(value: Any) -> Any:
    """Mappings and sequences as the dicts and lists that strict validation takes; anything else as it is."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _checked_queue_name(name: str) -> str:
    if not name or not name.isprintable() or "," in name or name != name.strip():
        raise InvalidRequest(
            "queue: a queue name is a non-empty printable string without commas and surrounding spaces"
        )
    return name

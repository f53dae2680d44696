"""A job's options in RQ: queue, place, times, retries and dependencies. Owns their validation; does no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from rq.job import Retry, validate_job_id

from stoker.any_ticket import AnyTicket
from stoker_shared.errors import InvalidRequest
from stoker_shared.wire import DEFAULT_FAILURE_TTL_S, DEFAULT_JOB_TIMEOUT_S, DEFAULT_RESULT_TTL_S

FOREVER = -1
_MOST_S = 10**10  # servers count in milliseconds from now, and cannot count further


DependsOn: TypeAlias = str | AnyTicket | Iterable[str | AnyTicket]


@dataclass(frozen=True)
class JobOptions:
    """Times are whole seconds; -1 means for ever, where it is allowed.

    Attributes:
        job_timeout_s: how long the job may run.
        result_ttl_s: how long its result is kept.
        failure_ttl_s: how long the job is kept if it failed.
        ttl_s: how long it may wait in the queue before it is dropped; ``None`` for no limit.
        at_front: put it before all waiting jobs; with `depends_on`, as soon as these have finished.
        retry: how often the job is tried again, at once, after it failed; or an `rq.Retry`, which can have intervals. A
            job that can never succeed is not tried again.
        depends_on: tickets or ids of jobs that have to finish first. Until then the job is in RQ's deferred registry;
            if one of them fails, is canceled or is deleted, it stays there.
        allow_dependency_failures: run the job even if one of them has failed.
        stream: let the worker publish the text from the first token on. Without it, the worker publishes the text from
            the first call of `Ticket.stream` on.

    Raises:
        InvalidRequest: RQ does not accept a value; the message names the option.
    """

    job_timeout_s: int = DEFAULT_JOB_TIMEOUT_S
    result_ttl_s: int = DEFAULT_RESULT_TTL_S
    failure_ttl_s: int = DEFAULT_FAILURE_TTL_S
    ttl_s: int | None = None
    at_front: bool = False
    retry: int | Retry | None = None
    depends_on: DependsOn = ()
    allow_dependency_failures: bool = False
    stream: bool = False
    dependency_ids: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("job_timeout_s", "result_ttl_s", "failure_ttl_s"):
            if getattr(self, name) != FOREVER:
                _require_seconds(name, getattr(self, name), " or -1 for ever")
        if self.ttl_s is not None:
            _require_seconds("ttl_s", self.ttl_s)
        object.__setattr__(self, "retry", _checked_retry(self.retry))
        object.__setattr__(self, "dependency_ids", _ids_of(self.depends_on))
        if self.allow_dependency_failures and not self.dependency_ids:
            raise InvalidRequest("allow_dependency_failures: needs depends_on")

    @property
    def rq_retry(self) -> Retry | None:
        return self.retry if isinstance(self.retry, Retry) else None


def require_job_id(name: str, job_id: object) -> str:
    """
    Raises:
        InvalidRequest: RQ does not allow such an id; the message begins with `name`.
    """
    try:
        validate_job_id(job_id)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"{name}: RQ allows letters of the English alphabet, digits, '-' and '_', at least one"
        ) from None
    return str(job_id)


def checked_queue_name(name: str) -> str:
    """
    Raises:
        InvalidRequest: no worker could listen to a queue of this name.
    """
    if not name or not name.isprintable() or "," in name or name != name.strip():
        raise InvalidRequest("queue: a queue name is a non-empty printable string without commas or surrounding spaces")
    return name


def _require_seconds(name: str, value: object, also: str = "") -> None:
    # RQ would accept a float or "1h" and cut it to whole seconds, and would delete a result with a ttl of 0 at once.
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_S:
        raise InvalidRequest(f"{name}: must be a whole number of seconds, from 1 to {_MOST_S}{also}")


def _checked_retry(retry: object) -> Retry | None:
    if retry is None or isinstance(retry, Retry):
        return retry
    if not isinstance(retry, int) or isinstance(retry, bool) or retry < 1:
        raise InvalidRequest("retry: must be a whole number, at least 1, or an rq.Retry")
    return Retry(max=retry)


def _ids_of(depends_on: DependsOn) -> tuple[str, ...]:
    jobs = [depends_on] if isinstance(depends_on, str | AnyTicket) else list(depends_on)
    ids = [job.job_id if isinstance(job, AnyTicket) else job for job in jobs]
    return tuple(dict.fromkeys(require_job_id("depends_on", job_id) for job_id in ids))

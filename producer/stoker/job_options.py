"""How RQ keeps a job: its queue place and times. Owns their validation; does no I/O."""

from dataclasses import dataclass

from stoker_shared.errors import InvalidRequest
from stoker_shared.wire import DEFAULT_FAILURE_TTL_S, DEFAULT_JOB_TIMEOUT_S, DEFAULT_RESULT_TTL_S

FOREVER = -1


@dataclass(frozen=True)
class JobOptions:
    """Whole seconds; -1 is for ever where it is allowed.

    Attributes:
        job_timeout_s: how long the job may run.
        result_ttl_s: how long its result is kept.
        failure_ttl_s: how long it is kept when it failed.
        ttl_s: how long it may wait in the queue before it is dropped; ``None`` for as long as it takes.

    Raises:
        InvalidRequest: one of them is not a whole number of seconds from 1 up; the message names it.
    """

    job_timeout_s: int = DEFAULT_JOB_TIMEOUT_S
    result_ttl_s: int = DEFAULT_RESULT_TTL_S
    failure_ttl_s: int = DEFAULT_FAILURE_TTL_S
    ttl_s: int | None = None
    at_front: bool = False

    def __post_init__(self) -> None:
        for name in ("job_timeout_s", "result_ttl_s", "failure_ttl_s"):
            if getattr(self, name) != FOREVER:
                _require_seconds(name, getattr(self, name), " or -1 for ever")
        if self.ttl_s is not None:
            _require_seconds("ttl_s", self.ttl_s)


def _require_seconds(name: str, value: object, also: str = "") -> None:
    # RQ would take a float or "1h" and cut it to whole seconds, and a result_ttl of 0 deletes the result at once.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"{name}: must be a whole number of seconds, at least 1{also}")

"""The common part of both producers' tickets: a job's id, and its end once it is known. No I/O."""

from typing import NoReturn

from stoker.job_record import Ended


class AnyTicket:
    """One job by its id. `_ended` is the job's end, once a wait for many tickets has found it."""

    def __init__(self, job_id: str, queue_if_new: str | None) -> None:
        if not job_id or not job_id.isprintable():
            raise ValueError("a job id is a non-empty printable string")
        self._job_id = job_id
        self._queue_if_new = queue_if_new
        self._ended: Ended | None = None

    @property
    def job_id(self) -> str:
        return self._job_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._job_id!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ticket holds a connection and cannot be pickled; send its job_id, and call a producer's `ticket` there"
        )

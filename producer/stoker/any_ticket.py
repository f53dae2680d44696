"""What the tickets of both producers are: the id of a job, and its end once that has been found. No I/O."""

from typing import NoReturn

from stoker.job_record import require_readable_id
from stoker.waiter import Ended


class AnyTicket:
    """One job by its id. `_ended` is its end, once it has been found by a wait for many tickets."""

    def __init__(self, job_id: str, queue_if_new: str | None) -> None:
        self._job_id = require_readable_id(job_id)
        self._queue_if_new = queue_if_new
        self._ended: Ended | None = None

    @property
    def job_id(self) -> str:
        return self._job_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._job_id!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ticket holds a connection and cannot be pickled; send its job_id, and call `ticket` of a producer there"
        )

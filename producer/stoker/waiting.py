"""Waits for the end of one job. Owns the clock and the lost connection; knows nothing about results.

The wait is cut into short blocking reads: a longer one would run into the socket timeout of the caller's connection,
and a cancel, a delete or an expiry writes nothing to the result stream that could wake it.
"""

import time

from rq.results import Result

from stoker.connection import LOST, REFUSED
from stoker.job_record import JobRecord
from stoker.operations import Operation, Pause, ask
from stoker_shared.errors import JobNotFound, ResultTimeout

GIVE_UP_S = 60.0
"""Seconds without a server after which a wait without a timeout ends."""

_PAUSE_S = 0.2


def wait_for_end(job_id: str, timeout_s: float | None, slice_s: float) -> Operation[JobRecord]:
    """
    Args:
        timeout_s: how long to wait; ``None`` for as long as it takes, 0 to look once.
        slice_s: longest blocking read, as `blocking_slice_s` of the connection.

    Raises:
        JobNotFound: there is no such job, or it went away meanwhile.
        ResultTimeout: it has not ended within `timeout_s`.
        redis.exceptions.RedisError: no server at the start, at the end, or for `GIVE_UP_S` of a wait without timeout.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    lost_at: float | None = None
    answered = False
    while True:
        try:
            record = yield from JobRecord.read(job_id)
            answered, lost_at = True, None
            if record is None:
                raise JobNotFound(job_id, "not found (it never was, was deleted, or has expired)")
            if record.has_ended:
                return record
            left_s = _left_s(deadline)
            if left_s <= 0:
                raise ResultTimeout(job_id, f"still {record.state} after {timeout_s:g} s; it goes on")
            yield from _block(record, min(slice_s, left_s))
        except REFUSED:
            raise
        except LOST:
            now = time.monotonic()
            lost_at = lost_at or now
            gives_up_at = lost_at + GIVE_UP_S if deadline is None else deadline
            if not answered or now >= gives_up_at:
                raise
            yield Pause(min(_PAUSE_S, gives_up_at - now))


def _left_s(deadline: float | None) -> float:
    return float("inf") if deadline is None else deadline - time.monotonic()


def _block(record: JobRecord, seconds: float) -> Operation[None]:
    """Sleep in the server until the job's next result entry or so many seconds have passed."""
    block_ms = max(1, int(1000 * seconds))  # 0 would block for ever
    key = Result.get_key(record.job_id)
    yield from ask("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", key, record.last_entry_id)

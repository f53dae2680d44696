"""Waits for ends, of one job or of many, through lost connections. Owns no jobs; reads no results.

The wait is cut into short blocking reads: a longer one would run into the socket timeout of the caller's connection,
and a cancel, a delete or an expiry writes nothing that could wake it.
"""

from stoker.connection import LOST, REFUSED
from stoker.job_record import JobRecord
from stoker.operations import Operation, Pause
from stoker.patience import Patience
from stoker.presence import unattended
from stoker.waiter import Ended, Waiter
from stoker_shared.errors import JobNotFound, ResultTimeout


def wait_for_end(
    job_id: str, timeout_s: float | None, slice_s: float, *, waited_s: float = 0.0
) -> Operation[JobRecord]:
    """
    Args:
        timeout_s: how long to wait; ``None`` for as long as it takes, 0 to look once.
        slice_s: longest blocking read, as `blocking_slice_s` of the connection.
        waited_s: how long the caller has waited before; for the error's words.

    Raises:
        JobNotFound: there is no such job, or it went away meanwhile.
        ResultTimeout: it has not ended within `timeout_s`.
        redis.exceptions.RedisError: no server at the start, at the end, or for `GIVE_UP_S` of a wait without timeout.
    """
    waiter = Waiter()
    waiter.add(job_id)
    ended = yield from wait_for_some(waiter, Patience(timeout_s), slice_s)
    record = ended[0].record if ended else (yield from JobRecord.read(job_id))
    if record is None:
        raise JobNotFound(job_id)
    if not record.has_ended:
        raise (yield from timed_out(record, waited_s + (timeout_s or 0.0)))
    return record


def timed_out(record: JobRecord, after_s: float) -> Operation[ResultTimeout]:
    """The error of a wait for a job that has not ended; tells when no worker listens to its queue."""
    warning = (yield from unattended(record.queue)) if record.state == "queued" else None
    still = f"still {record.state} after {after_s:g} s; it goes on"
    return ResultTimeout(record.job_id, f"{still}; {warning}" if warning else still)


def wait_for_some(waiter: Waiter, patience: Patience, slice_s: float) -> Operation[list[Ended]]:
    """The next jobs to end, one or more; empty when the patience has run out, or nothing is waited for.

    Raises:
        redis.exceptions.RedisError: as `wait_for_end`.
    """
    while True:
        try:
            ended = yield from waiter.look(max(0.0, min(slice_s, patience.left_s)))
            patience.was_answered()
            if ended or not len(waiter) or (patience.left_s <= 0 and not waiter.has_unseen):
                return ended
        except REFUSED:
            raise
        except LOST:
            pause_s = patience.pause_after_loss_s()
            if pause_s is None:
                raise
            yield Pause(pause_s)

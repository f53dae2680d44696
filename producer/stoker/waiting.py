"""Waits for the end of one job, and endures lost connections. Owns no jobs and no connection; `waiter` waits for many.

A wait consists of short blocking reads: a long one would reach the socket timeout of the caller's connection, and a
cancel, a delete or an expiry writes nothing that could end it.
"""

import time
from typing import Final

from rq.results import Result

from stoker.connection import LOST, REFUSED
from stoker.job_record import KEPT_RESULTS, NO_ENTRY, JobRecord
from stoker.operations import Command, Commands, Operation, Pause, T, stream_entries
from stoker.presence import unattended
from stoker_shared.errors import JobNotFound, ResultTimeout

GIVE_UP_S = 60.0
"""Seconds without a server after which a wait without a time limit ends."""

_PAUSE_S: Final = 0.2


class Patience:
    """How long one wait lasts, from when this is made: its time limit, and the outages of the server that it endures.

    Attributes:
        timeout_s: how long to wait, in seconds; ``None`` for no limit.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._lost_at: float | None = None
        self._was_answered = False

    @property
    def left_s(self) -> float:
        """Seconds until the time limit, infinite without one, 0 after it."""
        return float("inf") if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def enduring(self, operation: Operation[T]) -> Operation[T | None]:
        """The operation's result; ``None``, after a pause, if the connection was lost and the patience has not run out.

        Raises:
            redis.exceptions.RedisError: the patience has run out, or the server has never answered in this wait: its
                address is probably wrong.
        """
        try:
            result = yield from operation
        except REFUSED:
            raise
        except LOST:
            now = time.monotonic()
            self._lost_at = self._lost_at or now
            gives_up_at = self._lost_at + GIVE_UP_S if self._deadline is None else self._deadline
            if not self._was_answered or now >= gives_up_at:
                raise
            yield Pause(min(_PAUSE_S, gives_up_at - now))
            return None
        self._was_answered, self._lost_at = True, None
        return result


def wait_for_end(
    job_id: str, timeout_s: float | None, slice_s: float, *, waited_s: float = 0.0
) -> Operation[JobRecord]:
    """
    Args:
        timeout_s: how long to wait, in seconds; ``None`` for no limit, 0 to check once.
        slice_s: longest blocking read, as `blocking_slice_s` of the connection.
        waited_s: how long the caller has waited before, in seconds; for the error's message.

    Raises:
        JobNotFound: there is no such job (any more).
        ResultTimeout: it has not ended within `timeout_s`.
        redis.exceptions.RedisError: no server answered at the start, at the end of `timeout_s`, or for `GIVE_UP_S`
            during a wait without a limit.
    """
    patience, last_entry_id, block_s = Patience(timeout_s), NO_ENTRY, 0.0
    while True:
        record = yield from patience.enduring(_look(job_id, last_entry_id, block_s))
        if record is not None:  # else the connection was lost
            if record.has_ended:
                return record
            if patience.left_s <= 0:
                raise (yield from timed_out(record, waited_s + (timeout_s or 0.0)))
            last_entry_id = record.last_entry_id or last_entry_id
        block_s = min(slice_s, patience.left_s)


def _look(job_id: str, last_entry_id: str, block_s: float) -> Operation[JobRecord]:
    """The job as it is after `block_s` seconds, or as soon as its result stream has an entry after `last_entry_id`.

    Raises:
        JobNotFound: there is no such job (any more).
    """
    key = Result.get_key(job_id)
    reply, values = yield Commands([results_after({key: last_entry_id}, block_s), JobRecord.hash_command(job_id)])
    record = yield from JobRecord.whole(job_id, values, stream_entries(reply).get(key, [])[::-1])
    if record is None:
        raise JobNotFound(job_id)
    return record


def results_after(last_entry_ids: dict[str, str], block_s: float) -> Command:
    """The command that reads the next entries of these result streams, and waits for the first if there is none."""
    block = ("BLOCK", max(1, int(1000 * block_s))) if block_s > 0 else ()  # 0 would block for ever
    return ("XREAD", "COUNT", KEPT_RESULTS, *block, "STREAMS", *last_entry_ids, *last_entry_ids.values())


def timed_out(record: JobRecord, after_s: float) -> Operation[ResultTimeout]:
    """The error of a wait for a job that has not ended, with a warning if no worker listens to its queue."""
    warning = (yield from unattended(record.queue)) if record.state == "queued" else None
    still = f"still {record.state} after {after_s:g} s; it is not canceled"
    return ResultTimeout(record.job_id, f"{still}; {warning}" if warning else still)

"""Cancels the rest of a batch. Operations only.

One write does it: workers start no line of a batch that is canceled. The rest stops the lines that run, and takes those
that wait out of the queue at once.
"""

from typing import Final

from rq.job import Job

from stoker.batch.record import BatchRecord, forget, mark_canceled
from stoker.batch.sent_lines import SentLine, sent_lines, take_out
from stoker.canceling import cancel_job
from stoker.job_record import ENDED
from stoker.operations import Commands, Operation
from stoker_shared.errors import JobNotFound

_PAGE: Final = 500


def cancel_batch(record: BatchRecord, *, remove: bool) -> Operation[int]:
    """Cancel the batch; returns how many jobs were canceled here.

    Args:
        remove: also remove the answers and the batch from Redis.
    """
    yield from mark_canceled(record)
    after, n_canceled = 0, 0
    while lines := (yield from sent_lines(record.batch, after, _PAGE)):
        n_canceled += yield from _cancel(record.batch, lines)
        if remove:
            yield from take_out(record, dict.fromkeys(lines, False), "")
        after = lines[-1].number
    if remove:
        yield from forget(record.batch)
    return n_canceled


def _cancel(batch: str, lines: list[SentLine]) -> Operation[int]:
    jobs = [line.job_id(batch) for line in lines if line.custom_id is not None]
    if not jobs:
        return 0
    states = yield Commands([("HGET", Job.key_for(job_id), "status") for job_id in jobs])
    n_canceled = 0
    for job_id, state in zip(jobs, states, strict=True):
        if state is not None and state.decode(errors="replace") not in ENDED:
            try:
                n_canceled += yield from cancel_job(job_id)
            except JobNotFound:  # it has just expired, or was deleted
                continue
    return n_canceled

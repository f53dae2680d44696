"""The state of a batch, counted from Redis alone. Operations only."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rq.job import Job, JobStatus

from stoker.batch.record import BatchRecord
from stoker.batch.sent_lines import SentLine, sent_lines
from stoker.operations import Commands, Operation

_PAGE: Final = 500
_FAILED: Final = frozenset({JobStatus.FAILED.value, JobStatus.STOPPED.value, JobStatus.CANCELED.value})


@dataclass(frozen=True)
class BatchStatus:
    """The requests of a batch by state, each counted once.

    Attributes:
        not_sent: only in the input file so far.
        waiting, running: in Redis, not ended.
        done, failed: ended, whether they were taken out or not.
        to_fetch: ended and still in Redis.
    """

    not_sent: int
    waiting: int
    running: int
    done: int
    failed: int
    to_fetch: int

    @property
    def state(self) -> str:
        if self.not_sent + self.waiting + self.running:
            return "running" if self.running or self.done or self.failed else "waiting"
        return "ended" if self.to_fetch else "fetched"


def status_of(record: BatchRecord) -> Operation[BatchStatus]:
    """Count the requests, with one command for each job in Redis."""
    counts: Counter[str] = Counter()
    after, n_there = 0, 0
    while lines := (yield from sent_lines(record.batch, after, _PAGE)):
        counts.update((yield from _states(record.batch, lines)))
        after, n_there = lines[-1].number, n_there + len(lines)
    failed, ended = counts["failed"], counts["failed"] + counts["done"]
    n_gone = max(0, record.n_sent - n_there)  # lines that an earlier start found in its output file count as done
    return BatchStatus(
        not_sent=max(0, record.n_requests - record.n_sent),
        waiting=counts["waiting"],
        running=counts["running"],
        done=max(0, n_gone - record.n_failed) + counts["done"],
        failed=record.n_failed + failed,
        to_fetch=ended,
    )


def _states(batch: str, lines: Sequence[SentLine]) -> Operation[list[str]]:
    jobs = [line for line in lines if line.custom_id is not None]
    found = []
    if jobs:
        found = yield Commands([("HGET", Job.key_for(line.job_id(batch)), "status") for line in jobs])
    return ["failed"] * (len(lines) - len(jobs)) + [_state(status) for status in found]


def _state(status: bytes | None) -> str:
    text = (status or b"").decode(errors="replace")
    if text == JobStatus.FINISHED.value:
        return "done"
    if text == JobStatus.STARTED.value:
        return "running"
    return "failed" if status is None or text in _FAILED else "waiting"

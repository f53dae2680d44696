"""Where a job stands, as a small value."""

from dataclasses import dataclass

from stoker.job_record import JobRecord
from stoker.operations import Operation, ask
from stoker.rq_keys import queue_key
from stoker_shared.errors import JobNotFound


@dataclass(frozen=True)
class TicketStatus:
    """A snapshot of one job.

    Attributes:
        state: RQ's own word: ``queued``, ``started``, ``finished``, ``failed``, ``canceled``, ``stopped``,
            ``deferred``, ``scheduled`` and rarer ones.
        position: jobs ahead of it in its queue, 0 when it is next; ``None`` unless it waits there.
        tokens: tokens generated so far, about a second old; ``None`` unless it runs and the worker said so.
        worker: name of the worker that runs it; ``None`` unless it runs.
    """

    state: str
    position: int | None = None
    tokens: int | None = None
    worker: str | None = None


def status_of(job_id: str) -> Operation[TicketStatus]:
    """
    Raises:
        JobNotFound: no such job (any more).
    """
    record = yield from JobRecord.read(job_id)
    if record is None:
        raise JobNotFound(job_id)
    if record.state == "queued":
        # ``None`` in the moment between a worker's claim and its start.
        position = yield from ask("LPOS", queue_key(record.queue), job_id)
        return TicketStatus("queued", position=position if isinstance(position, int) else None)
    if record.state == "started":
        return TicketStatus("started", tokens=record.tokens, worker=record.worker)
    return TicketStatus(record.state)

"""A job's state, read from Redis. Reads only."""

from dataclasses import asdict, dataclass

from stoker.job_record import JobRecord
from stoker.operations import Operation, ask
from stoker.presence import unattended
from stoker.rq_keys import queue_key
from stoker_shared.errors import JobNotFound


@dataclass(frozen=True)
class TicketStatus:
    """A snapshot of one job.

    Attributes:
        state: RQ's own name: ``queued``, ``started``, ``finished``, ``failed``, ``canceled``, ``stopped``,
            ``deferred``, ``scheduled`` and rarer ones.
        position: how many jobs are before it in its queue, 0 when it is next; ``None`` unless it waits there.
        worker: name of the worker that runs it; ``None`` unless it runs.
        stage: ``loading`` its agent's memory, ``waiting`` for a place in the batch, ``prefill`` or ``decode``. Like the
            next two about a second old, and ``None`` unless the job runs.
        tokens: tokens generated so far. tokens_per_s: mean rate since the first token. warning: that no worker listens
        to its queue, with the queues that have one; ``None`` unless the job waits there.
    """

    state: str
    position: int | None = None
    worker: str | None = None
    stage: str | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    warning: str | None = None


def status_of(job_id: str) -> Operation[TicketStatus]:
    """
    Raises:
        JobNotFound: no such job (any more).
    """
    record = yield from JobRecord.read(job_id)
    if record is None:
        raise JobNotFound(job_id)
    if record.state == "queued":
        # The position is ``None`` in the moment between a worker's claim and the job's start.
        position = yield from ask("LPOS", queue_key(record.queue), job_id)
        warning = yield from unattended(record.queue)
        return TicketStatus("queued", position=position if isinstance(position, int) else None, warning=warning)
    if record.state == "started":
        progress = asdict(record.progress) if record.progress else {}
        return TicketStatus("started", worker=record.worker, **progress)
    return TicketStatus(record.state)

"""Where a job stands, as a small value."""

from dataclasses import dataclass


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

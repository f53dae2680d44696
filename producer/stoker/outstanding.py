"""Tickets of either producer whose jobs are waited for together. Owns which ticket belongs to which job; no I/O."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from stoker.any_ticket import AnyTicket
from stoker.operations import Operation
from stoker.waiter import Waiter
from stoker.waiting import Patience
from stoker_shared.errors import JobError, ResultTimeout
from stoker_shared.result import GenerationResult

TicketT = TypeVar("TicketT", bound=AnyTicket)


class Outstanding(Generic[TicketT]):
    """Tickets, several of which may have the same job. False when all their jobs have ended.

    Attributes:
        ended_before: tickets whose job's end was known already.
    """

    def __init__(self, tickets: Iterable[TicketT], timeout_s: float | None, slice_s: float) -> None:
        """
        Args:
            timeout_s: how long to wait for all of them together, in seconds; ``None`` for no limit.
            slice_s: longest blocking read, as `blocking_slice_s` of the connection.
        """
        self._waiter = Waiter()
        self._slice_s = slice_s
        self.ended_before: list[TicketT] = []
        self._by_job_id: dict[str, list[TicketT]] = defaultdict(list)
        for ticket in tickets:
            if ticket._ended is not None:
                self.ended_before.append(ticket)
            else:
                self._by_job_id[ticket.job_id].append(ticket)
                self._waiter.add(ticket.job_id, ticket._queue_if_new)
        self._patience = Patience(timeout_s)

    def __bool__(self) -> bool:
        return bool(self._by_job_id)

    def next(self) -> Operation[list[TicketT]]:
        """The tickets of the next jobs to end, one or more; each keeps its job's end from now on.

        Raises:
            ResultTimeout: the time is over.
            redis.exceptions.RedisError: as `Patience.enduring`.
        """
        ended = yield from self._waiter.wait(self._patience, self._slice_s)
        if not ended:
            job_id, others = next(iter(self._by_job_id)), len(self._by_job_id) - 1
            beside = f", nor have {others} others" if others else ""
            raise ResultTimeout(job_id, f"has not ended after {self._patience.timeout_s:g} s{beside}; they continue")
        tickets = []
        for end in ended:
            for ticket in self._by_job_id.pop(end.job_id, ()):
                ticket._ended = end
                tickets.append(ticket)
        return tickets


class Outcomes:
    """Results or errors of tickets that have ended."""

    def __init__(self, return_errors: bool) -> None:
        self._return_errors = return_errors
        self._by_job_id: dict[str, GenerationResult | JobError] = {}

    def add(self, ticket: AnyTicket) -> None:
        """
        Raises:
            JobError: the job did not finish, and errors are not to be returned.
        """
        assert ticket._ended is not None
        try:
            self._by_job_id[ticket.job_id] = ticket._ended.outcome()
        except JobError as error:
            if not self._return_errors:
                raise
            self._by_job_id[ticket.job_id] = error

    def of(self, tickets: Iterable[AnyTicket]) -> list[Any]:
        """The outcomes in the order of `tickets`; a `ResultTimeout` for those that were not added."""
        late = "has not ended in time; it continues"
        return [self._by_job_id.get(ticket.job_id) or ResultTimeout(ticket.job_id, late) for ticket in tickets]

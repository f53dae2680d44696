"""Tickets whose jobs are waited for together, of either producer. Owns which ticket belongs to which job; no I/O."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from stoker.any_ticket import AnyTicket
from stoker.waiter import Ended, Waiter
from stoker_shared.errors import JobError, ResultTimeout
from stoker_shared.result import GenerationResult

TicketT = TypeVar("TicketT", bound=AnyTicket)


class Outstanding(Generic[TicketT]):
    """Tickets, some of which may have the same job. False when all their jobs have ended.

    Attributes:
        ended_before: those whose job's end was known already.
        waiter: waits for the others' jobs.
    """

    def __init__(self, tickets: Iterable[TicketT]) -> None:
        self.waiter = Waiter()
        self.ended_before: list[TicketT] = []
        self._by_job_id: dict[str, list[TicketT]] = defaultdict(list)
        for ticket in tickets:
            if ticket._ended is not None:
                self.ended_before.append(ticket)
            else:
                self._by_job_id[ticket.job_id].append(ticket)
                self.waiter.add(ticket.job_id, ticket._queue_if_new)

    def __bool__(self) -> bool:
        return bool(self._by_job_id)

    def settle(self, ended: list[Ended], timeout_s: float | None) -> Iterator[TicketT]:
        """Their tickets, each of which has its job's end from now on.

        Raises:
            ResultTimeout: `ended` is empty.
        """
        if not ended:
            job_id, others = next(iter(self._by_job_id)), len(self._by_job_id) - 1
            beside = f", nor have {others} others" if others else ""
            raise ResultTimeout(job_id, f"has not ended after {timeout_s:g} s{beside}; they go on")
        for end in ended:
            for ticket in self._by_job_id.pop(end.job_id, ()):
                ticket._ended = end
                yield ticket


class Outcomes:
    """Results or errors of tickets that have ended."""

    def __init__(self, return_errors: bool) -> None:
        self._return_errors = return_errors
        self._by_job_id: dict[str, GenerationResult | JobError] = {}

    def add(self, ticket: AnyTicket) -> None:
        """
        Raises:
            JobError: it did not finish, and errors are not to be returned.
        """
        assert ticket._ended is not None
        try:
            self._by_job_id[ticket.job_id] = ticket._ended.outcome()
        except JobError as error:
            if not self._return_errors:
                raise
            self._by_job_id[ticket.job_id] = error

    def end_early(self, error: ResultTimeout) -> None:
        """The others get an error like this one.

        Raises:
            ResultTimeout: errors are not to be returned.
        """
        if not self._return_errors:
            raise error

    def of(self, tickets: Iterable[AnyTicket]) -> list[Any]:
        """In the order of `tickets`."""
        late = "has not ended in time; it goes on"
        return [self._by_job_id.get(ticket.job_id) or ResultTimeout(ticket.job_id, late) for ticket in tickets]

"""One HTTP call and its job: from the body to the ticket, and to the end of both. Owns the job while the call lasts.

A client that hangs up cancels its job, unless the call has an ``Idempotency-Key``: its client can come back for the
answer with the same key.
"""

import asyncio
from contextlib import suppress
from typing import Self

from stoker.serve.backend import Backend
from stoker.serve.intake import CallJob
from stoker.tickets import AsyncTicket
from stoker_shared.errors import StokerError
from stoker_shared.result import GenerationResult


class Call:
    """
    Attributes:
        ticket: the job.
    """

    def __init__(self, backend: Backend, owner: str, place: str) -> None:
        self.ticket: AsyncTicket
        self._backend = backend
        self._owner = owner
        self._place = place
        self._must_cancel = False
        self._has_left = False

    @classmethod
    async def begin(cls, backend: Backend, owner: str, made: CallJob) -> Self:
        """Enqueue the job.

        Raises:
            Failure: no worker, or too many calls in flight.
            DuplicateJob: the key names another job.
            RedisUnavailable: no server answers.
        """
        await backend.require_worker()
        call = cls(backend, owner, await backend.take_place(owner))
        try:
            call.ticket = await backend.enqueue(made.job, id_is_new=not made.is_keyed)
        except BaseException:
            await call._leave()
            raise
        call._must_cancel = not made.is_keyed
        return call

    async def result(self) -> GenerationResult:
        """
        Raises:
            JobError: the job did not finish, or not in time.
        """
        result = await self.ticket.result(self._backend.settings.timeout_s)
        self._must_cancel = False
        return result

    async def end(self) -> None:
        """Cancel the job unless it has ended, and let the next call in. It finishes even if this task is canceled."""
        await asyncio.shield(asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        with suppress(StokerError):
            if self._must_cancel:
                await self.ticket.cancel()
        await self._leave()

    async def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            with suppress(StokerError):  # then the place expires
                await self._backend.leave_place(self._owner, self._place)

"""An `AsyncProducer`'s access to the server: few connections for many tasks, and one wait for all its tickets.

Owns the limit of concurrent operations, and the task that waits. For one event loop.
"""

import asyncio
from collections import defaultdict
from contextlib import suppress
from typing import Final

from redis.asyncio import Redis

from stoker.async_driver import run
from stoker.connection import blocking_slice_s
from stoker.job_record import Ended
from stoker.operations import Operation, T
from stoker.waiter import Waiter
from stoker.waiting import Patience, wait_for_end
from stoker_shared.errors import RedisUnavailable

_AT_A_TIME: Final = 16  # each operation uses a connection
_SLICE_S: Final = 0.2  # a job that is added during a blocking read is waited for after this time at most
_SETTLED_AT_ONCE: Final = 50  # each end wakes a task, which then reads its result


class SharedConnection:
    """The connection of an `AsyncProducer` and its tickets.

    Attributes:
        connection: owned and closed by the producer.
    """

    def __init__(self, connection: Redis) -> None:
        self.connection = connection
        self._few = asyncio.Semaphore(_AT_A_TIME)
        self._waiter = Waiter()
        self._futures: dict[str, list[asyncio.Future[Ended]]] = defaultdict(list)
        self._wait: asyncio.Task[None] | None = None

    async def run(self, operation: Operation[T]) -> T:
        """As `async_driver.run`; not for operations that block."""
        async with self._few:
            return await run(self.connection, operation)

    async def end_of(self, job_id: str, timeout_s: float | None, queue_if_new: str | None) -> Ended:
        """The job's end. One wait serves all jobs of this producer.

        Raises:
            JobNotFound: `timeout_s` has passed, and there is no such job.
            ResultTimeout: it has not ended within `timeout_s`.
            RedisUnavailable: no server answers, or the producer was closed meanwhile.
        """
        if timeout_s is None or timeout_s > 0:
            future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
            self._futures[job_id].append(future)
            self._waiter.add(job_id, queue_if_new)
            if self._wait is None or self._wait.done():
                self._begin_wait()
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        return await future
            finally:
                self._leave(job_id, future)
        return Ended(job_id, await self.run(wait_for_end(job_id, 0, 0, waited_s=timeout_s or 0.0)))

    async def aclose(self) -> None:
        """End the wait."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.cancel()
            with suppress(asyncio.CancelledError):
                await wait
        self._fail_all(RedisUnavailable("the producer was closed during a wait for its results"))

    def _begin_wait(self) -> None:
        self._wait = asyncio.create_task(self._wait_for_all())
        self._wait.add_done_callback(self._when_wait_ends)

    def _when_wait_ends(self, wait: "asyncio.Task[None]") -> None:
        """Begin the wait again if a task still needs it: a program that ends cancels all tasks, this one too, but some
        of them may still wait for a result."""
        waited_for = (future for futures in self._futures.values() for future in futures)
        if wait is self._wait and not all(future.done() for future in waited_for):
            self._begin_wait()

    async def _wait_for_all(self) -> None:
        slice_s = min(_SLICE_S, blocking_slice_s(self.connection))
        patience = Patience(None)
        try:
            while len(self._waiter):
                ended = await run(self.connection, self._waiter.wait(patience, slice_s))
                for count, end in enumerate(ended):
                    for future in self._futures.pop(end.job_id, ()):
                        if not future.done():
                            future.set_result(end)
                    if count % _SETTLED_AT_ONCE == _SETTLED_AT_ONCE - 1:
                        await asyncio.sleep(0)
        except Exception as error:
            self._fail_all(error)

    def _leave(self, job_id: str, future: "asyncio.Future[Ended]") -> None:
        futures = self._futures.get(job_id, [])
        if future in futures:
            futures.remove(future)
        if not futures:
            self._futures.pop(job_id, None)
            self._waiter.discard(job_id)

    def _fail_all(self, error: Exception) -> None:
        futures, self._futures = self._futures, defaultdict(list)
        self._waiter = Waiter()
        for future in (future for of_job in futures.values() for future in of_job):
            if not future.done():
                future.set_exception(error)

"""Waits for a Redis that is away, so that no finished result is lost. Finisher threads; `abandon` on any."""

import threading
from collections.abc import Callable
from typing import TypeVar

from stoker_shared.errors import RedisUnavailable
from stoker_worker.events import Outage

T = TypeVar("T")


class Patience:
    """Makes calls again until Redis answers, or until it is abandoned."""

    def __init__(self, outage: Outage, retry_s: float) -> None:
        """
        Args:
            outage: told of each failed try.
            retry_s: pause between two tries.
        """
        self._outage = outage
        self._retry_s = retry_s
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        self._abandoned.set()

    def wait(self, call: Callable[[], T]) -> T:
        """What `call` returns, once Redis answers.

        Raises:
            RedisUnavailable: Redis is away, and is not waited for any more.
        """
        while True:
            try:
                return call()
            except RedisUnavailable as error:
                if self._abandoned.is_set():
                    raise
                self._outage.met(error)
                self._abandoned.wait(self._retry_s)

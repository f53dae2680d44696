"""How a job in flight learns that it must not go on. No I/O."""

import threading
from typing import Literal

CancelReason = Literal["withdrawn", "timed out", "stopping"]
"""The job was canceled, stopped or deleted; its own timeout passed; the worker stops and gives it back."""


class CancelToken:
    """Set by any thread, read by any thread; the first reason stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: CancelReason | None = None

    @property
    def reason(self) -> CancelReason | None:
        return self._reason

    def set(self, reason: CancelReason) -> None:
        with self._lock:
            self._reason = self._reason or reason

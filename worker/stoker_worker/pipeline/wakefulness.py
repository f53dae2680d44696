"""Keeps a Mac from going to sleep by itself while jobs are in flight. Fetcher thread.

Owns a child process, macOS' `caffeinate`, which holds the power assertion and ends with this process, however that
ends. Does nothing on other systems, or against a closed lid or `pmset sleepnow`.
"""

import logging
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

CAFFEINATE: Final = Path("/usr/bin/caffeinate")
_LINGER_S: Final = 60.0
"""How long it is held after the last job: the next one often comes soon, and a Mac does not sleep within a minute."""


def keep_awake_command() -> tuple[str, ...] | None:
    """The command that keeps this machine awake while it runs; ``None``: there is none on this system."""
    if platform.system() != "Darwin" or not CAFFEINATE.exists():
        return None
    return (str(CAFFEINATE), "-i", "-w", str(os.getpid()))


class Wakefulness:
    """Holds the power assertion from the first job until `_LINGER_S` after the last one."""

    def __init__(self, command: Sequence[str] | None, *, now: Callable[[], float] = time.monotonic) -> None:
        """`command`: as from `keep_awake_command`. `now`: a clock, in seconds."""
        self._command = command
        self._now = now
        self._child: subprocess.Popen[bytes] | None = None
        self._last_job = float("-inf")
        self._last_start = float("-inf")

    def look(self, *, has_jobs: bool) -> None:
        """Start, keep or end the assertion. Raises nothing."""
        if self._command is None:
            return
        now = self._now()
        if has_jobs:
            self._last_job = now
            is_held = self._child is not None and self._child.poll() is None
            if not is_held and now - self._last_start > _LINGER_S:  # one that ends at once is not restarted repeatedly
                self._last_start = now
                self._start(self._command)
        elif now - self._last_job > _LINGER_S:
            self.end()

    def end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def _start(self, command: Sequence[str]) -> None:
        try:
            # In a session of its own: Ctrl-C in the terminal must not let the Mac sleep while running jobs end.
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            log.warning("the Mac may go to sleep while jobs run: %s", error)
            self._command = None

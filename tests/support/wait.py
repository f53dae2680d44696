"""Waits for what a thread, a process or a server does in its own time, and fails with a reason if it does not."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], timeout_s: float = 60, why: Callable[[], str] = str) -> T:
    """The first value of `condition` that is true."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, f"gave up waiting; {why()}"
        time.sleep(0.005)
    return found

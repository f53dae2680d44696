"""Time that an experiment sets, for the product's routing. Owns the clock; no waiting, no I/O.

The modules of the queue read the time from a module called `time`; `enter` gives them the clock under this name. That
holds for the whole process, so an experiment in virtual time runs in a process of its own.
"""

from functools import lru_cache

from stoker_worker import periodic
from stoker_worker.queue import claim_order, queue_view
from stoker_worker.queue.member import Member


class VirtualTime:
    """
    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = thread_time = monotonic


CLOCK = VirtualTime()


def enter() -> None:
    """From here on the routing goes by `CLOCK`, and reads the descriptions of other members only once each."""
    for module in (periodic, claim_order, queue_view):
        vars(module)["time"] = CLOCK
    Member.of = staticmethod(lru_cache(maxsize=4096)(Member.of))  # type: ignore[method-assign,assignment]

"""A waiting job as the policies of the queue know it, its line, and the rule for homes that are gone. Pure, no I/O."""

from collections.abc import Callable
from typing import NamedTuple

from stoker_shared.needs import NOTHING, Needs
from stoker_worker.ports import UNUSED, MemoryUse

Line = str | tuple[str]
"""An agent's id; for a job that uses no memory, and so has a line of its own, a tuple of the job's id."""


class Waiting(NamedTuple):
    """A waiting job. Sorts by its place in the queue, which no other job has."""

    place: int
    job_id: str
    use: MemoryUse = UNUSED
    quarantined: bool = False
    needs: Needs = NOTHING

    @property
    def line(self) -> Line:
        return (self.job_id,) if self.use.agent_id is None else self.use.agent_id


class Granted(NamedTuple):
    """A job that was claimed.

    Attributes:
        use, needs: how it uses memory, and what it needs, as far as was known when it was claimed.
        store: where its agent's memory is; ``-`` for nowhere.
        former: its agent's home until now; empty if that is this worker, ``-`` if there was none or it is not known.
        version: the newest version of that memory whose job has ended; 0 if none is noted.
        is_lost: it continues what is in a store that is away for too long.
    """

    job_id: str
    use: MemoryUse
    store: str = "-"
    former: str = ""
    version: int = 0
    is_lost: bool = False
    needs: Needs = NOTHING


class HomeRule:
    """What becomes of agents whose home is gone, and of jobs that nobody can serve.

    Attributes:
        wait_s: how long a job that continues what is in the home's store waits for it, and any job for a worker that
            can serve it.
        has_shared_store: whether memory is also in a store that all workers have.
        is_store_away: whether that one does not answer just now.
    """

    def __init__(self, wait_s: float = 300.0, *, memory_travels: bool = False) -> None:
        self.wait_s = wait_s
        self.has_shared_store = memory_travels
        self.is_store_away: Callable[[], bool] = lambda: False

    @property
    def memory_travels_as_word(self) -> str:
        """As the claim script has it."""
        return "1" if self.memory_travels else "2" if self.has_shared_store else "0"

    @property
    def memory_travels(self) -> bool:
        """Whether an agent's memory can be had elsewhere now, so that no job waits for one machine."""
        return self.has_shared_store and not self.is_store_away()

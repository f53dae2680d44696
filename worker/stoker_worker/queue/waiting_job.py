"""A waiting job as the policies of the queue know it, and what is known of it before it is claimed. Pure, no I/O.

Our own producer notes how a job uses memory in a field of the job's hash. Of other producers' jobs the request itself
is read.
"""

from typing import NamedTuple

from stoker_shared.foreign_json import read_json
from stoker_shared.job_data import MAX_DATA_BYTES, unpacked
from stoker_shared.request import Access
from stoker_shared.wire import REQUEST_KWARG
from stoker_worker.ports import UNUSED, LastVersion, MemoryUse

Line = str | tuple[str]
"""An agent's id; for a job that uses no memory, and so has a line of its own, a tuple of the job's id."""


class Waiting(NamedTuple):
    """A waiting job. Sorts by its place in the queue, which no other job has."""

    place: int
    job_id: str
    use: MemoryUse = UNUSED
    quarantined: bool = False

    @property
    def line(self) -> Line:
        return (self.job_id,) if self.use.agent_id is None else self.use.agent_id


class Granted(NamedTuple):
    """A job that was claimed.

    Attributes:
        use: how it uses memory, as far as was known when it was claimed.
        last: as in `ClaimedJob`.
    """

    job_id: str
    use: MemoryUse
    last: LastVersion | None = None


def use_in(data: bytes | None) -> MemoryUse:
    """Of a job with this stored `data`; `UNUSED` if it cannot be read."""
    try:
        request = read_json(unpacked(data or b""), MAX_DATA_BYTES)[3][REQUEST_KWARG]
        agent_id, cache, action, context = (request.get(name) for name in ("agent_id", "cache", "action", "context"))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return UNUSED
    access: Access = "none" if cache == "off" else "read" if cache == "read" or action == "info" else "write"
    continues = context == "append" or action is not None
    return MemoryUse.of(access, agent_id if isinstance(agent_id, str) else None, continues=continues)


def use_noted(note: bytes) -> MemoryUse:
    """From the end of `FIELD_AGENT`, in one of the forms that the script of `queue_view.py` lets pass."""
    word, _, agent_id = note.decode(errors="replace").partition(" ")
    access: Access = "read" if word in ("read", "ask") else "write"
    return MemoryUse(access, agent_id, word in ("append", "ask")) if agent_id else UNUSED

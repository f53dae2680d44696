"""What an agent's folder holds, as read. A value; any thread."""

from dataclasses import dataclass

from stoker_worker.memory.record import CachedPrefix
from stoker_worker.ports import AgentVersion


@dataclass(frozen=True)
class AgentState:
    """What an agent's folder holds.

    Attributes:
        version: the newest version; after a `problem`, what a full replacement may go on from.
        record: checksum of its record, where its transcript could be read; the next record's `parent`.
        cache: which cache of its transcript was saved.
        head: HEAD as read, byte for byte; empty when there is none.
        problem: why nobody can be sure of the transcript; ``None`` when all is well.
        unreadable: the error, when not even the names of its records are known: nothing may be written there then.
        record_bytes: size of its records on disk, as a measure of its size in memory.
    """

    version: AgentVersion
    record: str | None = None
    cache: CachedPrefix | None = None
    head: bytes = b""
    problem: str | None = None
    unreadable: OSError | None = None
    record_bytes: int = 0

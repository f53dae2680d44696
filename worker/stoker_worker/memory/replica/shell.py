"""A store for one command of the shell that changes agents, with its shared store if it has one. Beside a worker."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker_worker.memory.agent_changes import naming
from stoker_worker.memory.replica.bucket import Bucket
from stoker_worker.memory.replica.shared_replica import SharedReplica
from stoker_worker.memory.shared_note import read_note
from stoker_worker.memory.store_parts import StoreParts, opened

Look = Callable[[str], object]
"""Brings in what other workers have made of an agent. Raises `SharedStoreAway`, `AgentTranscriptUnreadable`."""


@contextmanager
def opened_with_shared(path: Path) -> Iterator[tuple[StoreParts, Look]]:
    """Raises `StoreUnusable` as `opened`."""
    with opened(path) as parts:
        with parts.database.snapshot() as connection:
            note = read_note(connection)
        replica = None if note is None else SharedReplica(parts, Bucket(note.url))

        def look(agent_id: str) -> None:
            if replica is not None:
                with naming(agent_id):
                    replica.look(agent_id)

        yield parts, look

"""Which shared store has all of a store's agents: the column `store.shared`. Any thread.

Runs inside `Database.snapshot` or a change of `Database.commit`.
"""

from typing import NamedTuple

from stoker_worker.memory.connection import Connection


class SharedNote(NamedTuple):
    """`id`: which shared store it is, wherever it is mounted."""

    url: str
    id: str


def read_note(connection: Connection) -> SharedNote | None:
    """``None``: not all of the store's agents are in a shared store."""
    found = connection.execute("SELECT shared FROM store").fetchone()[0]
    if found is None:
        return None
    url, _, id_ = str(found).rpartition(" ")
    return SharedNote(url, id_)


def write_note(connection: Connection, note: SharedNote | None) -> None:
    connection.execute("UPDATE store SET shared = ?", (None if note is None else f"{note.url} {note.id}",))


def has_agents(connection: Connection) -> bool:
    return connection.execute("SELECT 1 FROM agents LIMIT 1").fetchone() is not None

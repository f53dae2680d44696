"""The agents of which the shared store lacks something, in the database. Any thread.

Whatever changes an agent notes it here in its own transaction, commands of the shell too, so that no crash forgets it.
Runs inside `Database.snapshot` or a change of `Database.commit`; owns the table `unshared` and the column
`store.shared`. Without a shared store the table stays empty.
"""

from typing import NamedTuple

from stoker_worker.memory.checksum import key_of
from stoker_worker.memory.connection import Connection


class Unshared(NamedTuple):
    """
    Attributes:
        key: SHA-256 of the agent's id.
        forgotten: the number at which the agent was forgotten, which the shared store has to learn; ``None``: it was
            not, or the shared store knows.
    """

    key: bytes
    agent_id: str
    forgotten: int | None


def shared_with(connection: Connection) -> str | None:
    """Identity of the shared store that the agents are written through to."""
    found = connection.execute("SELECT shared FROM store").fetchone()[0]
    return None if found is None else str(found)


def share_with(connection: Connection, identity: str) -> None:
    """From now on the agents are written through to this shared store, which has none of them yet."""
    connection.execute("UPDATE store SET shared = ?", (identity,))
    connection.execute("INSERT OR IGNORE INTO unshared (key, agent_id) SELECT key, agent_id FROM agents")


def note(connection: Connection, agent_id: str) -> None:
    """The agent has a new version, and there is a shared store."""
    connection.execute("INSERT OR IGNORE INTO unshared (key, agent_id) VALUES (?, ?)", (key_of(agent_id), agent_id))


def note_forgotten(connection: Connection, agent_id: str, version: int) -> None:
    """The agent is gone; `version` was its newest. Without a shared store nothing is noted."""
    sql = "INSERT OR REPLACE INTO unshared SELECT ?, ?, ? FROM store WHERE shared IS NOT NULL"
    connection.execute(sql, (key_of(agent_id), agent_id, version + 1))


def find(connection: Connection, agent_id: str) -> Unshared | None:
    row = connection.execute("SELECT * FROM unshared WHERE key = ?", (key_of(agent_id),)).fetchone()
    return None if row is None else Unshared(*row)


def some(connection: Connection, *, after: bytes, limit: int) -> list[Unshared]:
    """In the order of their keys."""
    rows = connection.execute("SELECT * FROM unshared WHERE key > ? ORDER BY key LIMIT ?", (after, limit))
    return [Unshared(*row) for row in rows]


def count(connection: Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM unshared").fetchone()[0])


def forgotten_everywhere(connection: Connection, agent_id: str) -> None:
    """The shared store knows that the agent was forgotten. Versions that came after it are still to be written."""
    connection.execute("UPDATE unshared SET forgotten = NULL WHERE key = ?", (key_of(agent_id),))


def written(connection: Connection, agent_id: str, version: int) -> None:
    """The shared store has everything of the agent up to this version; newer ones may have come meanwhile."""
    sql = (
        "DELETE FROM unshared WHERE key = ? AND forgotten IS NULL"
        " AND NOT EXISTS (SELECT 1 FROM agents WHERE agent_id = ? AND version > ?)"
    )
    connection.execute(sql, (key_of(agent_id), agent_id, version))


def drop(connection: Connection, agent_id: str) -> None:
    """The agent is here as it is there."""
    connection.execute("DELETE FROM unshared WHERE key = ?", (key_of(agent_id),))

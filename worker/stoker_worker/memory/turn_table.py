"""The versions of agents in the table `turns`: an agent's history, the chain of a version, and pruning. Any thread.

Runs inside `Database.snapshot` or a change of `Database.commit`.
"""

from collections.abc import Iterator
from typing import Final

from stoker_worker.memory.agent_row import AgentRow
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.turn_record import COLUMNS, TurnRecord, replay
from stoker_worker.ports import CachedPrefix, Transcript

_TEXTS_AND_BLOBS: Final = ("parent", "delivery", "about", "new_tokens", "new_messages", "new_text", "checksum")
_SIZES: Final = " + ".join(f"coalesce(length(CAST({name} AS BLOB)), 0)" for name in _TEXTS_AND_BLOBS)
VERSION_BYTES: Final = f"SELECT coalesce(sum({_SIZES}), 0) FROM turns"
"""Selects the bytes of versions."""
_RECORD: Final = f"SELECT {COLUMNS} FROM turns WHERE agent = ? AND version = ?"


def read_chain(connection: Connection, row: AgentRow, version: int, head: bytes | None) -> list[TurnRecord]:
    """The records to replay for `version`, oldest first: from the last one that keeps nothing.

    Args:
        head: the checksum that the version's row must have; ``None``: any.

    Raises:
        Damaged: one of them is missing, damaged, or not the one that was written.
    """
    chain: list[TurnRecord] = []
    expected = head
    while not (chain and chain[-1].keeps_nothing):
        found = connection.execute(_RECORD, (row.number, version)).fetchone()
        if found is None:
            raise Damaged(f"version {version} is missing")
        if expected is not None and found[-1] != expected:
            raise Damaged(f"version {version} is not the one that was written")
        try:
            chain.append(TurnRecord.of_row(row.agent_id, version, found))
        except Damaged as damage:
            raise Damaged(f"version {version} is unusable: {damage}") from None
        version, expected = version - 1, chain[-1].parent
    return chain[::-1]


def read_version(connection: Connection, row: AgentRow, version: int) -> tuple[Transcript, CachedPrefix | None]:
    """The transcript at `version`, and how much of it was cached then. Raises `Damaged` as `read_chain`."""
    chain = read_chain(connection, row, version, row.head if version == row.version else None)
    return replay(chain), chain[-1].about.cache


def is_newest(connection: Connection, row: AgentRow, delivery: bytes) -> bool:
    """Whether the delivery of this key made the newest version."""
    sql = "SELECT 1 FROM turns WHERE agent = ? AND version = ? AND delivery = ?"
    return connection.execute(sql, (row.number, row.version, delivery)).fetchone() is not None


def read_history(connection: Connection, row: AgentRow) -> Iterator[tuple[TurnRecord, bool]]:
    """Every version that is kept and whole, oldest first, and whether `read_version` can return it."""
    before: tuple[int, bytes] | None = None
    for columns in connection.execute(f"SELECT {COLUMNS} FROM turns WHERE agent = ? ORDER BY version", (row.number,)):
        try:
            record = TurnRecord.of_row(row.agent_id, columns[0], columns)
        except Damaged:
            before = None
            continue
        can_return = record.keeps_nothing or before == (record.version - 1, record.parent)
        before = (record.version, columns[-1]) if can_return else None
        yield record, can_return


def add_version(connection: Connection, row: AgentRow, record: TurnRecord, *, keep_versions: int) -> tuple[bytes, int]:
    """Insert a version, and prune those beyond `keep_versions`.

    Returns:
        the checksum of its row, and by how many bytes the agent's versions have grown.
    """
    columns = record.to_row()
    texts_and_blobs = (value.encode() if isinstance(value, str) else value for value in columns)
    size = sum(len(value) for value in texts_and_blobs if isinstance(value, bytes))
    connection.execute(f"INSERT INTO turns (agent, {COLUMNS}) VALUES (?{', ?' * len(columns)})", (row.number, *columns))
    return columns[-1], size - _prune(connection, row, record.version, keep_versions)


def _prune(connection: Connection, row: AgentRow, newest: int, keep_versions: int) -> int:
    """Delete the versions that are neither kept nor needed to read one that is; returns their bytes."""
    found = connection.execute(
        "SELECT version FROM turns WHERE agent = ? AND version <= ? AND parent IS NULL ORDER BY version DESC LIMIT 1",
        (row.number, newest - keep_versions + 1),
    ).fetchone()
    if found is None:
        return 0
    where, before = "WHERE agent = ? AND version < ?", (row.number, *found)
    n_bytes = connection.execute(f"{VERSION_BYTES} {where}", before).fetchone()[0]
    connection.execute(f"DELETE FROM turns {where}", before)
    return int(n_bytes)

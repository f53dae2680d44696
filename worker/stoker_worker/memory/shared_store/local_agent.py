"""An agent in this machine's database, as far as the shared store is concerned: read it, or make it what the shared
store has. Any thread.

Runs inside `Database.snapshot` or a change of `Database.commit`.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from stoker_shared.errors import AgentVersionConflict
from stoker_worker.memory import agent_table, cache_index, deliveries, turn_table, unshared
from stoker_worker.memory.agent_row import AgentRow
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.shared_store.objects import SharedVersion
from stoker_worker.memory.turn_parts import chain_of
from stoker_worker.memory.turn_record import COLUMNS, TurnRecord

_KEEP_ANSWER_S: Final = 2 * 86_400.0
"""The answers before the newest one are to jobs that have ended: they may be asked for as long as a result lives."""


@dataclass(frozen=True)
class LocalAgent:
    """
    Attributes:
        row: ``None``: this machine does not know the agent.
        forgotten: as in `Unshared`.
        is_noted: whether the shared store may lack something of it. As long as it was never reached, it lacks all.
    """

    row: AgentRow | None
    forgotten: int | None = None
    is_noted: bool = False

    @classmethod
    def read(cls, connection: Connection, agent_id: str) -> Self:
        """Raises `Damaged`."""
        noted, is_shared = unshared.find(connection, agent_id), unshared.shared_with(connection) is not None
        row = agent_table.find_agent(connection, agent_id)
        return cls(row, noted.forgotten if noted else None, noted is not None or (row is not None and not is_shared))

    def is_other_than(self, after: Self) -> bool:
        """Whether its version is another one."""
        return (self.row and (self.row.version, self.row.head)) != (after.row and (after.row.version, after.row.head))

    @property
    def version(self) -> int:
        return self.row.version if self.row else 0

    @property
    def number(self) -> int:
        """The last number that is used up here."""
        return max(self.version, self.forgotten or 0)


def checksum_of(connection: Connection, local: LocalAgent, version: int) -> bytes | None:
    """Of the row of this version; ``None``: it is not here."""
    if local.row is None:
        return None
    sql = "SELECT checksum FROM turns WHERE agent = ? AND version = ?"
    found = connection.execute(sql, (local.row.number, version)).fetchone()
    return None if found is None else bytes(found[0])


def versions_after(connection: Connection, local: LocalAgent, after: int) -> list[SharedVersion]:
    """The agent's versions above this number, to be written to the shared store. Raises `Damaged`."""
    if local.row is None:
        return []
    row, found = local.row, []
    sql = f"SELECT {COLUMNS} FROM turns WHERE agent = ? AND version > ? ORDER BY version"
    for columns in connection.execute(sql, (row.number, after)).fetchall():
        record = TurnRecord.of_row(row.agent_id, columns[0], columns)
        result = layout = None
        if record.delivery is not None:
            sql = "SELECT result FROM deliveries WHERE agent = ? AND key = ?"
            kept = connection.execute(sql, (row.number, record.delivery)).fetchone()
            result = None if kept is None else str(kept[0])
        if record.about.cache is not None:
            layout = cache_index.read_model(connection, record.about.cache.model)
        found.append(SharedVersion(row.agent_id, record.version, record, result, layout))
    return found


def adopt(connection: Connection, versions: Sequence[SharedVersion], local: LocalAgent, *, keeps_before: bool) -> None:
    """Make the last of `versions` the agent's newest version here.

    Args:
        versions: a chain, oldest first.
        local: the agent as it was when the chain was read.
        keeps_before: whether the versions before the chain are the shared store's too; the others go.

    Raises:
        AgentVersionConflict: the agent has changed here meanwhile.
        Damaged: they give no transcript.
    """
    agent_id, first, newest = versions[0].agent_id, versions[0].version, versions[-1]
    now = time.time()
    row = agent_table.find_agent(connection, agent_id)
    if local.is_other_than(LocalAgent(row)):
        raise AgentVersionConflict(f"agent {agent_id!r} was changed while a newer version was brought in")
    if row is not None:
        _undo(connection, row, first)
        if not keeps_before:
            connection.execute("DELETE FROM turns WHERE agent = ?", (row.number,))
    for version in versions:
        assert version.record is not None  # it was not forgotten
        about = version.record.about
        row = agent_table.write_version(connection, row, version.record, keep_versions=version.version)
        if about.cache is not None and version.layout is not None:
            cache_index.note_model(connection, about.cache.model, version.layout)
        if version.result is not None and version.record.delivery is not None:
            until = about.answer_until if version is newest else min(about.answer_until, now + _KEEP_ANSWER_S)
            result = json.loads(version.result)
            deliveries.remember(connection, row.number, version.record.delivery, result, until)
    assert row is not None  # there is a version
    transcript, cache = turn_table.read_version(connection, row, row.version)
    if cache is not None and chain_of(cache, transcript.token_ids).last != cache.last_block:
        raise Damaged("its cache is not that of its tokens")
    cache_index.use_chain(connection, row.number, chain_of(cache, transcript.token_ids) if cache else None, now=now)
    cache_index.set_piece_bytes(connection, row.number, 0)
    n_bytes = f"{turn_table.VERSION_BYTES} WHERE agent = ?2"
    sql = f"UPDATE agents SET last_used = ?1, transcript_bytes = ({n_bytes}) WHERE number = ?2"
    connection.execute(sql, (now, row.number))
    unshared.drop(connection, agent_id)


def lose(connection: Connection, agent_id: str, version: int) -> None:
    """The agent's newest version is this one, and nobody can read it. Raises `Damaged`."""
    row = agent_table.find_agent(connection, agent_id)
    if row is not None:
        _undo(connection, row, version)
    agent_table.set_missing(connection, agent_id, version, now=time.time())
    unshared.drop(connection, agent_id)


def _undo(connection: Connection, row: AgentRow, version: int) -> None:
    """Delete the versions from this one on, and the answers that they gave."""
    undone = "SELECT delivery FROM turns WHERE agent = ?1 AND version >= ?2"
    connection.execute(f"DELETE FROM deliveries WHERE agent = ?1 AND key IN ({undone})", (row.number, version))
    connection.execute("DELETE FROM turns WHERE agent = ? AND version >= ?", (row.number, version))

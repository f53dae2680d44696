"""An agent in this machine's database as a copy of the shared store's: read it, or make it what the shared store has.
Any thread.

Runs inside `Database.snapshot` or a change of `Database.commit`.
"""

import json
import time
from collections.abc import Sequence

from stoker_shared.errors import AgentVersionConflict
from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.database import Connection, Damaged
from stoker_worker.memory.replica.objects import SharedVersion
from stoker_worker.memory.transcripts import AgentRow, Ended
from stoker_worker.memory.turn_saver import chain_of


def checksum_of(connection: Connection, row: AgentRow | None, version: int) -> bytes | None:
    """The checksum of this version's row; ``None``: it is not here."""
    if row is None:
        return None
    sql = "SELECT checksum FROM turns WHERE agent = ? AND version = ?"
    found = connection.execute(sql, (row.number, version)).fetchone()
    return None if found is None else bytes(found[0])


def adopt(
    connection: Connection, versions: Sequence[SharedVersion], before: AgentRow | None, *, keeps_before: bool
) -> None:
    """Make the last of `versions` the agent's newest version here.

    Args:
        versions: a chain, oldest first; none is empty.
        before: the agent's row when the chain was read.
        keeps_before: whether the versions before the chain are the shared store's too; the others go.

    Raises:
        AgentVersionConflict: the agent has changed here meanwhile.
        Damaged: they give no transcript.
    """
    made, now = versions[-1].next, time.time()
    row = transcripts.find_agent(connection, made.agent_id)
    if _state(row) != _state(before):
        raise AgentVersionConflict(f"agent {made.agent_id!r} was changed while a newer version was brought in")
    if row is not None:
        transcripts.job_has_ended(connection, row.number, row.version)
        first = versions[0].next.number if keeps_before else 0
        connection.execute("DELETE FROM turns WHERE agent = ? AND version >= ?", (row.number, first))
    for version in versions:
        assert version.record is not None  # it is not empty
        row = transcripts.write_version(connection, row, version.record, keep_versions=version.next.number)
        _note_deliveries(connection, row.number, version, may_run=version is versions[-1])
        if version.record.about.cache is not None and version.next.layout is not None:
            cache_index.note_model(connection, version.record.about.cache.model, version.next.layout)
    assert row is not None  # there is a version
    transcript, cache = transcripts.read_version(connection, row, row.version)
    if cache is not None and chain_of(cache, transcript.token_ids).last != cache.last_block:
        raise Damaged("its cache is not that of its tokens")
    cache_index.use_chain(connection, row.number, chain_of(cache, transcript.token_ids) if cache else None, now=now)
    cache_index.set_piece_bytes(connection, row.number, 0)
    n_bytes = f"{transcripts.VERSION_BYTES} WHERE agent = ?2"
    sql = f"UPDATE agents SET last_used = ?1, transcript_bytes = ({n_bytes}) WHERE number = ?2"
    connection.execute(sql, (now, row.number))


def _note_deliveries(connection: Connection, agent: int, version: SharedVersion, *, may_run: bool) -> None:
    """The times in a version are by its maker's clock, which may be years off: what is left of them counts from when it
    was saved.

    Args:
        may_run: the job that made it may not have ended.
    """
    now, made, record = time.time(), version.next, version.record
    if record is None:
        return
    late_s = now - record.about.saved_at
    for key, ended in version.ended.items():
        until = min(ended.until + late_s, now + transcripts.KEEP_ENDED_S)
        transcripts.note_ended(connection, agent, key, Ended(ended.version, until))
    if made.delivery is None:
        return
    until = record.about.answer_until + late_s
    if not may_run:
        until = min(until, now + transcripts.KEEP_ENDED_S)
    if made.result is None:
        transcripts.note_ended(connection, agent, made.delivery, Ended(made.number, until))
    else:
        result = json.loads(made.result)
        transcripts.remember_answer(connection, agent, made.delivery, result, until, version=made.number)


def lose(connection: Connection, agent_id: str, version: int) -> None:
    """The agent's newest version is this one, and nobody can read it. Raises `Damaged`."""
    row = transcripts.find_agent(connection, agent_id)
    if row is not None:
        connection.execute("DELETE FROM turns WHERE agent = ? AND version >= ?", (row.number, version))
    transcripts.set_missing(connection, agent_id, version, now=time.time())


def _state(row: AgentRow | None) -> tuple[int, bytes]:
    return (row.version, row.head) if row else (0, b"")

"""Takes an agent back to an earlier version, as its next version: versions only grow. Finisher threads, and commands of
the shell.
"""

from functools import partial

from stoker_shared.agent_result import AgentRolledBack
from stoker_shared.errors import AgentNotFound, AgentTranscriptUnreadable
from stoker_worker.memory import agent_table, turn_table
from stoker_worker.memory.agent_changes import BY_COMMAND, Asked, naming, write_with_cache
from stoker_worker.memory.agent_row import AgentRow
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.turn_parts import cached_prefix, chain_of, make_record
from stoker_worker.ports.cache_spec import BLOCK_TOKENS


def roll_back(
    parts: StoreParts, agent_id: str, version: int | None = None, asked: Asked = BY_COMMAND
) -> AgentRolledBack:
    """Make the transcript of `version`, by default the one before the newest, the agent's next version: versions only
    grow. The newest may be unreadable, or lack its last turn. Of the cache only the full blocks are left.

    Raises:
        AgentNotFound: there is no such agent, or it has no such version (any more).
        AgentTranscriptUnreadable: the transcript of that version is damaged.
        AgentVersionConflict: see `Asked`.
        OSError: it could not be written; the agent is as it was.
    """
    with naming(agent_id):
        back = parts.database.commit(partial(_roll_back, agent_id=agent_id, version=version, asked=asked))
    parts.pieces.remove(parts.pieces.paths(agent_id, back.from_version))
    return back


def _roll_back(connection: Connection, agent_id: str, version: int | None, asked: Asked) -> AgentRolledBack:
    state = agent_table.read_agent(connection, agent_id)
    row, base = state.row, state.version
    asked.check(agent_id, base.number)
    if row is None or not base.number:
        raise AgentNotFound(f"there is no agent {agent_id!r}")
    to = _goal(connection, row, version)
    try:
        transcript, cache = turn_table.read_version(connection, row, to)
    except Damaged as damage:
        raise AgentTranscriptUnreadable(f"version {to} of agent {agent_id!r}: {damage}") from None
    chain = None
    if cache is not None and not cache.snapshots:  # a cache that needs a snapshot is of no use without it
        chain = chain_of(cache, transcript.token_ids)
        chain = chain.up_to(chain.n_blocks * BLOCK_TOKENS)
    back = AgentRolledBack(
        job_id=asked.job_id,
        agent_id=agent_id,
        version=base.number + 1,
        to_version=to,
        from_version=base.number,
        tokens=len(transcript.token_ids),
    )
    left = cached_prefix(chain) if chain else None
    record = make_record(base, transcript, left, made_by="rollback", delivery=asked.delivery)
    write_with_cache(connection, row, record, chain, keep_versions=asked.keep_versions)
    asked.remember(connection, row.number, agent_id, back)
    return back


def _goal(connection: Connection, row: AgentRow, version: int | None) -> int:
    """Raises `AgentNotFound` when there is no such version."""
    to = row.version - 1 if version is None else version
    if version is None and to == 0:
        raise AgentNotFound(f"agent {row.agent_id!r} has no version before its first one")
    if not 1 <= to <= row.version:
        raise AgentNotFound(f"agent {row.agent_id!r} has no version {to}: it is at version {row.version}")
    oldest = connection.execute("SELECT min(version) FROM turns WHERE agent = ?", (row.number,)).fetchone()[0]
    if oldest is not None and to < oldest:
        raise AgentNotFound(f"agent {row.agent_id!r} has no version {to} any more: {oldest} is the oldest that is kept")
    return to

"""Takes an agent back to an earlier version, as its next version: versions only grow. Finisher threads, and commands of
the shell.
"""

from dataclasses import dataclass

from stoker_shared.agents import AgentRolledBack
from stoker_shared.errors import AgentNotFound, AgentTranscriptUnreadable, AgentVersionConflict
from stoker_worker.memory import agent_table, turn_table
from stoker_worker.memory.agent_changes import BY_COMMAND, Asked, naming, version_of, write_with_cache
from stoker_worker.memory.agent_row import AgentRow
from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.next_version import NextVersion
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.memory.turn_parts import cached_prefix, chain_of, make_record
from stoker_worker.memory.turn_record import MadeBy, TurnRecord
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
        VersionTaken, SharedStoreAway: as `StoreParts.commit_next`.
        OSError: it could not be written; the agent is as it was.
    """
    with naming(agent_id):
        with parts.database.snapshot() as connection:
            going = _prepare(connection, agent_id, version, asked, "rollback")
        _commit(parts, going)
    return going.back


def close_number(parts: StoreParts, agent_id: str) -> None:
    """Make the agent's newest version its next one: a version of that number, which is on its way to the shared store,
    comes too late. An agent that cannot be read stays as it is. Raises `VersionTaken`, `SharedStoreAway`, `OSError`,
    `Damaged`."""
    with parts.database.snapshot() as connection:
        row = agent_table.find_agent(connection, agent_id)
        try:
            going = _prepare(connection, agent_id, row.version, BY_COMMAND, "closed") if row and row.version else None
        except AgentTranscriptUnreadable:
            return
    if going is not None:
        _commit(parts, going)
    else:
        parts.replica.publish(NextVersion(agent_id, parts.replica.forgotten(agent_id).number + 1))


@dataclass(frozen=True)
class _Going:
    """A rollback, ready to be committed. `head`: of the agent's row before it. `chain`: of the tokens that stay
    cached."""

    back: AgentRolledBack
    head: bytes
    record: TurnRecord
    chain: BlockChain | None
    next: NextVersion
    asked: Asked


def _commit(parts: StoreParts, going: _Going) -> None:
    back, record, asked = going.back, going.record, going.asked

    def change(connection: Connection) -> None:
        row = agent_table.find_agent(connection, back.agent_id)
        if row is None or (row.version, row.head) != (back.from_version, going.head):
            raise AgentVersionConflict(f"agent {back.agent_id!r} is not at version {back.from_version} any more")
        write_with_cache(connection, row, record, going.chain, keep_versions=asked.keep_versions)
        asked.remember(connection, row.number, back.agent_id, back, version=back.version)

    parts.commit_next(lambda: going.next, change)
    parts.pieces.remove(parts.pieces.paths(back.agent_id, back.from_version))


def _prepare(connection: Connection, agent_id: str, version: int | None, asked: Asked, made_by: MadeBy) -> _Going:
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
    record = make_record(base, transcript, left, made_by=made_by, delivery=asked.delivery)
    return _Going(back, row.head, record, chain, version_of(connection, record, back), asked)


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

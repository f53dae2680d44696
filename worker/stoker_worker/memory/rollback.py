"""Takes an agent back to an earlier version, as its next version: versions only grow. The store must be locked.

Records are never removed, so any version whose records can be read is a possible goal. Of its cache only the full
blocks are left, and not all of them may be there; its tail and snapshots are gone.
"""

from stoker_shared.agent_result import AgentRolledBack
from stoker_shared.errors import AgentNotFound, AgentTranscriptUnreadable
from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.checksummed_file import Damaged
from stoker_worker.memory.record import NO_JOB, AgentState, CachedPrefix, TurnRecord, delta
from stoker_worker.ports import Delivery
from stoker_worker.ports.cache_spec import BLOCK_TOKENS


def roll_back(
    store: StoreAccess,
    agent_id: str,
    version: int | None = None,
    delivery: Delivery = NO_JOB,
    *,
    state: AgentState | None = None,
) -> AgentRolledBack:
    """Commit a new version with the transcript of `version`, by default the one before the newest. The newest may be
    unreadable, or lack its last turn.

    Args:
        state: the agent's, if it has been read already.

    Raises:
        AgentNotFound: there is no such agent, or it has no such version.
        AgentTranscriptUnreadable: the transcript of that version is damaged.
        OSError: it could not be written; the agent is as it was.
    """
    folder = store.agent(agent_id)
    state = folder.read() if state is None else state
    if state.unreadable is not None:
        raise state.unreadable
    newest = state.version.number
    to = _goal(agent_id, newest, version)
    try:
        transcript, cache = folder.read_version(to)
    except Damaged as damage:
        raise AgentTranscriptUnreadable(f"version {to} of agent {agent_id!r}: {damage}") from None
    back = AgentRolledBack(
        job_id=delivery.job_id,
        agent_id=agent_id,
        version=newest + 1,
        to_version=to,
        from_version=newest,
        tokens=len(transcript.token_ids),
    )
    record = TurnRecord(
        agent_id=agent_id,
        version=newest + 1,
        delivery=delivery,
        result=back.model_dump(mode="json"),
        cache=_in_blocks(cache, transcript.token_ids),
        **delta(state.version.transcript, transcript, state.record),
    )
    store.agent_writer(agent_id).commit(state, newest + 1, record.encode(), {})
    return back


def _goal(agent_id: str, newest: int, version: int | None) -> int:
    """Raises `AgentNotFound` when there is no such agent or version."""
    if not newest:
        raise AgentNotFound(f"there is no agent {agent_id!r}")
    to = newest - 1 if version is None else version
    if not 1 <= to <= newest:
        raise AgentNotFound(f"agent {agent_id!r} has no version {to}: it is at version {newest}")
    return to


def _in_blocks(cache: CachedPrefix | None, token_ids: tuple[int, ...]) -> CachedPrefix | None:
    """The full blocks of the cache; nothing of a cache that also needs a snapshot."""
    if cache is None or cache.snapshots:
        return None
    chain = cache.chain(token_ids)
    return CachedPrefix.of(chain.up_to(chain.n_blocks * BLOCK_TOKENS))

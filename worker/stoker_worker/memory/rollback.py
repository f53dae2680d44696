"""Takes an agent back to what it was at an earlier version: as its next version, because versions only grow.

The store must be held. Records are never removed, so every version whose records can be read can be gone back to. Of
its cache the full blocks serve as far as they are still there; its tail and snapshots are gone.
"""

from stoker_shared.agent_result import AgentRolledBack
from stoker_shared.errors import AgentNotFound, AgentTranscriptUnreadable
from stoker_worker.cache_spec import BLOCK_TOKENS
from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.agent_state import AgentState
from stoker_worker.memory.blocks import chain, chain_root
from stoker_worker.memory.record import NO_JOB, CachedPrefix, TurnRecord, delta
from stoker_worker.memory.sealed import Damaged
from stoker_worker.ports import Delivery


def roll_back(
    store: StoreAccess,
    agent_id: str,
    version: int | None = None,
    delivery: Delivery = NO_JOB,
    *,
    state: AgentState | None = None,
) -> AgentRolledBack:
    """Commit a new version with the transcript of `version`, by default the one before the newest. Also where the
    newest cannot be read, or lacks its last turn.

    Args:
        state: the agent's, if it has been read already.

    Raises:
        AgentNotFound: there is no such agent, or it has no such version.
        AgentTranscriptUnreadable: nobody can be sure of the transcript of that version.
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
    changes = delta(state.version.transcript, transcript)
    record = TurnRecord(
        agent_id=agent_id,
        version=newest + 1,
        parent=state.record if changes["keep_tokens"] or changes["keep_messages"] or changes["keep_text"] else None,
        delivery=delivery,
        result=back.model_dump(mode="json"),
        cache=_in_blocks(cache, transcript.token_ids),
        **changes,
    )
    folder.commit(state, newest + 1, record.encode(), {})
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
    """What of the cache full blocks hold; nothing of one that also needs a snapshot."""
    if cache is None or cache.snapshots:
        return None
    tokens = cache.tokens // BLOCK_TOKENS * BLOCK_TOKENS
    last_block = chain(chain_root(cache.model, cache.salt), token_ids[:tokens])[-1]
    return CachedPrefix(cache.model, cache.salt, tokens, last_block)

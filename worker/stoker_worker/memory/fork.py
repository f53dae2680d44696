"""Makes an agent that continues from another one. The store must be locked.

The new agent gets the transcript as one record of its own, copies of the tail and the snapshots, and the same blocks by
their addresses. Of the deliveries it gets the fork's alone: the others were answered for the other agent.
"""

from stoker_shared.agent_result import AgentForked
from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.files import chunks_of
from stoker_worker.memory.record import NO_JOB, TurnRecord, delta
from stoker_worker.ports import Delivery


def fork_agent(store: StoreAccess, source: str, target: str, delivery: Delivery = NO_JOB) -> AgentForked:
    """Make agent `target` at version 1, with the transcript of `source`'s newest version.

    Raises:
        AgentNotFound: there is no `source`.
        AgentExists: there is a `target`.
        AgentTranscriptUnreadable: the transcript of `source` is damaged or lacks its last turn.
        OSError: it could not be written; there is no `target`.
    """
    state = store.readable(source)
    transcript, number = state.version.transcript, state.version.number
    assert transcript is not None  # it is readable
    empty = store.vacant(target)
    forked = AgentForked(
        job_id=delivery.job_id,
        agent_id=source,
        target=target,
        version=1,
        from_version=number,
        tokens=len(transcript.token_ids),
    )
    record = TurnRecord(
        agent_id=target,
        version=1,
        delivery=delivery,
        result=forked.model_dump(mode="json"),
        cache=state.cache,
        **delta(None, transcript),
    )
    theirs = store.agent(source).piece_paths(number)
    copies = zip(store.agent(target).piece_paths(1), theirs, strict=True)
    pieces = {ours: chunks_of(path) for ours, path in copies if path.exists()}
    store.agent_writer(target).commit(empty, 1, record.encode(), pieces)
    return forked

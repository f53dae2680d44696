"""Lets one agent begin where another stands. The store must be held.

The new agent has the transcript, as one record of its own, copies of the tail and the snapshots, and by their addresses
the same blocks. It has none of the deliveries: those jobs were the other agent's, and answering one again is not this
agent's business.
"""

from typing import Final

from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.files import chunks_of
from stoker_worker.memory.record import TurnRecord, delta
from stoker_worker.ports import AgentVersion, Delivery

NO_JOB: Final = Delivery("", "")
"""Delivery of a version that no job made; a job's id is never empty."""


def fork_agent(store: StoreAccess, source: str, target: str) -> AgentVersion:
    """Make agent `target` at version 1, with the transcript of `source`'s newest version.

    Raises:
        AgentMemoryError: there is no `source`, or `target` exists.
        AgentTranscriptUnreadable: nobody can be sure of the transcript of `source`.
        OSError: it could not be written; there is no `target`.
    """
    state = store.readable(source)
    transcript = state.version.transcript
    assert transcript is not None  # it is readable
    empty = store.vacant(target)
    record = TurnRecord(
        agent_id=target,
        version=1,
        parent=None,
        delivery=NO_JOB,
        result={"forked_from": source, "version": state.version.number},
        cache=state.cache,
        **delta(None, transcript),
    )
    theirs = store.agent(source).piece_paths(state.version.number)
    copies = zip(store.agent(target).piece_paths(1), theirs, strict=True)
    pieces = {ours: chunks_of(path) for ours, path in copies if path.exists()}
    store.agent(target).commit(empty, 1, record.encode(), pieces)
    return store.readable(target).version

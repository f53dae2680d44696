"""Where an agent begins that a command of the shell makes: the shared store may know its id. Reads only."""

from stoker_shared.errors import AgentExists
from stoker_worker.memory import unshared
from stoker_worker.memory.agent_changes import naming
from stoker_worker.memory.shared_store.bucket import Bucket
from stoker_worker.memory.shared_store.fetching import Fetching
from stoker_worker.memory.shared_store.meeting import meet
from stoker_worker.memory.store_parts import StoreParts


def last_number(parts: StoreParts, agent_id: str) -> int:
    """The number that an agent of this id had when it was forgotten; 0: no number is used up.

    Raises:
        AgentExists: the shared store has an agent of this id.
        AgentTranscriptUnreadable: what it has of this id is damaged.
        BucketAway: that cannot be known now.
        StoreUnusable: it cannot be asked.
    """
    with naming(agent_id):
        with parts.database.snapshot() as connection:
            shared, noted = unshared.shared_with(connection), unshared.find(connection, agent_id)
        if shared is None:
            return 0
        bucket = Bucket(shared.rpartition(" ")[0])
        meet(bucket, parts.database)
        there, forgotten = Fetching(bucket), noted.forgotten or 0 if noted else 0
        newest = max(there.stored(agent_id), default=0)
        if newest > forgotten and (version := there.version(agent_id, newest)) and version.record is not None:
            raise AgentExists(f"there is an agent {agent_id!r} already, in the shared store")
    return max(newest, forgotten)

"""Writes an agent's versions to a shared store, each at most once whoever tries, and removes old ones. Any thread; the
caller keeps others off the agent.

A number that was removed is free again, and a worker that slept could take it for the next one. But the newest version
is never removed. So whoever has written a version lists them, and takes it back if there is a newer one.
"""

from typing import Final

from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.database import Database
from stoker_worker.memory.shared_store.bucket import Bucket
from stoker_worker.memory.shared_store.fetching import Fetching
from stoker_worker.memory.shared_store.local_agent import LocalAgent, checksum_of, versions_after
from stoker_worker.memory.shared_store.objects import SharedVersion, version_name
from stoker_worker.memory.turn_record import FULL_EVERY

_KEEP_S: Final = 86_400.0
"""Old versions stay so long after they were written: a reader may be slow."""
_TRIES: Final = 3


class Taken(Exception):
    """Another worker has written that version, or a newer one."""


class Pushing:
    """Each call raises `BucketAway`, `OSError` and `Damaged`."""

    def __init__(self, database: Database, bucket: Bucket, fetching: Fetching) -> None:
        self._database = database
        self._bucket = bucket
        self._fetching = fetching

    def push(self, agent_id: str, local: LocalAgent, after: int) -> None:
        """Make the agent's versions above `after` the newest ones in the shared store. Raises `Taken`."""
        forgotten = local.forgotten or 0
        versions = [SharedVersion(agent_id, forgotten)] if forgotten > after else []
        with self._database.snapshot() as connection:
            versions += versions_after(connection, local, max(after, forgotten))
        made = [version for version in versions if self._create(version)]
        if versions and max(self._fetching.stored(agent_id), default=0) > versions[-1].version:
            self._bucket.remove(version_name(agent_id, version.version) for version in made)
            raise Taken

    def _create(self, version: SharedVersion) -> bool:
        """Whether it is new: if not, the reply to an earlier try was lost."""
        name, content = version_name(version.agent_id, version.version), version.encode()
        for _ in range(_TRIES):
            if self._bucket.create(name, content):
                return True
            head = self._head_there(version.agent_id, version.version)
            if head == version.head:
                return False
            if head is not None:
                raise Taken
        raise self._bucket.away(f"{name} is there and is not")

    def compare(self, agent_id: str, local: LocalAgent, number: int) -> None:
        """Raises `Taken` if the shared store has another version of this number than this store."""
        if local.forgotten is not None and local.forgotten > number:
            return  # nothing before counts
        theirs = self._head_there(agent_id, number)
        with self._database.snapshot() as connection:
            ours = b"" if number == local.forgotten else checksum_of(connection, local, number)
            later = versions_after(connection, local, number)
        is_replaced = ours is None and bool(later) and later[0].record is not None and later[0].record.keeps_nothing
        if theirs is not None and theirs != ours and not is_replaced:
            raise Taken

    def _head_there(self, agent_id: str, number: int) -> bytes | None:
        """``None``: there is no such version. Raises `Taken`: it is not ours, being damaged."""
        try:
            theirs = self._fetching.version(agent_id, number)
        except Damaged:
            raise Taken from None
        return theirs.head if theirs else None

    def prune(self, agent_id: str, version: int) -> None:
        """Remove versions that no reader needs, by the clock of the shared store alone."""
        if version % FULL_EVERY:
            return
        stored = self._fetching.stored(agent_id)
        before = max((x.changed_at for x in stored.values()), default=0.0) - _KEEP_S
        oldest = version - 2 * FULL_EVERY
        old = [one for one, x in stored.items() if one < oldest and x.changed_at < before]
        self._bucket.remove(version_name(agent_id, one) for one in old)

    def remove_before(self, agent_id: str, number: int) -> None:
        """Remove the versions below this number."""
        self._bucket.remove(version_name(agent_id, one) for one in self._fetching.stored(agent_id) if one < number)

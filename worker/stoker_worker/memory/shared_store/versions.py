"""The versions of agents across machines: whose version N + 1 it is, what others wrote, what they lack. Any thread.

Owns the commit across machines. A version is saved here first and then made in the shared store by put-if-absent; one
that finds another in its place is undone here. What the shared store has not got yet is noted in the database.
"""

import logging
import threading
import time
from contextlib import suppress
from typing import Final

from stoker_shared.errors import (
    AgentTranscriptUnreadable,
    AgentVersionConflict,
    SharedStoreAway,
    StoreUnusable,
)
from stoker_worker.memory.budget import DiskBudget
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.ram_cache import RamCache
from stoker_worker.memory.shared_store.bucket import Bucket, BucketAway
from stoker_worker.memory.shared_store.fetching import Fetching
from stoker_worker.memory.shared_store.known_versions import Known, KnownVersions
from stoker_worker.memory.shared_store.local_agent import LocalAgent, checksum_of
from stoker_worker.memory.shared_store.meeting import meet
from stoker_worker.memory.shared_store.objects import version_name
from stoker_worker.memory.shared_store.pushing import Pushing, Taken
from stoker_worker.memory.shared_store.taking_over import TakingOver
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.ports import UNKNOWN_VERSION, AgentVersion, HomeOf

_log = logging.getLogger(__name__)

_N_LOCKS: Final = 64


class SharedVersions:
    """
    Attributes:
        home_of: as `CacheStorePort.know_homes` was told.
        pushing: writes versions, and removes old ones.
    """

    def __init__(self, parts: StoreParts, bucket: Bucket, budget: DiskBudget, ram_cache: RamCache) -> None:
        self._database = parts.database
        self._bucket = bucket
        self._fetching = Fetching(bucket)
        self.pushing = Pushing(parts.database, bucket, self._fetching)
        self._taking_over = TakingOver(parts, self._fetching, budget, ram_cache)
        self.home_of: HomeOf = lambda agent_id: None
        self._known = KnownVersions()
        self._locks = [threading.RLock() for _ in range(_N_LOCKS)]
        self._meeting = threading.Lock()
        self._contested: set[str] = set()  # what another worker has written of them is still to come in

    def meet(self) -> None:
        """Raises as `meeting.meet`."""
        with self._meeting:
            if self._bucket.landmark is None:
                meet(self._bucket, self._database)

    def meet_later(self) -> None:
        """The same for whoever goes on without it. Raises `BucketAway`, also if it cannot be one."""
        try:
            self.meet()
        except StoreUnusable as error:
            raise self._bucket.away(str(error)) from error

    def is_only_here(self, agent_id: str) -> bool:
        """See `CacheStorePort`. What an earlier process left counts, until it is looked at. Raises `OSError`,
        `Damaged`."""
        local, known = self._local(agent_id), self._known.get(agent_id)
        return local.is_noted and (known is None or known.number < local.number)

    def forgotten_at(self, agent_id: str) -> int:
        """The last number of an agent that is unknown here because it was forgotten; 0 for any other. Raises `OSError`,
        `Damaged`."""
        local, known = self._local(agent_id), self._known.get(agent_id)
        return 0 if local.version else max(local.number, known.number if known else 0)

    def look(self, agent_id: str) -> None:
        """Bring in what other workers have written of the agent, unless nobody can have.

        Raises:
            SharedStoreAway: that cannot be known now.
            AgentTranscriptUnreadable: a version in the shared store is damaged.
            OSError, Damaged: the database cannot be read or written.
        """
        with self._lock_of(agent_id):
            if self._is_certain(agent_id):
                return
            try:
                self._reach()
                try:
                    self._agree(agent_id)
                except Taken:
                    self._replace(agent_id)
            except BucketAway as why:
                self._check_certain(agent_id, why)

    def mend(self, agent_id: str) -> bool:
        """The agent cannot be read here: bring it in anew, unless the shared store lacks its newest version. Raises as
        `look`."""
        with self._lock_of(agent_id):
            try:
                self._reach()
                local, newest = self._local(agent_id), self._newest(agent_id)
                known = self._known.get(agent_id)
                is_there = not local.is_noted or (known is not None and known.number >= local.version)
                if is_there and newest and newest >= local.version:
                    self._take_over(agent_id, local, newest, anew=True)
                    return True
                return False
            except BucketAway:
                return False

    def publish(self, agent_id: str) -> None:
        """The agent has changed here: write it to the shared store, unless that is away.

        Raises:
            AgentVersionConflict: another worker has written that version. Here the agent is at that one now.
        """
        with self._lock_of(agent_id):
            try:
                self._reach()
                self.flush(agent_id)
            except AgentTranscriptUnreadable as error:  # the other worker's is damaged
                raise AgentVersionConflict(str(error)) from error
            except BucketAway:  # it is noted in the database, and written later
                return
            except (OSError, Damaged) as error:  # the same: what was saved is saved
                _log.warning("agent %r gets to the shared store later: %s", agent_id, error)

    def flush(self, agent_id: str) -> int:
        """Write what the shared store lacks of the agent's versions, also if it seems to be away; returns the newest
        version that is on both sides, 0 if there is none.

        Raises:
            BucketAway: it is written later.
            AgentVersionConflict: as `publish`.
        """
        with self._lock_of(agent_id):
            local, known = self._local(agent_id), self._known.get(agent_id)
            try:
                if known is None:
                    self._agree(agent_id)
                else:
                    self.pushing.push(agent_id, local, known.number)
                    self._know(agent_id, known._replace(number=max(known.number, local.number)))
            except Taken:
                with suppress(BucketAway):  # it is replaced later; the job fails in any case
                    self._replace(agent_id)
                raise AgentVersionConflict(f"another worker has written a version of agent {agent_id!r}") from None
            if self._is_undone(agent_id, local):
                raise AgentVersionConflict(f"another worker has written a version of agent {agent_id!r}")
            known = self._known.get(agent_id)
            return min(self._local(agent_id).version, known.number) if known else 0

    def flush_forgotten(self, agent_id: str) -> bool:
        """If the agent was forgotten here, let the shared store know, and remove its versions there; returns whether
        it was. Raises as `flush`."""
        with self._lock_of(agent_id):
            forgotten = self._local(agent_id).forgotten
            if forgotten is not None:
                self.flush(agent_id)
                self.pushing.remove_before(agent_id, forgotten)
            return forgotten is not None

    def _agree(self, agent_id: str) -> None:
        """Make both sides have the agent's versions. Raises `BucketAway`, `Taken`."""
        self.meet_later()
        now = time.time()
        local, newest = self._local(agent_id), self._newest(agent_id)
        if local.is_noted and (common := min(newest, local.number)):
            self.pushing.compare(agent_id, local, common)
        if newest > local.number:
            self._take_over(agent_id, local, newest)
            return
        self.pushing.push(agent_id, local, newest)
        self._know(agent_id, Known(local.number, now))

    def _newest(self, agent_id: str) -> int:
        """The agent's newest version there; 0: there is none. Raises `BucketAway`."""
        newest, home = max(self._fetching.stored(agent_id), default=0), self.home_of(agent_id)
        if home is not None and home.version > newest and self._bucket.has(version_name(agent_id, home.version)):
            return home.version  # a mounted folder may list for some seconds what it had before
        return newest

    def _is_undone(self, agent_id: str, before: LocalAgent) -> bool:
        """Whether the version that was the newest here is not in the agent's history any more; or an agent that was
        forgotten here is back."""
        with self._database.snapshot() as connection:
            after = LocalAgent.read(connection, agent_id)
            if before.row is None or not before.version:
                return before.forgotten is not None and after.version > 0
            return before.is_other_than(after) and checksum_of(connection, after, before.version) != before.row.head

    def _replace(self, agent_id: str) -> None:
        """Undo here what another worker has done otherwise."""
        self._contested.add(agent_id)
        newest = self._newest(agent_id)
        if not newest:
            raise self._bucket.away(f"the versions of agent {agent_id!r} are there and are not")
        _log.warning("agent %r: what was not shared of it is replaced by another worker's version %d", agent_id, newest)
        self._take_over(agent_id, self._local(agent_id), newest)

    def _take_over(self, agent_id: str, local: LocalAgent, newest: int, *, anew: bool = False) -> None:
        known = Known(newest, time.time())
        try:
            self._taking_over.take_over(agent_id, local, newest, anew=anew)
        except AgentTranscriptUnreadable:  # it stays so
            self._know(agent_id, known)
            raise
        self._know(agent_id, known)

    def _is_certain(self, agent_id: str) -> bool:
        """Whether no other worker can have written a version since this one knew all."""
        known, home = self._known.recently(agent_id), self.home_of(agent_id)
        if known is None or agent_id in self._contested or self._local(agent_id).number < known.number:
            return False
        return home is None or (home.former is None and home.version <= known.number)

    def _check_certain(self, agent_id: str, why: BucketAway) -> None:
        """Raises `SharedStoreAway` unless no other worker can have continued the agent."""
        local, home = self._local(agent_id), self.home_of(agent_id)
        may_lack = home is not None and (home.former is not None or home.version > local.number)
        if not local.number or may_lack or agent_id in self._contested:
            unknown = AgentVersion(agent_id, UNKNOWN_VERSION, None)
            problem = f"agent {agent_id!r} may have newer turns in the shared store, which does not answer"
            raise SharedStoreAway(problem, usable=unknown) from why

    def _reach(self) -> None:
        """Raises `BucketAway`, without asking, while it is away."""
        if self._bucket.outage.seconds:
            raise BucketAway(f"the shared store {self._bucket.url} is away")
        self.meet_later()

    def _local(self, agent_id: str) -> LocalAgent:
        with self._database.snapshot() as connection:
            return LocalAgent.read(connection, agent_id)

    def _know(self, agent_id: str, known: Known) -> None:
        self._contested.discard(agent_id)
        self._known.note(agent_id, known)

    def _lock_of(self, agent_id: str) -> threading.RLock:
        return self._locks[hash(agent_id) % _N_LOCKS]

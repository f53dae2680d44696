"""`SharedReplica`: keeps a store's database a copy of its agents in a shared store. Any thread.

The shared store is the truth: a version is made there first, and then here. Other workers' versions come in with
`look`, so a number that is taken there is seen before anything changes here.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from stoker_shared.errors import (
    AgentTranscriptUnreadable,
    AgentVersionConflict,
    SharedStoreAway,
    StoreUnusable,
    VersionTaken,
)
from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.agent_changes import forget_agent
from stoker_worker.memory.database import Connection, Damaged, read_note
from stoker_worker.memory.replica.bucket import Bucket, BucketAway, meet
from stoker_worker.memory.replica.caches import remove_caches
from stoker_worker.memory.replica.versions import Emptied, SharedVersion, Versions
from stoker_worker.memory.store_parts import NEVER_MADE, Forgotten, NextVersion, Replica, StoreParts, opened
from stoker_worker.memory.transcripts import AgentRow, Ended
from stoker_worker.memory.turn_saver import LOG_BYTES, ROW_BYTES, chain_of
from stoker_worker.ports import AgentVersion, LastVersion

_log = logging.getLogger(__name__)

_N_LOCKS: Final = 64
_MOST_NOTES: Final = 2**15
"""More forgotten agents are looked up again."""
_TRIES: Final = 3


class SharedReplica(Replica):
    """`versions`: in the shared store."""

    is_shared = True

    def __init__(
        self,
        parts: StoreParts,
        bucket: Bucket,
        *,
        keep_versions: int | None = None,
        on_brought: Callable[[str], None] = lambda agent_id: None,
        with_room: Callable[[Callable[[], None], Callable[[], int]], None] = lambda save, n_bytes: save(),
    ) -> None:
        """`keep_versions`: as in `Asked`. `on_brought`: called with the id of an agent whose newest version here may
        have become another one. `with_room`: as `DiskBudget.with_room`."""
        self._parts = parts
        self._database = parts.database
        self._bucket = bucket
        self.versions = Versions(bucket)
        self._keep_versions = keep_versions
        self._on_brought = on_brought
        self._with_room = with_room
        self._locks = [threading.RLock() for _ in range(_N_LOCKS)]
        self._meeting = threading.Lock()
        self._noting = threading.Lock()
        self._forgotten: OrderedDict[str, Forgotten] = OrderedDict()
        self._doubtful: set[str] = set()  # agents whose last put had no reply, and may have arrived

    def meet(self) -> None:
        with self._meeting:
            if self._bucket.landmark is None:
                meet(self._bucket, self._database)

    def changing(self, agent_id: str) -> threading.RLock:
        return self._locks[hash(agent_id) % _N_LOCKS]

    def look(self, agent_id: str, last: LastVersion | None = None) -> bool:
        with self.changing(agent_id):
            row = self._row(agent_id)
            newest_here = row.version if row else 0
            is_known = last is not None and last.is_here and last.number == newest_here
            if is_known and agent_id not in self._doubtful:
                return False
            with self._reaching():
                self._bring_newest(agent_id, last.number if last else 0)
            self._doubtful.discard(agent_id)
            return True

    def mend(self, agent_id: str) -> None:
        with self.changing(agent_id), self._reaching():
            row = self._row(agent_id)
            self._bring_newest(agent_id, row.version if row else 0, anew=True)

    def publish(self, version: NextVersion) -> None:
        agent_id = version.agent_id
        made = SharedVersion(**vars(version), ended=self._ended_before(version))
        try:
            with self._reaching():
                self.versions.put(made)
                if version.record is None:
                    self._clean(agent_id, version.number)
        except SharedStoreAway:
            self._doubtful.add(agent_id)
            raise
        if version.record is None:
            self._note_forgotten(made)

    def committed(self, connection: Connection, version: NextVersion) -> None:
        row = transcripts.find_agent(connection, version.agent_id)
        if row is None:
            return
        transcripts.job_has_ended(connection, row.number, version.number - 1)
        before = self.forgotten(version.agent_id)
        if version.number == before.number + 1:  # it begins again, and keeps its earlier deliveries
            for key, end in before.ended.items():
                transcripts.note_ended(connection, row.number, key, end)

    def forgotten(self, agent_id: str) -> Forgotten:
        return self._forgotten.get(agent_id, NEVER_MADE)

    def result_in(self, agent_id: str, version: int, key: bytes) -> str | None:
        with self._reaching():
            try:
                found = self.versions.get(agent_id, version)
            except Emptied:
                return None
        return found.result if found is not None and found.delivery == key else None

    def expire(self, agent_id: str, unused_s: float) -> bool:
        """As `Replica.expire`. Never waits for a job of the agent: the job may wait for the upkeep."""
        lock = self.changing(agent_id)
        if not lock.acquire(blocking=False):
            return False
        try:
            with self._reaching():
                return self._expire(agent_id, unused_s)
        except (SharedStoreAway, VersionTaken, OSError, Damaged):
            return False
        finally:
            lock.release()

    def _expire(self, agent_id: str, unused_s: float) -> bool:
        """Raises `BucketAway`, `SharedStoreAway`, `VersionTaken`, `OSError`, `Damaged`."""
        if (row := self._row(agent_id)) is None:
            return False
        if (newest := self.versions.newest(agent_id, row.version)) == row.version:
            made_at = self.versions.made_at(agent_id, row.version)
            if made_at is None or self._bucket.time() - made_at < unused_s:
                return False
            self.publish(NextVersion(agent_id, row.version + 1))
            return True
        with suppress(Damaged, Emptied):  # it went on elsewhere
            there = self.versions.get(agent_id, newest)
            if there is not None and there.record is None:  # forgotten, perhaps by an earlier call that was cut short
                self._clean(agent_id, newest)
        return True

    def _bring_newest(self, agent_id: str, hint: int, *, anew: bool = False) -> None:
        """`anew`: as for `_bring`. Raises as `look`, and `BucketAway`."""
        for left in reversed(range(_TRIES)):
            row = self._row(agent_id)
            known = row.version if row and row.version else self.forgotten(agent_id).number
            known = 0 if anew else known
            newest = self.versions.newest(agent_id, known, hint)
            if newest == known:
                return
            try:
                return self._bring(agent_id, row, newest, anew=anew)
            except AgentVersionConflict:  # a command has changed it here meanwhile
                pass
            except Emptied as emptied:  # it was forgotten meanwhile
                if not left:
                    raise self._lost(agent_id, newest, emptied) from emptied
        raise self._bucket.away(f"agent {agent_id!r} is changed all the time")

    def _bring(self, agent_id: str, row: AgentRow | None, newest: int, *, anew: bool = False) -> None:
        """Make version `newest` of the shared store the agent's newest here. `anew`: nothing that is here is used.

        Raises:
            AgentTranscriptUnreadable: it is damaged there; here the agent is at that number now, without it.
            BucketAway, Emptied, AgentVersionConflict: nothing has changed.
            OSError, Damaged: the database cannot be read or written.
        """
        began = time.perf_counter()

        def here(version: int) -> bytes | None:
            with self._database.snapshot() as connection:
                return None if anew else checksum_of(connection, row, version)

        try:
            chain, follows = self.versions.chain(agent_id, newest, 0 if anew or row is None else row.version, here)
            if chain[-1].record is None:
                self._forget(chain[-1])
            else:
                change = partial(
                    adopt, versions=chain, before=row, keeps_before=follows, keep_versions=self._keep_versions
                )
                self._with_room(lambda: self._database.commit(change), lambda: _log_bytes(chain))
        except Damaged as damage:
            raise self._lost(agent_id, newest, damage) from damage
        finally:
            self._on_brought(agent_id)
        self._parts.pieces.keep_only((), agent_id, newest)
        if row is not None:
            self._parts.pieces.remove(self._parts.pieces.paths(agent_id, row.version))
        _log.info("agent %r: brought in version %d in %.3f s", agent_id, newest, time.perf_counter() - began)

    def _lost(self, agent_id: str, newest: int, why: Exception) -> AgentTranscriptUnreadable:
        self._database.commit(partial(lose, agent_id=agent_id, version=newest))
        problem = f"the transcript of agent {agent_id!r} in the shared store: {why}"
        return AgentTranscriptUnreadable(problem, usable=AgentVersion(agent_id, newest, None))

    def _forget(self, empty: SharedVersion) -> None:
        """Remove the agent here: this empty version was made by another worker, or by this one in an earlier life."""
        self._clean(empty.agent_id, empty.number)
        forget_agent(self._parts, empty.agent_id, only_here=True)
        self._note_forgotten(empty)

    def _clean(self, agent_id: str, number: int) -> None:
        """Remove there what is left of versions below this number. Raises `BucketAway`."""
        self.versions.empty_below(agent_id, number)
        remove_caches(self._bucket, agent_id)

    def _note_forgotten(self, empty: SharedVersion) -> None:
        ended = dict(empty.ended)
        if empty.delivery is not None:
            ended[empty.delivery] = Ended(empty.number, time.time() + transcripts.UNTIL_ENDED_S)
        with self._noting:
            self._forgotten[empty.agent_id] = Forgotten(empty.number, ended)
            self._forgotten.move_to_end(empty.agent_id)
            if len(self._forgotten) > _MOST_NOTES:
                self._forgotten.popitem(last=False)

    def _ended_before(self, version: NextVersion) -> dict[bytes, Ended]:
        """The ends of all deliveries before this version, if it is whole or empty; others carry none."""
        if version.record is not None and not version.record.keeps_nothing:
            return {}
        row = self._row(version.agent_id)
        ended = dict(self.forgotten(version.agent_id).ended)
        if row is not None:
            with self._database.snapshot() as connection:
                ended |= transcripts.ends_for(connection, row.number)
        now = time.time()
        return {key: end for key, end in ended.items() if end.until > now}

    def _row(self, agent_id: str) -> AgentRow | None:
        with self._database.snapshot() as connection:
            return transcripts.find_agent(connection, agent_id)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Inside, `BucketAway` becomes `SharedStoreAway`, which is raised at once during an outage: one thread alone
        asks whether the shared store is back (`CachesBehind`)."""
        if self._bucket.outage.seconds:
            raise SharedStoreAway(f"the shared store {self._bucket.url} is away")
        try:
            self.meet()
            yield
        except BucketAway as why:
            raise SharedStoreAway(str(why)) from why
        except StoreUnusable as why:
            raise SharedStoreAway(str(self._bucket.away(str(why)))) from why


@contextmanager
def opened_with_shared(path: Path) -> Iterator[StoreParts]:
    """A store, with its shared store if any, for a command of the shell that changes agents. Raises `StoreUnusable`."""
    with opened(path) as parts:
        with parts.database.snapshot() as connection:
            note = read_note(connection)
        if note is not None:
            parts.replica = SharedReplica(parts, Bucket(note.url))
        yield parts


def _log_bytes(versions: Sequence[SharedVersion]) -> int:
    """About what it takes to write them into the database."""
    return LOG_BYTES + sum(ROW_BYTES * len(version.record.new_tokens) for version in versions if version.record)


def checksum_of(connection: Connection, row: AgentRow | None, version: int) -> bytes | None:
    """The checksum of this version's row; ``None``: it is not here."""
    if row is None:
        return None
    sql = "SELECT checksum FROM turns WHERE agent = ? AND version = ?"
    found = connection.execute(sql, (row.number, version)).fetchone()
    return None if found is None else bytes(found[0])


def adopt(
    connection: Connection,
    versions: Sequence[SharedVersion],
    before: AgentRow | None,
    *,
    keeps_before: bool,
    keep_versions: int | None = None,
) -> None:
    """Make the last of `versions`, a chain without empty ones, oldest first, the agent's newest here, within a
    transaction. `before`: the agent's row when the chain was read. `keeps_before`: whether the versions before the
    chain are the shared store's too; otherwise they are removed. `keep_versions`: as in `Asked`. Raises
    `AgentVersionConflict`: the agent has changed here meanwhile; `Damaged`: the chain gives no transcript."""
    made, now = versions[-1], time.time()
    row = transcripts.find_agent(connection, made.agent_id)
    if _state(row) != _state(before):
        raise AgentVersionConflict(f"agent {made.agent_id!r} was changed while a newer version was brought in")
    if row is not None:
        transcripts.job_has_ended(connection, row.number, row.version)
        first = versions[0].number if keeps_before else 0
        connection.execute("DELETE FROM turns WHERE agent = ? AND version >= ?", (row.number, first))
    for version in versions:
        assert version.record is not None  # it is not empty
        row = transcripts.write_version(connection, row, version.record, keep_versions=keep_versions or version.number)
        _note_deliveries(connection, row.number, version, may_run=version is versions[-1])
        if version.record.about.cache is not None and version.layout is not None:
            cache_index.note_model(connection, version.record.about.cache.model, version.layout)
    assert row is not None  # there is a version
    transcript, cache = transcripts.read_version(connection, row, row.version)
    if cache is not None and chain_of(cache, transcript.token_ids).last != cache.last_block:
        raise Damaged("its cache is not that of its tokens")
    cache_index.use_chain(connection, row.number, chain_of(cache, transcript.token_ids) if cache else None, now=now)
    n_bytes = f"{transcripts.VERSION_BYTES} WHERE agent = ?2"
    sql = f"UPDATE agents SET last_used = ?1, transcript_bytes = ({n_bytes}) WHERE number = ?2"
    connection.execute(sql, (now, row.number))


def _note_deliveries(connection: Connection, agent: int, version: SharedVersion, *, may_run: bool) -> None:
    """Note the deliveries of a version. Its times are by its maker's clock, which may be years off: what was left of
    them at the save counts from now. `may_run`: the job that made it may not have ended."""
    now, record = time.time(), version.record
    if record is None:
        return
    late_s = now - record.about.saved_at
    for key, ended in version.ended.items():
        until = min(ended.until + late_s, now + transcripts.KEEP_ENDED_S)
        transcripts.note_ended(connection, agent, key, Ended(ended.version, until))
    if version.delivery is None:
        return
    until = record.about.answer_until + late_s
    if not may_run:
        until = min(until, now + transcripts.KEEP_ENDED_S)
    if version.result is None:
        transcripts.note_ended(connection, agent, version.delivery, Ended(version.number, until))
    else:
        transcripts.remember_answer(connection, agent, version.delivery, version.result, until, version=version.number)


def lose(connection: Connection, agent_id: str, version: int) -> None:
    """Note, within a transaction, that this is the agent's newest version and cannot be read. Raises `Damaged`."""
    row = transcripts.find_agent(connection, agent_id)
    if row is not None:
        connection.execute("DELETE FROM turns WHERE agent = ? AND version >= ?", (row.number, version))
    transcripts.set_missing(connection, agent_id, version, now=time.time())


def _state(row: AgentRow | None) -> tuple[int, bytes]:
    return (row.version, row.head) if row else (0, b"")

"""`AgentCacheStore`: agent memory on disk, as the worker sees it (`CacheStorePort`). The way into this package.

Owns the order of a save. With a shared store, the versions of other workers are brought in first, and each version is
made there before it is made here (`StoreParts.commit_next`). `open_agent` and `restore` run on the loader thread,
`save` and `mark_unsaved` on finisher threads, `answer` on both, at once for different agents. No state grows with the
agents, unless they are damaged.
"""

import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from stoker_shared.agents import AgentForgotten, AgentInfo, AgentRequest, AgentResult, read_agent_result
from stoker_shared.errors import AgentExists, AgentTranscriptUnreadable, AgentVersionConflict, VersionTaken
from stoker_worker.memory import transcripts
from stoker_worker.memory.agent_changes import Asked, close_number, forget_agent, fork_agent, look, naming, roll_back
from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.database import Connection, Damaged, DatabaseFailed, connect, read_note
from stoker_worker.memory.database_file import refused_if_unusable, with_way_on
from stoker_worker.memory.eviction import DiskBudget, Notes
from stoker_worker.memory.files import Disk
from stoker_worker.memory.locks import InFlight, StoreLock
from stoker_worker.memory.lookup import Lookup, PrefixLookup, n_readers
from stoker_worker.memory.ram_cache import RamCache, RamCacheEntry
from stoker_worker.memory.read_ahead import ReadAhead
from stoker_worker.memory.replica.bucket import Bucket
from stoker_worker.memory.replica.caches import CachesBehind
from stoker_worker.memory.replica.shared_replica import SharedReplica
from stoker_worker.memory.sessions import SessionCaches
from stoker_worker.memory.store_parts import open_parts
from stoker_worker.memory.summary import AgentSummary, versions_of
from stoker_worker.memory.turn_saver import LOG_BYTES, TurnSaver, enter_saved
from stoker_worker.memory.unsaved import UnsavedTurns
from stoker_worker.memory.upkeep import Upkeep
from stoker_worker.ports import (
    UNKNOWN_VERSION,
    AgentJobsPort,
    AgentVersion,
    CacheStorePort,
    Delivery,
    LastVersion,
    LoadedModel,
    PlaceOf,
    Restored,
    SequenceCache,
    SharedUse,
    StoreUse,
    Turn,
)

_log = logging.getLogger(__name__)

KEEP_VERSIONS: Final = 16
_MOST_VERSIONS: Final = 100
"""In the answer to a job that asks about an agent."""


class AgentCacheStore(CacheStorePort):
    """Agent memory in one folder.

    Attributes:
        budget: the bytes on disk, and their limit.
        ram_cache: the caches in RAM, and their limit.
        unsaved: turns that could not be saved and are not yet noted in the database.

    Raises:
        StoreUnusable: the folder is locked, damaged, of an unknown format, or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        files: Disk | None = None,
        max_bytes: int | None = None,
        memory_max_bytes: int = 0,
        keep_versions: int = KEEP_VERSIONS,
        agent_ttl_s: float | None = None,
        session_ttl_s: float | None = None,
        shared: Bucket | None = None,
        shared_max_bps: int | None = None,
        wait: bool = False,
        connector: Callable[[Path], Connection] = connect,
    ) -> None:
        """`max_bytes` as in `DiskBudget`, `memory_max_bytes` as in `RamCache`, `wait` as in `StoreLock`, `agent_ttl_s`
        and `session_ttl_s` as in `Upkeep`, `shared_max_bps` as in `CachesBehind`; `keep_versions`: how many versions of
        an agent stay for a rollback; `shared`: the shared store, which is not contacted yet."""
        with ExitStack() as opened, refused_if_unusable(folder):
            opened.enter_context(closing(StoreLock(folder, wait=wait)))
            self.parts = parts = open_parts(folder, files, create=True, connector=connector)
            opened.enter_context(closing(parts))
            parts.writer.clear()
            self._database, self._blocks = parts.database, parts.blocks
            self.ram_cache = RamCache(memory_max_bytes)
            self._notes = Notes(parts)
            self.budget = DiskBudget(parts, self._notes, max_bytes=max_bytes, on_evicted=self.ram_cache.drop)
            self.in_flight = opened.enter_context(closing(InFlight(folder)))
            parts.unsaved = self.unsaved = UnsavedTurns(parts.path, parts.database, parts.files)
            self.unsaved.reserve()
            self._close_files = opened.pop_all().close
        self._turns = TurnSaver(parts, self.budget, keep_versions=keep_versions)
        self._sessions = SessionCaches(parts, self.budget)
        self._prefixes = PrefixLookup(parts, self.budget, self.ram_cache, self._notes, self._sessions)
        ttls = {"agent_ttl_s": agent_ttl_s, "session_ttl_s": session_ttl_s}
        self._upkeep = Upkeep(parts, self._notes, self.unsaved, self.budget, self.ram_cache, **ttls)
        self._read_ahead = ReadAhead(parts, self.ram_cache)
        self._behind = None
        if shared is not None:
            parts.replica = SharedReplica(
                parts,
                shared,
                keep_versions=keep_versions,
                on_brought=self._brought_in,
                with_room=self.budget.with_room,
            )
            self._behind = CachesBehind(parts, shared, self.budget, max_bps=shared_max_bps)
        self.agent_jobs = AgentJobs(self, keep_versions=keep_versions)

    @property
    def misses(self) -> Counter[str]:
        """How often less was reused than an agent's history allowed, by reason."""
        return self._prefixes.misses

    def meet(self) -> None:
        """Check that the shared store is the right one. Without this call, the first one that needs the shared store
        makes the check. Raises `BucketAway`: it does not answer, and will be asked again; `StoreUnusable`: it cannot be
        one, or the store has agents that it lacks."""
        self.parts.replica.meet()

    def shared_id(self) -> str:
        """The shared store's id, the same on every mount; empty if none ever answered. Raises `OSError`, `Damaged`."""
        with self._database.snapshot() as connection:
            note = read_note(connection)
        return "" if note is None else note.id

    def look(self, agent_id: str, last: LastVersion | None = None) -> bool:
        with _unreadable(agent_id):
            return self.parts.replica.look(agent_id, last)

    def open_agent(self, agent_id: str) -> AgentVersion:
        self.in_flight.wait_for(agent_id)
        try:
            return self._open_agent(agent_id)
        except AgentTranscriptUnreadable as error:
            only_lacks_its_last_turn = error.usable is not None and error.usable.transcript is not None
            if only_lacks_its_last_turn or not self.parts.replica.is_shared:
                raise
        with suppress(AgentTranscriptUnreadable, OSError, Damaged):
            self.parts.replica.mend(agent_id)
        return self._open_agent(agent_id)

    def _open_agent(self, agent_id: str) -> AgentVersion:
        with _unreadable(agent_id), self._database.snapshot() as connection:
            state = transcripts.read_agent(connection, agent_id)
        version = state.version
        if not version.number and (after := self.parts.replica.forgotten(agent_id).number):
            version = replace(version, number=after, begins_again=True)
        problem = "its last turn was not saved" if agent_id in self.unsaved else state.problem
        if problem is not None:
            raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {problem}", usable=version)
        return version

    def answer(self, agent_id: str, delivery: Delivery) -> Mapping[str, Any] | None:
        self.in_flight.wait_for(agent_id)
        key = transcripts.delivery_key(agent_id, delivery)
        try:
            with self._database.snapshot() as connection:
                row = transcripts.find_agent(connection, agent_id)
                known = None if row is None else transcripts.read_answer(connection, row.number, key)
            if row is None and (ended := self.parts.replica.forgotten(agent_id).ended.get(key)):
                known = transcripts.AnswerIn(ended.version)
            if isinstance(known, transcripts.AnswerIn):
                return self._answer_there(agent_id, known.version, key)
        except (Damaged, OSError) as error:
            _log_way_on(agent_id, error)
            raise AgentTranscriptUnreadable(f"the answers of agent {agent_id!r}: {error}") from error
        return known

    def restore(
        self,
        prompt_ids: Sequence[int],
        *,
        agent: AgentVersion | None,
        model: LoadedModel,
        salt: str | None,
        session: str | None = None,
        max_tokens: int = 0,
        is_saved: bool = True,
        beside_others: bool = False,
        system_tokens: int = 0,
    ) -> Restored:
        if not model.has_memory:
            return Restored(None, "none")
        prompt = BlockChain(model.fingerprint, salt, tuple(prompt_ids))
        is_elsewhere = agent is not None and agent.cache is not None and agent.agent_id not in self.ram_cache
        if self._behind is not None and agent is not None and is_elsewhere:
            self._behind.caches.bring(agent, prompt)
        with self._read_ahead.giving_way(agent.agent_id if agent else None):
            return self._prefixes.find(
                Lookup(prompt, agent, model, max_tokens, is_saved, n_readers(beside_others), session, system_tokens)
            )

    def save(self, turn: Turn) -> Mapping[str, Any]:
        if turn.base.number == UNKNOWN_VERSION:
            raise DatabaseFailed(f"the versions of agent {turn.agent_id!r} could not be read")
        with self.parts.replica.changing(turn.agent_id):
            try:
                result = self._save(turn)
            except (VersionTaken, AgentVersionConflict) as taken:
                if not self.parts.replica.is_shared:
                    raise
                known = None
                with suppress(AgentTranscriptUnreadable, OSError, Damaged):  # the next run of the job meets it
                    self.look(turn.agent_id)
                    known = self.answer(turn.agent_id, turn.delivery)  # an earlier run of the job may have made it
                if known is None:
                    raise VersionTaken(str(taken)) from taken
                return known
        self.changed(turn.agent_id)
        return result

    def _save(self, turn: Turn) -> Mapping[str, Any]:
        try:
            saved, n_bytes = self._turns.save(turn)
        except Damaged as error:
            _log_way_on(turn.agent_id, error)
            raise DatabaseFailed(str(error)) from error
        except OSError as error:
            self._database.outage.met(f"the store: {error}")
            raise
        self.unsaved.discard(turn.agent_id)
        if turn.cache is None:
            self.ram_cache.drop(turn.agent_id)
        else:
            token_ids = turn.transcript.token_ids[: turn.cache.n_tokens]
            chain = BlockChain(turn.model.fingerprint, turn.cache_salt, token_ids)
            self.ram_cache.put(turn.agent_id, RamCacheEntry(turn.version, chain, turn.cache))
        self.budget.saved(turn.agent_id, n_bytes)
        return saved.result

    def changed(self, agent_id: str) -> None:
        """The agent has a new version, made here: queue its cache for the shared store."""
        if self._behind is not None:
            self._behind.add(agent_id)

    def close_number(self, agent_id: str) -> None:
        if not self.parts.replica.is_shared:
            return  # no earlier run's turn can arrive later
        with self.parts.replica.changing(agent_id):
            with suppress(AgentTranscriptUnreadable):  # then no turn can follow it
                self.look(agent_id)
            try:
                close_number(self.parts, agent_id)
            except Damaged as damage:
                raise OSError(str(damage)) from damage

    def save_blocks(
        self, token_ids: tuple[int, ...], cache: SequenceCache, *, model: LoadedModel, salt: str | None
    ) -> None:
        chain = BlockChain(model.fingerprint, salt, token_ids)
        try:
            with self.budget.using(None, chain.addresses):
                known = replace(cache, checkpoints=tuple(x for x in cache.checkpoints if x.n_tokens <= len(token_ids)))
                saved = self._blocks.save(chain, known, model.spec)
                enter = partial(enter_saved, blocks=self._blocks, chain=chain, saved=saved, spec=model.spec)
                self._database.commit(partial(enter, now=time.time()))
        except (OSError, Damaged) as error:
            self.budget.not_saved(chain.paths(self._blocks.path_of))
            raise DatabaseFailed(str(error)) from error
        self.budget.saved(None, saved.n_bytes + LOG_BYTES)

    def save_session(
        self,
        session: str,
        token_ids: tuple[int, ...],
        cache: SequenceCache,
        *,
        prompt_tokens: int,
        model: LoadedModel,
        salt: str | None,
    ) -> None:
        """On this machine only: caches of sessions do not go to the shared store."""
        chain = BlockChain(model.fingerprint, salt, token_ids)
        try:
            name, version, n_bytes = self._sessions.save(
                session, chain, cache, prompt_tokens=prompt_tokens, model=model
            )
        except (OSError, Damaged) as error:
            self.budget.not_saved(chain.paths(self._blocks.path_of))
            raise DatabaseFailed(str(error)) from error
        self.ram_cache.put(name, RamCacheEntry(version, chain, cache))
        self.budget.saved(None, n_bytes)

    def ended(self, agent_id: str, delivery: Delivery, *, remember_s: float) -> None:
        self._notes.ended(agent_id, transcripts.delivery_key(agent_id, delivery), time.time() + remember_s)

    def mark_unsaved(self, agent_id: str) -> None:
        """With a shared store it always raises: other workers would go on without knowing that the turn is missing."""
        if self.parts.replica.is_shared:
            raise OSError("a turn that is not in the shared store can only be noted here")
        self.ram_cache.drop(agent_id)
        try:
            self.unsaved.add(agent_id)
        except OSError:  # a note is worth more than cache
            self.budget.free(LOG_BYTES)
            self.unsaved.add(agent_id)

    def pin(self, running: frozenset[str], waiting: frozenset[str], *, is_all: bool = True) -> None:
        self.in_flight.pin(running)
        self.parts.holds.pin(running, waiting, is_all=is_all)
        self.ram_cache.pin(running, waiting)

    def order_by(self, place_of: PlaceOf) -> None:
        self.budget.place_of = place_of

    def is_away(self) -> bool:
        return self._behind is not None and self._behind.use().away_s > 0

    def shared_use(self) -> SharedUse | None:
        """The shared store's use, if there is one. No I/O; any thread."""
        return None if self._behind is None else self._behind.use()

    def _brought_in(self, agent_id: str) -> None:
        """The agent's newest version has come from another worker."""
        self.ram_cache.drop(agent_id)
        self.unsaved.discard(agent_id)

    def is_at_hand(self, agent_id: str) -> bool:
        return self._read_ahead.is_at_hand(agent_id)

    def model_loaded(self, model: LoadedModel) -> None:
        self._read_ahead.model_loaded(model)

    def read_ahead(self, agents: Sequence[str]) -> None:
        self._read_ahead.next(agents)

    def use(self) -> StoreUse:
        """The disk and RAM in use, for metrics and health checks. Any thread. Raises `OSError`: the store cannot be
        read or written."""
        folder = self.parts.path
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} is not writable")
        disk = shutil.disk_usage(folder)
        try:
            disk_bytes = self.budget.total_bytes
        except Damaged as error:
            raise OSError(str(error)) from error
        return StoreUse(
            disk_bytes=disk_bytes,
            disk_max_bytes=self.budget.max_bytes,
            disk_free_bytes=disk.free,
            disk_size_bytes=disk.total,
            ram_bytes=self.ram_cache.n_bytes,
            ram_max_bytes=self.ram_cache.max_bytes,
        )

    def start_upkeep(self) -> None:
        """Start the threads that evict, correct the cache index, and write caches to the shared store."""
        self._upkeep.start()
        if self._behind is not None:
            self._behind.start()

    def close(self) -> None:
        """Log this run's misses, and unlock the folder. Every save was durable when it returned."""
        if self._behind is not None:
            self._behind.close()
        self._read_ahead.close()
        if misses := ", ".join(f"{n_times} {reason}" for reason, n_times in self.misses.most_common()):
            _log.info("cache misses since the store was opened: %s", misses)
        self._upkeep.close()
        self._notes.write()  # never raises, and nor does this:
        self.unsaved.move_all()
        self._close_files()

    def _answer_there(self, agent_id: str, version: int, key: bytes) -> Mapping[str, Any]:
        """Raises `SharedStoreAway`, `Damaged`; `AgentVersionConflict`: the agent was forgotten since, or the version is
        too old, so a new run of the job would bring back what is gone."""
        text = self.parts.replica.result_in(agent_id, version, key)
        if text is None:
            raise AgentVersionConflict(
                f"this delivery has made version {version} of agent {agent_id!r}, and its answer is not kept any more"
            )
        answer: Mapping[str, Any] = json.loads(text)
        return answer


class AgentJobs(AgentJobsPort):
    """Carries out jobs about an agent's memory: info, forget, fork, rollback. Finisher threads, beside saves and
    restores of other agents. The shell's commands make the same changes; here the worker's own state follows."""

    def __init__(self, store: AgentCacheStore, *, keep_versions: int) -> None:
        self._store = store
        self._parts = store.parts
        self._budget = store.budget
        self._keep_versions = keep_versions

    def answer(self, request: AgentRequest, delivery: Delivery) -> AgentResult | None:
        """See `AgentJobsPort.answer`. Raises `AgentTranscriptUnreadable`, `OSError`: that cannot be known;
        `AgentVersionConflict`, `SharedStoreAway`, `AgentBusy`: as `CacheStorePort.answer`."""
        agent_id = request.changed_agent
        for one in {request.agent_id, agent_id}:
            try:
                look(self._parts, one)
            except AgentTranscriptUnreadable as error:
                if error.usable is None:  # else the job finds out whether it needs what is damaged
                    raise
        if request.action == "info":
            return None
        known = None
        if request.action == "forget":  # no agent is left that could have the answer
            key = transcripts.delivery_key(agent_id, delivery)
            with naming(agent_id), self._parts.database.snapshot() as connection:
                found = transcripts.read_answer(connection, transcripts.FORGETTER, key)
            known = None if isinstance(found, transcripts.AnswerIn) else found
        if known is None:
            known = self._store.answer(agent_id, delivery)
        return None if known is None else read_agent_result(known)

    def run(self, request: AgentRequest, delivery: Delivery) -> AgentResult:
        """See `AgentJobsPort.run`: once for each delivery, if `answer` was called first.

        Raises:
            AgentNotFound, AgentExists, AgentMemoryError, AgentVersionConflict, AgentTranscriptUnreadable, AgentBusy: it
                cannot be done, and nothing has changed.
            OSError, SharedStoreAway: nothing has changed, or it is done and `answer` returns its result.
            VersionTaken: another worker was faster.
        """
        if request.action == "info":
            return self._info(request.agent_id, delivery)
        try:
            with self._parts.replica.changing(request.changed_agent):
                result = self._change(request, delivery)
        except VersionTaken:
            known = self.answer(request, delivery)  # an earlier run of the job may have made it
            if known is None:
                raise
            return known
        self._store.changed(request.changed_agent)
        return result

    def _change(self, request: AgentRequest, delivery: Delivery) -> AgentResult:
        agent_id, asked = request.agent_id, Asked(delivery, request.expect_version, self._keep_versions)
        with self._store.in_flight.working_on(request.changed_agent), self._budget.using(agent_id, ()):
            if request.action == "forget":
                return self._forget(agent_id, asked)
            if request.action == "fork":
                assert request.target is not None  # the request is valid
                result: AgentResult = self._fork(agent_id, request.target, asked)
            else:
                result = self._roll_back(agent_id, request.version, asked)
        self._budget.make_room()
        return result

    def _info(self, agent_id: str, delivery: Delivery) -> AgentInfo:
        with naming(agent_id), self._parts.database.snapshot() as connection:
            state = transcripts.read_agent(connection, agent_id)
            if state.row is None:
                return AgentInfo(job_id=delivery.job_id, agent_id=agent_id, exists=False)
            seen, versions = AgentSummary.of(connection, state), versions_of(connection, state.row)
        if agent_id in self._store.unsaved:
            seen = replace(seen, state="unsaved", problem="its last turn was not saved")
        kept = [asdict(version) for version in versions if version.can_return][-_MOST_VERSIONS:]
        fields = {"job_id": delivery.job_id, "exists": True, "own_bytes": seen.own_bytes, "versions": kept}
        return AgentInfo.model_validate(asdict(seen) | fields)  # it ignores the others

    def _forget(self, agent_id: str, asked: Asked) -> AgentForgotten:
        def removed() -> None:  # not if it failed: the note of a lost turn must stay
            self._store.ram_cache.drop(agent_id)
            self._store.unsaved.discard(agent_id)
            self._budget.saved(agent_id)

        return forget_agent(self._parts, agent_id, asked, on_removed=removed)

    def _fork(self, source: str, target: str, asked: Asked) -> AgentResult:
        if target in self._store.unsaved:
            raise AgentExists(f"there is an agent {target!r} already")
        with self._budget.using(target, ()):
            forked = fork_agent(self._parts, source, target, asked)
        self._budget.saved(target)
        return forked

    def _roll_back(self, agent_id: str, version: int | None, asked: Asked) -> AgentResult:
        back = roll_back(self._parts, agent_id, version, asked)
        self._store.unsaved.discard(agent_id)
        self._store.ram_cache.drop(agent_id)
        self._budget.saved(agent_id)
        return back


@contextmanager
def _unreadable(agent_id: str) -> Iterator[None]:
    """Turns damage and I/O errors into the error that names the agent."""
    try:
        yield
    except (Damaged, OSError) as error:
        _log_way_on(agent_id, error)
        unknown = AgentVersion(agent_id, UNKNOWN_VERSION, None)
        raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {error}", usable=unknown) from error


def _log_way_on(agent_id: str, error: Exception) -> None:
    """Log how to repair damage, for the operator: the producer's error does not name this machine's commands."""
    if isinstance(error, Damaged):
        _log.error("agent %r: %s", agent_id, with_way_on(error))

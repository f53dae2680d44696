"""Carries out jobs about an agent's memory in the running worker: info, forget, fork, rollback. Finisher threads,
beside saves and restores of other agents.

Each change is durable in one step that remembers the delivery: a second delivery is answered and changes nothing. The
commands of the shell use the same modules; here the worker's own state (budget, RAM, recent agents) follows.
"""

from collections.abc import Callable
from dataclasses import asdict, replace

from stoker_shared.agent_request import AgentRequest
from stoker_shared.agent_result import AgentForgotten, AgentInfo, AgentResult, read_agent_result
from stoker_shared.errors import AgentExists, AgentTranscriptUnreadable, AgentVersionConflict
from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.agent_index import AgentIndexEntry, history_blocks, newest_blocks
from stoker_worker.memory.agent_locks import AgentLocks
from stoker_worker.memory.budget import DiskBudget
from stoker_worker.memory.fork import fork_agent
from stoker_worker.memory.gc import size_of
from stoker_worker.memory.ram_cache import RamCache
from stoker_worker.memory.recent_agents import RecentAgents
from stoker_worker.memory.record import AgentState
from stoker_worker.memory.rollback import roll_back
from stoker_worker.memory.summary import AgentSummary, versions_of
from stoker_worker.ports import AgentJobsPort, Delivery

_MOST_VERSIONS = 100


class AgentJobs(AgentJobsPort):
    def __init__(
        self,
        store: StoreAccess,
        *,
        locks: AgentLocks,
        budget: DiskBudget,
        ram_cache: RamCache,
        recent: RecentAgents,
        unsaved: set[str],
        state_of: Callable[[str], AgentState],
    ) -> None:
        """`unsaved`: agents whose last turn is lost, also where the disk could not be marked."""
        self._store = store
        self._tombstones = store.tombstones
        self._locks = locks
        self._budget = budget
        self._ram_cache = ram_cache
        self._recent = recent
        self._unsaved = unsaved
        self._state_of = state_of

    def answer(self, request: AgentRequest, delivery: Delivery) -> AgentResult | None:
        """See `AgentJobsPort.answer`.

        Raises:
            OSError: that cannot be known, or an unfinished change cannot be finished.
        """
        if request.action == "info":
            return None
        if request.action == "forget":
            return self._tombstones.answer(request.agent_id, delivery)
        agent_id = request.target or request.agent_id
        state = self._state_of(agent_id)
        if state.unreadable is not None:
            raise state.unreadable
        known = state.version.answer_to(delivery)
        if known is None:
            return None
        if state.problem and state.version.transcript and known["version"] == state.version.number:
            # The version is whole, but the disk failed afterwards and it was marked as not saved.
            self._store.agent_writer(agent_id).mark_saved()
            self._unsaved.discard(agent_id)
            self._budget.look_again(agent_id)
        return read_agent_result(known)

    def run(self, request: AgentRequest, delivery: Delivery) -> AgentResult:
        """See `AgentJobsPort.run`: once for each delivery, if `answer` was called first.

        Raises:
            AgentNotFound, AgentExists, AgentVersionConflict, AgentTranscriptUnreadable: it cannot be done, and nothing
                has changed.
            OSError: nothing has changed, or it is done and `answer` returns its result.
        """
        if request.action == "info":
            return self._info(request.agent_id, delivery)
        with self._locks.of(request.target or request.agent_id):
            state = self._state_of(request.agent_id)
            if request.expect_version not in (None, state.version.number):
                raise AgentVersionConflict(
                    f"agent {request.agent_id!r} is at version {state.version.number}, not {request.expect_version}"
                )
            if request.action == "forget":
                return self._forget(request.agent_id, state, delivery)
            if request.action == "fork":
                assert request.target is not None  # the request is valid
                return self._fork(request.agent_id, request.target, state, delivery)
            return self._roll_back(request, state, delivery)

    def ended(self, request: AgentRequest, delivery: Delivery) -> None:
        if request.action == "forget":
            self._tombstones.remove(request.agent_id, delivery)
            self._look_at_tomb(request.agent_id, delivery)

    def _info(self, agent_id: str, delivery: Delivery) -> AgentInfo:
        state = self._state_of(agent_id)
        if not state.version.number and state.problem is None:
            return AgentInfo(job_id=delivery.job_id, agent_id=agent_id, exists=False)
        blocks = newest_blocks(state, self._store.blocks.path_of)
        entry = AgentIndexEntry(self._store.agent(agent_id).path, agent_id, state, blocks)
        seen = AgentSummary.of(entry, self._budget.users_of(blocks))
        if agent_id in self._unsaved:
            seen = replace(seen, state="unsaved", problem="its last turn was not saved")
        fields = (
            asdict(seen)
            | {  # of these, `AgentInfo` takes those that it has
                "job_id": delivery.job_id,
                "exists": True,
                "own_bytes": seen.record_bytes + seen.tail_bytes + seen.snapshot_bytes,
                "versions": [asdict(x) for x in versions_of(self._store, entry) if x.can_return][-_MOST_VERSIONS:],
            }
        )
        return AgentInfo.model_validate(fields)

    def _forget(self, agent_id: str, state: AgentState, delivery: Delivery) -> AgentForgotten:
        if state.unreadable is not None:
            raise state.unreadable
        folder, path_of = self._store.agent(agent_id), self._store.blocks.path_of
        existed = bool(state.version.number) or state.problem is not None
        forgotten = AgentForgotten(job_id=delivery.job_id, agent_id=agent_id, existed=existed)
        used = history_blocks(folder.read_records().values(), path_of).union(newest_blocks(state, path_of))
        if folder.path.is_dir():
            there = [path for path in used if path.exists()]
            going = self._budget.only_of(agent_id, there)
            forgotten = forgotten.model_copy(
                update={
                    "version": state.version.number,
                    "blocks": len(going),
                    "block_bytes": size_of(going),
                    "shared_blocks": len(there) - len(going),
                }
            )
            try:
                self._tombstones.bury(folder.path, forgotten, delivery)
            finally:
                self._recent.drop(agent_id)
                self._ram_cache.drop(agent_id)
                self._look_at_tomb(agent_id, delivery)
        self._unsaved.discard(agent_id)
        self._budget.forgotten(agent_id, used)
        return forgotten

    def _fork(self, source: str, target: str, state: AgentState, delivery: Delivery) -> AgentResult:
        if source in self._unsaved:
            raise AgentTranscriptUnreadable(f"the transcript of agent {source!r}: its last turn was not saved")
        if target in self._unsaved:
            raise AgentExists(f"there is an agent {target!r} already")
        blocks = newest_blocks(state, self._store.blocks.path_of)
        with self._budget.using(source, blocks), self._budget.using(target, blocks):
            try:
                forked = fork_agent(self._store, source, target, delivery)
            finally:
                self._budget.look_again(target)
            self._budget.saved(target, blocks)
        self._budget.make_room()
        return forked

    def _roll_back(self, request: AgentRequest, state: AgentState, delivery: Delivery) -> AgentResult:
        agent_id = request.agent_id
        self._recent.drop(agent_id)
        with self._budget.using(agent_id, ()):
            try:
                back = roll_back(self._store, agent_id, request.version, delivery, state=state)
            finally:
                self._budget.look_again(agent_id)
            blocks = newest_blocks(self._state_of(agent_id), self._store.blocks.path_of)
            self._budget.saved(agent_id, blocks)
        self._unsaved.discard(agent_id)
        self._ram_cache.renumber(agent_id, back.from_version, back.version)
        self._budget.make_room()
        return back

    def _look_at_tomb(self, agent_id: str, delivery: Delivery) -> None:
        tomb, answer = self._tombstones.paths_of(agent_id, delivery)
        self._budget.look_at(tomb.parent, tomb, answer)

"""`ReplicatedStore`: agent memory on this machine and in a shared store, as the worker sees it (`CacheStorePort`).

Owns the order: what others have made is brought in first, then the store of this machine does what it always does, and
makes each version in the shared store before its own. A worker without a shared store has an `AgentCacheStore` alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from stoker_shared.agents import AgentRequest, AgentResult
from stoker_shared.errors import (
    AgentTranscriptUnreadable,
    AgentVersionConflict,
    VersionTaken,
)
from stoker_worker.memory.agent_changes import close_number, naming
from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.database import Damaged, read_note
from stoker_worker.memory.replica.bucket import Bucket
from stoker_worker.memory.replica.caches import CachesBehind, SharedCaches
from stoker_worker.memory.replica.shared_replica import SharedReplica
from stoker_worker.memory.store import AgentCacheStore
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


class ReplicatedStore(CacheStorePort):
    """
    Attributes:
        local: the store of this machine.
        agent_jobs: carries out jobs about an agent's memory.
    """

    def __init__(self, local: AgentCacheStore, bucket: Bucket, *, max_bps: int | None = None) -> None:
        """Asks nobody.

        Args:
            local: is closed with this one.
            max_bps: as in `CachesBehind`.
        """
        self.local = local
        self._bucket = bucket
        self._replica = SharedReplica(
            local.parts, bucket, is_held=local.budget.holds.is_held, on_brought=local.brought_in
        )
        self._caches = SharedCaches(local.parts, bucket, local.budget)
        self._behind = CachesBehind(bucket, self._replica.versions, self._caches, max_bps=max_bps)
        self.agent_jobs = ReplicatedJobs(local.agent_jobs, self._replica, self._behind)

    def meet(self) -> None:
        """Ask the shared store whether it is the right one. Without this, the first call that needs it does.

        Raises:
            BucketAway: it does not answer; it will be asked again.
            StoreUnusable: it cannot be one, or the store has agents that it lacks.
        """
        self._replica.meet()

    def identity(self) -> str:
        """Which shared store it is, wherever it is mounted; empty: it never answered. Raises `OSError`, `Damaged`."""
        with self.local.parts.database.snapshot() as connection:
            note = read_note(connection)
        return "" if note is None else note.id

    def look(self, agent_id: str, last: LastVersion | None = None) -> bool:
        with _unreadable(agent_id):
            return self._replica.look(agent_id, last)

    def open_agent(self, agent_id: str) -> AgentVersion:
        try:
            return self.local.open_agent(agent_id)
        except AgentTranscriptUnreadable as error:
            if error.usable is None or error.usable.transcript is not None:  # it only lacks its last turn
                raise
            with suppress(AgentTranscriptUnreadable, OSError, Damaged):
                self._replica.mend(agent_id)
            return self.local.open_agent(agent_id)

    def answer(self, agent_id: str, delivery: Delivery) -> Mapping[str, Any] | None:
        return self.local.answer(agent_id, delivery)

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
    ) -> Restored:
        if agent is not None and agent.cache is not None and agent.agent_id not in self.local.ram_cache:
            self._caches.bring(agent, BlockChain(model.fingerprint, salt, tuple(prompt_ids)))
        return self.local.restore(
            prompt_ids,
            agent=agent,
            model=model,
            salt=salt,
            session=session,
            max_tokens=max_tokens,
            is_saved=is_saved,
            beside_others=beside_others,
        )

    def save(self, turn: Turn) -> Mapping[str, Any]:
        agent_id = turn.agent_id
        with self._replica.changing(agent_id):
            try:
                result = self.local.save(turn)
            except (VersionTaken, AgentVersionConflict) as taken:
                known = None
                with suppress(AgentTranscriptUnreadable, OSError, Damaged):  # whoever runs the job again meets it
                    self._replica.look(agent_id)
                    known = self.local.answer(agent_id, turn.delivery)  # an earlier run of the job may have made it
                if known is None:
                    raise VersionTaken(str(taken)) from taken
                return known
        self._behind.add(agent_id)
        return result

    def close_number(self, agent_id: str) -> None:
        with self._replica.changing(agent_id):
            with suppress(AgentTranscriptUnreadable):  # then no turn can follow it
                self.look(agent_id)
            try:
                close_number(self.local.parts, agent_id)
            except Damaged as damage:
                raise OSError(str(damage)) from damage

    def save_blocks(
        self, token_ids: tuple[int, ...], cache: SequenceCache, *, model: LoadedModel, salt: str | None
    ) -> None:
        self.local.save_blocks(token_ids, cache, model=model, salt=salt)

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
        """On this machine only: the caches of sessions do not go to the shared store."""
        self.local.save_session(session, token_ids, cache, prompt_tokens=prompt_tokens, model=model, salt=salt)

    def ended(self, agent_id: str, delivery: Delivery, *, remember_s: float) -> None:
        self.local.ended(agent_id, delivery, remember_s=remember_s)

    def mark_unsaved(self, agent_id: str) -> None:
        """Raises `OSError` always: other workers would go on without the turn, and not know that it is missing."""
        raise OSError("a turn that is not in the shared store can only be noted here")

    def pin(self, running: frozenset[str], waiting: frozenset[str], *, is_all: bool = True) -> None:
        self.local.pin(running, waiting, is_all=is_all)

    def order_by(self, place_of: PlaceOf) -> None:
        self.local.order_by(place_of)

    def is_away(self) -> bool:
        return self._bucket.outage.seconds > 0

    def is_at_hand(self, agent_id: str) -> bool:
        return self.local.is_at_hand(agent_id)

    def model_loaded(self, model: LoadedModel) -> None:
        self.local.model_loaded(model)

    def read_ahead(self, agents: Sequence[str]) -> None:
        self.local.read_ahead(agents)

    def start_upkeep(self) -> None:
        """Start the threads that look after the store, and that write caches behind the turns."""
        self.local.start_upkeep()
        self._behind.start()

    def use(self) -> StoreUse:
        """As `AgentCacheStore.use`."""
        return replace(self.local.use(), shared=self.glance())

    def glance(self) -> SharedUse:
        """The use of the shared store. No I/O; any thread."""
        caches = self._caches
        return SharedUse(self._bucket.outage.seconds, caches.written_bytes, caches.read_bytes)

    def close(self) -> None:
        """A cache that is not written yet is computed by whoever needs it."""
        self._behind.close()
        self.local.close()


class ReplicatedJobs(AgentJobsPort):
    """Jobs about an agent's memory: what others have done comes in before. Finisher threads."""

    def __init__(self, local: AgentJobsPort, replica: SharedReplica, behind: CachesBehind) -> None:
        self._local = local
        self._replica = replica
        self._behind = behind

    def answer(self, request: AgentRequest, delivery: Delivery) -> AgentResult | None:
        self._look(request)
        return self._local.answer(request, delivery)

    def run(self, request: AgentRequest, delivery: Delivery) -> AgentResult:
        if request.action == "info":
            return self._local.run(request, delivery)
        try:
            with self._replica.changing(request.changed_agent):
                result = self._local.run(request, delivery)
        except VersionTaken:
            known = self.answer(request, delivery)  # an earlier run of the job may have made it
            if known is None:
                raise
            return known
        self._behind.add(request.changed_agent)
        return result

    def _look(self, request: AgentRequest) -> None:
        for agent_id in {request.agent_id, request.changed_agent}:
            try:
                with naming(agent_id):
                    self._replica.look(agent_id)
            except AgentTranscriptUnreadable as error:
                if error.usable is None:  # else the job finds out whether it needs what is damaged
                    raise


@contextmanager
def _unreadable(agent_id: str) -> Iterator[None]:
    """Damage here becomes the error that names the agent."""
    try:
        yield
    except (Damaged, OSError) as error:
        unknown = AgentVersion(agent_id, UNKNOWN_VERSION, None)
        raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {error}", usable=unknown) from error

"""`SharedAgentStore`: agent memory on this machine and in a shared store, as the worker sees it (`CacheStorePort`).

Owns the order: first what others have written is brought in, then the store of this machine does what it always does,
then what it has done is written through. A worker without a shared store has an `AgentCacheStore` alone.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from stoker_shared.errors import AgentTranscriptUnreadable, StokerError
from stoker_worker.memory import agent_table, unshared
from stoker_worker.memory.block_chain import BlockChain
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.shared_store.agent_jobs import SharedAgentJobs
from stoker_worker.memory.shared_store.bucket import Bucket
from stoker_worker.memory.shared_store.caches import SharedCaches
from stoker_worker.memory.shared_store.versions import SharedVersions
from stoker_worker.memory.shared_store.write_through import WriteThrough
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.ports import (
    UNKNOWN_VERSION,
    AgentHome,
    AgentVersion,
    CacheSlice,
    CacheStorePort,
    Delivery,
    HomeOf,
    LoadedModel,
    PlaceOf,
    Restored,
    SharedUse,
    Turn,
)


class SharedAgentStore(CacheStorePort):
    """
    Attributes:
        local: the store of this machine.
        agent_jobs: carries out jobs about an agent's memory.
    """

    def __init__(self, local: AgentCacheStore, bucket: Bucket, *, max_bps: int | None = None) -> None:
        """Asks nobody.

        Args:
            local: is closed with this one.
            max_bps: as in `WriteThrough`.
        """
        self.local = local
        self._bucket = bucket
        self._versions = SharedVersions(local.parts, bucket, local.budget, local.ram_cache)
        self._caches = SharedCaches(local.parts, bucket, local.budget)
        self._write_through = WriteThrough(local.parts.database, bucket, self._versions, self._caches, max_bps=max_bps)
        local.agent_jobs.last_number = self._versions.forgotten_at
        self.agent_jobs = SharedAgentJobs(local.agent_jobs, local.parts.database, self._versions, self._write_through)
        self._model: str | None = None
        local.before_reading_ahead(self._prepare)

    def meet(self) -> None:
        """Ask the shared store whether it is the right one. Without this, the first call that needs it does.

        Raises:
            BucketAway: it does not answer; it will be asked again.
            StoreUnusable: it cannot be one.
        """
        self._versions.meet()

    def identity(self) -> str:
        """Which shared store it is, wherever it is mounted; empty: it never answered. Raises `OSError`, `Damaged`."""
        with self.local.parts.database.snapshot() as connection:
            url, _, number = (unshared.shared_with(connection) or "").rpartition(" ")
        return number if url == self._bucket.url else ""

    def open_agent(self, agent_id: str) -> AgentVersion:
        self._look(agent_id)
        try:
            version = self.local.open_agent(agent_id)
        except AgentTranscriptUnreadable as error:
            if not self._is_mended(agent_id, error.usable):
                error.usable = self._numbered(error.usable)
                raise
            version = self.local.open_agent(agent_id)
        return self._numbered(version)

    def answer(self, agent_id: str, delivery: Delivery) -> Mapping[str, Any] | None:
        self._look(agent_id)
        return self.local.answer(agent_id, delivery)

    def restore(
        self,
        prompt_ids: Sequence[int],
        *,
        agent: AgentVersion | None,
        model: LoadedModel,
        salt: str | None,
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
            max_tokens=max_tokens,
            is_saved=is_saved,
            beside_others=beside_others,
        )

    def save(self, turn: Turn) -> Mapping[str, Any]:
        """Raises `AgentVersionConflict`: `turn.base` is not the agent's newest version (any more), here or there."""
        result = self.local.save(turn)
        self._versions.publish(turn.agent_id)
        self._write_through.add(turn.agent_id)
        return result

    def save_blocks(
        self, token_ids: tuple[int, ...], cache: CacheSlice, *, model: LoadedModel, salt: str | None
    ) -> None:
        self.local.save_blocks(token_ids, cache, model=model, salt=salt)

    def ended(self, agent_id: str, delivery: Delivery, *, remember_s: float) -> None:
        self.local.ended(agent_id, delivery, remember_s=remember_s)

    def mark_unsaved(self, agent_id: str) -> None:
        self.local.mark_unsaved(agent_id)

    def pin(self, running: frozenset[str], waiting: frozenset[str], *, is_all: bool = True) -> None:
        self.local.pin(running, waiting, is_all=is_all)

    def order_by(self, place_of: PlaceOf) -> None:
        self.local.order_by(place_of)

    def know_homes(self, home_of: HomeOf) -> None:
        self._versions.home_of = home_of
        self.local.know_homes(self._home_here)

    def is_only_here(self, agent_id: str) -> bool:
        try:
            return self._versions.is_only_here(agent_id)
        except (OSError, Damaged):
            return True

    def is_away(self) -> bool:
        return self._bucket.outage.seconds > 0

    def move_s(self, agent_id: str) -> float | None:
        try:
            return self._caches.bring_s(agent_id)
        except (OSError, Damaged):
            return None

    def is_at_hand(self, agent_id: str) -> bool:
        return self.local.is_at_hand(agent_id)

    def model_loaded(self, model: LoadedModel) -> None:
        self._model = model.fingerprint
        self.local.model_loaded(model)

    def read_ahead(self, agents: Sequence[str]) -> None:
        self.local.read_ahead(agents)

    def start_upkeep(self) -> None:
        """Start the threads that look after the store, and that write through."""
        self.local.start_upkeep()
        self._write_through.start()

    def use(self) -> SharedUse:
        """Raises `OSError`."""
        try:
            return replace(self.glance(), waiting_agents=self._write_through.waiting_agents())
        except Damaged as error:
            raise OSError(str(error)) from error

    def glance(self) -> SharedUse:
        """As `use`, with the agents that were counted some seconds ago. No I/O; any thread."""
        caches = self._caches
        waiting = self._write_through.seen_waiting
        return SharedUse(self._bucket.outage.seconds, caches.written_bytes, caches.read_bytes, waiting)

    def close(self) -> None:
        """What is not written through is, after the next start."""
        self._write_through.close()
        self.local.close()

    def _look(self, agent_id: str) -> None:
        """Raises `AgentTranscriptUnreadable`."""
        try:
            self._versions.look(agent_id)
        except (Damaged, OSError) as error:
            unknown = AgentVersion(agent_id, UNKNOWN_VERSION, None)
            raise AgentTranscriptUnreadable(f"the transcript of agent {agent_id!r}: {error}", usable=unknown) from error

    def _home_here(self, agent_id: str) -> AgentHome | None:
        """As the queue knows it. An agent that was forgotten lacks no version."""
        home = self._versions.home_of(agent_id)
        is_forgotten = home is not None and 0 < home.version <= self._versions.forgotten_at(agent_id)
        return home._replace(version=0, kept_by="-") if home is not None and is_forgotten else home

    def _numbered(self, version: AgentVersion) -> AgentVersion:
        """An agent that was forgotten begins again after its last number."""
        if version.number:
            return version
        return replace(version, number=self._versions.forgotten_at(version.agent_id), begins_again=True)

    def _is_mended(self, agent_id: str, usable: AgentVersion) -> bool:
        """Whether the agent is whole again. One that only lacks its last turn is not brought in: nobody has it."""
        if usable.transcript is not None:
            return False
        with suppress(StokerError, OSError, Damaged):
            return self._versions.mend(agent_id)
        return False

    def _prepare(self, agent_id: str) -> None:
        """The agent's job is next: what it needs comes here meanwhile. Notes nothing: its job may be opening it now."""
        with suppress(StokerError, OSError, Damaged):
            self._look(agent_id)
            with self.local.parts.database.snapshot() as connection:
                state = agent_table.read_agent(connection, agent_id)
            cache = state.version.cache
            if state.problem is None and cache is not None and self._model in (None, cache.model):
                self._caches.bring(state.version)

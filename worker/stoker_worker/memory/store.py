"""`AgentCacheStore`: agent memory on disk, as the worker sees it (`CacheStorePort`). The way into this package.

Owns the order of a save. `open_agent`, `answer` and `restore` run on the loader thread, `save` and `mark_unsaved` on
finisher threads, at the same time, for different agents. Nothing here grows with the number of agents.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Final

from stoker_shared.errors import AgentVersionConflict
from stoker_worker.memory import cache_index, deliveries
from stoker_worker.memory.agent_jobs import AgentJobs
from stoker_worker.memory.agent_reading import AgentReading, log_way_on
from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection, DatabaseFailed, connect
from stoker_worker.memory.database_file import refuse_other_formats, refused_if_unusable
from stoker_worker.memory.eviction import KEEP_UNUSED_S, DiskBudget
from stoker_worker.memory.files import Disk
from stoker_worker.memory.locks import InFlight, StoreLock
from stoker_worker.memory.lookup import Lookup, PrefixLookup, n_readers
from stoker_worker.memory.notes import Notes
from stoker_worker.memory.ram_cache import RamCache
from stoker_worker.memory.read_ahead import ReadAhead
from stoker_worker.memory.store_parts import open_parts
from stoker_worker.memory.turn_saver import LOG_BYTES, TurnSaver
from stoker_worker.memory.upkeep import Upkeep
from stoker_worker.ports import (
    UNKNOWN_VERSION,
    AgentVersion,
    CacheSlice,
    CacheStorePort,
    Delivery,
    LastVersion,
    LoadedModel,
    PlaceOf,
    Restored,
    Turn,
)

_log = logging.getLogger(__name__)

KEEP_VERSIONS: Final = 16


class AgentCacheStore(CacheStorePort):
    """Agent memory in one folder.

    Attributes:
        budget: the bytes on disk, and their limit.
        ram_cache: the caches in RAM, and their limit.
        agent_jobs: carries out jobs about an agent's memory.

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
        keep_unused_s: float = KEEP_UNUSED_S,
        keep_versions: int = KEEP_VERSIONS,
        agent_ttl_s: float | None = None,
        wait: bool = False,
        connector: Callable[[Path], Connection] = connect,
    ) -> None:
        """`max_bytes` and `keep_unused_s` as in `DiskBudget`, `memory_max_bytes` as in `RamCache`, `wait` as in
        `StoreLock`, `agent_ttl_s` as in `Upkeep`; `keep_versions`: how many versions of an agent a rollback can return
        to."""
        refuse_other_formats(folder)  # before a lock file is made there
        with ExitStack() as opened, refused_if_unusable(folder):
            opened.enter_context(closing(StoreLock(folder, wait=wait)))
            self.parts = parts = open_parts(folder, files, create=True, connector=connector)
            opened.enter_context(closing(parts))
            parts.writer.clear()
            self._database, self._blocks = parts.database, parts.blocks
            self.ram_cache = RamCache(memory_max_bytes)
            self._notes = Notes(parts)
            self.budget = DiskBudget(
                parts, self._notes, max_bytes=max_bytes, keep_unused_s=keep_unused_s, on_evicted=self.ram_cache.drop
            )
            self._in_flight = opened.enter_context(closing(InFlight(folder)))
            self._agents = AgentReading(parts, self._in_flight)
            self._close_files = opened.pop_all().close
        self._turns = TurnSaver(parts, self.budget, keep_versions=keep_versions)
        self._prefixes = PrefixLookup(parts, self.budget, self.ram_cache, self._notes)
        self._upkeep = Upkeep(
            parts, self._notes, self._agents.unsaved, self.budget, self.ram_cache, agent_ttl_s=agent_ttl_s
        )
        self._read_ahead = ReadAhead(parts, self.ram_cache)
        self.agent_jobs = AgentJobs(
            parts, self._in_flight, self.budget, self.ram_cache, self._agents, keep_versions=keep_versions
        )

    @property
    def misses(self) -> Counter[str]:
        """How often less was reused than an agent's history allowed, by reason."""
        return self._prefixes.misses

    def look(self, agent_id: str, last: LastVersion | None = None) -> bool:
        return True  # there is no other worker

    def open_agent(self, agent_id: str) -> AgentVersion:
        return self._agents.open(agent_id)

    def answer(self, agent_id: str, delivery: Delivery) -> Mapping[str, Any] | None:
        return self._agents.answer(agent_id, delivery)

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
        if not model.has_memory or (agent is None and model.spec.snapshot_layers):
            return Restored(None, "none")
        prompt = BlockChain(model.fingerprint, salt, tuple(prompt_ids))
        with self._read_ahead.giving_way(agent.agent_id if agent else None):
            return self._prefixes.find(
                Lookup(prompt, agent, model, max_tokens, is_saved=is_saved, n_readers=n_readers(beside_others))
            )

    def save(self, turn: Turn) -> Mapping[str, Any]:
        if turn.base.number == UNKNOWN_VERSION:
            raise DatabaseFailed(f"the versions of agent {turn.agent_id!r} could not be read")
        try:
            saved, n_bytes = self._turns.save(turn)
        except AgentVersionConflict:
            self.budget.saved(turn.agent_id, 0)
            raise
        except Damaged as error:
            log_way_on(turn.agent_id, error)
            raise DatabaseFailed(str(error)) from error
        except OSError as error:
            self._database.outage.met(f"the store: {error}")
            raise
        self._agents.unsaved.discard(turn.agent_id)
        self.ram_cache.saved(turn)
        self.budget.saved(turn.agent_id, n_bytes)
        return saved.result

    def close_number(self, agent_id: str) -> None:
        """No earlier run's turn can arrive later."""

    def save_blocks(
        self, token_ids: tuple[int, ...], cache: CacheSlice, *, model: LoadedModel, salt: str | None
    ) -> None:
        chain = BlockChain(model.fingerprint, salt, token_ids)
        try:
            with self.budget.holds.lending(chain.addresses):
                sizes = self._blocks.save(chain, cache, model.spec)
                self._database.commit(partial(cache_index.add_blocks, chain=chain, sizes=sizes, now=time.time()))
        except (OSError, Damaged) as error:
            self.budget.not_saved(None, chain.paths(self._blocks.path_of))
            raise DatabaseFailed(str(error)) from error
        self.budget.saved(None, sum(sizes.values()) + LOG_BYTES)

    def ended(self, agent_id: str, delivery: Delivery, *, remember_s: float) -> None:
        self._notes.ended(agent_id, deliveries.delivery_key(agent_id, delivery), time.time() + remember_s)

    def mark_unsaved(self, agent_id: str) -> None:
        self.ram_cache.drop(agent_id)
        try:
            self._agents.unsaved.add(agent_id)
        except OSError:  # a note is worth more than cache
            self.budget.free(LOG_BYTES)
            self._agents.unsaved.add(agent_id)

    def pin(self, running: frozenset[str], waiting: frozenset[str], *, is_all: bool = True) -> None:
        self._in_flight.pin(running)
        self.budget.holds.pin(running, waiting, is_all=is_all)
        self.ram_cache.pin(running, waiting)

    def order_by(self, place_of: PlaceOf) -> None:
        self.budget.place_of = self.ram_cache.place_of = place_of

    def is_away(self) -> bool:
        return False

    def brought_in(self, agent_id: str) -> None:
        """The agent's newest version has come from another worker."""
        self.ram_cache.drop(agent_id)
        self._agents.unsaved.discard(agent_id)

    def is_at_hand(self, agent_id: str) -> bool:
        return self._read_ahead.is_at_hand(agent_id)

    def model_loaded(self, model: LoadedModel) -> None:
        self._read_ahead.model_loaded(model)

    def read_ahead(self, agents: Sequence[str]) -> None:
        self._read_ahead.next(agents)

    def start_upkeep(self) -> None:
        """Start the thread that keeps the store small and its books right."""
        self._upkeep.start()

    def close(self) -> None:
        """Log this run's misses, and unlock the folder. Every save was durable when it returned."""
        self._read_ahead.close()
        if misses := ", ".join(f"{n_times} {reason}" for reason, n_times in self.misses.most_common()):
            _log.info("cache misses since the store was opened: %s", misses)
        self._upkeep.close()
        self._notes.write()  # never raises, and nor does this:
        self._agents.unsaved.move_all()
        self._close_files()

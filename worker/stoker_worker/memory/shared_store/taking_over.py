"""Makes an agent here what the shared store has of it. Any thread; the caller keeps others off the agent."""

import logging
import time
from functools import partial

from stoker_shared.errors import AgentTranscriptUnreadable
from stoker_worker.memory import unshared
from stoker_worker.memory.budget import DiskBudget
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.forget import forget_agent
from stoker_worker.memory.ram_cache import RamCache
from stoker_worker.memory.shared_store.fetching import Fetching
from stoker_worker.memory.shared_store.local_agent import LocalAgent, adopt, checksum_of, lose
from stoker_worker.memory.store_parts import StoreParts
from stoker_worker.ports import AgentVersion

_log = logging.getLogger(__name__)


class TakingOver:
    def __init__(self, parts: StoreParts, fetching: Fetching, budget: DiskBudget, ram_cache: RamCache) -> None:
        self._parts = parts
        self._database = parts.database
        self._fetching = fetching
        self._budget = budget
        self._ram_cache = ram_cache

    def take_over(self, agent_id: str, local: LocalAgent, newest: int, *, anew: bool = False) -> None:
        """Make version `newest` of the shared store the agent's newest here.

        Args:
            local: the agent as it is here.
            anew: nothing that is here is of use.

        Raises:
            AgentTranscriptUnreadable: it is damaged there; here the agent is at that number now, without it.
            AgentVersionConflict: the agent has changed here meanwhile.
            BucketAway: nothing has changed.
            OSError, Damaged: the database cannot be read or written.
        """
        began = time.perf_counter()

        def here(version: int) -> bytes | None:
            with self._database.snapshot() as connection:
                return None if anew else checksum_of(connection, local, version)

        try:
            chain, follows = self._fetching.chain(agent_id, newest, 0 if anew else local.version, here)
            if chain[-1].record is None:
                self._forget(agent_id)
            else:
                self._database.commit(partial(adopt, versions=chain, local=local, keeps_before=follows))
        except Damaged as damage:
            self._database.commit(partial(lose, agent_id=agent_id, version=newest))
            problem = f"the transcript of agent {agent_id!r} in the shared store: {damage}"
            raise AgentTranscriptUnreadable(problem, usable=AgentVersion(agent_id, newest, None)) from damage
        finally:
            self._ram_cache.drop(agent_id)
        self._parts.pieces.remove(self._parts.pieces.paths(agent_id, local.version))
        _log.info("agent %r: brought in version %d in %.3f s", agent_id, newest, time.perf_counter() - began)

    def _forget(self, agent_id: str) -> None:
        """Another worker has."""
        is_held = partial(self._budget.holds.is_held, but_by=agent_id)
        forget_agent(self._parts, agent_id, is_held=is_held, only_here=True)
        self._database.commit(partial(unshared.drop, agent_id=agent_id))

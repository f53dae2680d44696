"""Lists a store's agents and the blocks that each uses. Reads records only, changes nothing; also beside a worker.

An agent uses the blocks of its newest version's cached tokens. The blocks of an agent that cannot be read are unknown:
they count as unused, which costs time and nothing else.
"""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.agent_folder import agent_id_in
from stoker_worker.memory.block_chain import PathOf
from stoker_worker.memory.disk_usage import agent_folders
from stoker_worker.memory.record import AgentState, CachedPrefix, TurnRecord
from stoker_worker.ports import AgentVersion


@dataclass(frozen=True)
class AgentIndexEntry:
    """One agent of a store.

    Attributes:
        agent_id: ``None`` when no record of it can be read.
        blocks: files of its newest version's full blocks in order of the chain, whether they are there or not.
    """

    folder: Path
    agent_id: str | None
    state: AgentState
    blocks: tuple[Path, ...]

    @property
    def is_unsaved(self) -> bool:
        """Its last turn is not in its transcript; what is there can be read."""
        return self.state.problem is not None and os.path.lexists(self.folder / "HEAD.unsaved")

    @property
    def knows_blocks(self) -> bool:
        return self.state.problem is None or self.state.version.transcript is not None


def read_agent_index(store: StoreAccess) -> list[AgentIndexEntry]:
    """Every agent, the unreadable ones too; without those whose first turn was never committed."""
    entries = []
    for folder in agent_folders(store.agents):
        agent_id = agent_id_in(folder)
        if agent_id is not None:
            state = store.agent(agent_id).read_settled()
        else:
            state = AgentState(AgentVersion("", 0, None), problem="no record can be read" if _is_lost(folder) else None)
        if state.version.number or state.problem is not None:
            entries.append(AgentIndexEntry(folder, agent_id, state, newest_blocks(state, store.blocks.path_of)))
    return entries


def users_of(entries: Iterable[AgentIndexEntry]) -> Counter[Path]:
    """How many agents use each block."""
    return Counter(path for entry in entries for path in entry.blocks)


def newest_blocks(state: AgentState, path_of: PathOf) -> tuple[Path, ...]:
    """The blocks of an agent's newest version, in order of the chain."""
    transcript = state.version.transcript
    return state.cache.chain(transcript.token_ids).paths(path_of) if transcript and state.cache else ()


def history_blocks(records: Iterable[TurnRecord], path_of: PathOf) -> frozenset[Path]:
    """The blocks of every version in `records` (oldest first, some may be missing) that can be replayed."""
    found: set[Path] = set()
    tokens: list[int] = []
    caches: dict[tuple[str, str | None], CachedPrefix] = {}
    last = 0
    for record in records:
        follows = record.keeps_nothing or (record.version == last + 1 and record.keep_tokens <= len(tokens))
        if not follows or record.keep_tokens < len(tokens):
            # Hashed once for each run of versions that only grew, not once for each version.
            found.update(path for cache in caches.values() for path in cache.chain(tuple(tokens)).paths(path_of))
            caches.clear()
        if not follows:
            continue
        last = record.version
        tokens[record.keep_tokens :] = record.new_tokens
        if record.cache is not None:
            key = record.cache.model, record.cache.salt
            if key not in caches or caches[key].tokens < record.cache.tokens:
                caches[key] = record.cache
    found.update(path for cache in caches.values() for path in cache.chain(tuple(tokens)).paths(path_of))
    return frozenset(found)


def _is_lost(folder: Path) -> bool:
    """Whether there were turns in a folder without a readable record."""
    try:
        names = os.listdir(folder)
    except NotADirectoryError:
        return False
    except OSError:
        return True
    return "HEAD.unsaved" in names or any(name.endswith(".json") for name in names)

"""Who is in a store, and which blocks each agent uses. Reads records only, changes nothing; also beside a worker.

An agent uses the blocks of its newest version, named by its cached tokens. What an agent that cannot be read used is
not known: blocks only save time, so not knowing is never wrong.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stoker_worker.memory.agent_folder import AgentFolder
from stoker_worker.memory.agent_state import AgentState
from stoker_worker.memory.block_paths import PathOf, cached_blocks
from stoker_worker.memory.disk_usage import agent_folders, entries_of
from stoker_worker.memory.record import CachedPrefix, TurnRecord
from stoker_worker.ports import AgentVersion

if TYPE_CHECKING:
    from stoker_worker.memory.access import StoreAccess

_MOST_READS: Final = 5


@dataclass(frozen=True)
class AgentEntry:
    """One agent of a store.

    Attributes:
        folder: where it is.
        agent_id: ``None`` when none of its records says it.
        state: as read; `state.problem` says why it cannot be sure of its transcript.
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


def take_census(store: "StoreAccess") -> list[AgentEntry]:
    """Every agent, also those that cannot be read; not those whose first turn was never committed."""
    entries = []
    for folder in agent_folders(store.agents):
        agent_id = agent_id_in(folder)
        if agent_id is not None:
            state = read_settled(store.agent(agent_id))
        else:
            state = AgentState(AgentVersion("", 0, None), problem="no record can be read" if _is_lost(folder) else None)
        if state.version.number or state.problem is not None:
            entries.append(AgentEntry(folder, agent_id, state, newest_blocks(state, store.blocks.path_of)))
    return entries


def users_of(entries: Iterable[AgentEntry]) -> Counter[Path]:
    """How many agents use each block."""
    return Counter(path for entry in entries for path in entry.blocks)


def newest_blocks(state: AgentState, path_of: PathOf) -> tuple[Path, ...]:
    """The blocks of an agent's newest version, in order of the chain."""
    transcript = state.version.transcript
    return cached_blocks(state.cache, transcript.token_ids, path_of) if transcript else ()


def history_blocks(records: Iterable[TurnRecord], path_of: PathOf) -> frozenset[Path]:
    """The blocks of every version that `records` (oldest first, some may be missing) still tell of."""
    found: set[Path] = set()
    tokens: list[int] = []
    caches: dict[tuple[str, str | None], CachedPrefix] = {}
    last = 0
    for record in records:
        follows = record.keeps_nothing or (record.version == last + 1 and record.keep_tokens <= len(tokens))
        if not follows or record.keep_tokens < len(tokens):
            # Hashed once for each run of versions that only grew, not once for each version.
            found.update(path for cache in caches.values() for path in cached_blocks(cache, tuple(tokens), path_of))
            caches.clear()
        if not follows:
            continue
        last = record.version
        tokens[record.keep_tokens :] = record.new_tokens
        if record.cache is not None:
            key = record.cache.model, record.cache.salt
            if key not in caches or caches[key].tokens < record.cache.tokens:
                caches[key] = record.cache
    found.update(path for cache in caches.values() for path in cached_blocks(cache, tuple(tokens), path_of))
    return frozenset(found)


def read_settled(folder: AgentFolder) -> AgentState:
    """The agent's state, read again when a worker moved its HEAD meanwhile."""
    for _ in range(_MOST_READS):
        head = folder.read_head()
        state = folder.read()
        if state.problem is None or folder.read_head() == head:
            break
    return state


def _is_lost(folder: Path) -> bool:
    """Whether an agent's turns were in a folder that says no agent; a stray file is none."""
    try:
        names = os.listdir(folder)
    except NotADirectoryError:
        return False
    except OSError:
        return True
    return "HEAD.unsaved" in names or any(name.endswith(".json") for name in names)


def agent_id_in(folder: Path) -> str | None:
    """Whose folder it is: said by the first record that can be read and hashes to the folder's name."""
    for path in sorted(Path(entry.path) for entry in entries_of(folder) if entry.name.endswith(".json")):
        try:
            agent_id = json.loads(path.read_bytes().partition(b"\n")[2])["agent_id"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(agent_id, str) and hashlib.sha256(agent_id.encode()).hexdigest() == folder.name:
            return agent_id
    return None

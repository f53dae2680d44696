"""Forgets one agent: its transcript, and every block that only this agent used. The store must be held."""

from dataclasses import dataclass

from stoker_shared.errors import AgentNotFound
from stoker_worker.memory.access import StoreAccess
from stoker_worker.memory.census import history_blocks, newest_blocks, take_census
from stoker_worker.memory.gc import remove_blocks


@dataclass(frozen=True)
class Removed:
    """Blocks that went with the agent, and those left to others that use them; `block_bytes` of the former."""

    blocks: int
    block_bytes: int
    shared_blocks: int


def remove_agent(store: StoreAccess, agent_id: str) -> Removed:
    """Remove the agent for good, its older versions' blocks included. After a crash it is there whole or not at all.

    Raises:
        AgentNotFound: there is no such agent.
        OSError: it could not be removed, or not all of its blocks, which `gc` then finds.
    """
    folder = store.agent(agent_id)
    if not folder.path.is_dir():
        raise AgentNotFound(f"there is no agent {agent_id!r}")
    path_of = store.blocks.path_of
    used = history_blocks(folder.read_records().values(), path_of).union(newest_blocks(folder.read(), path_of))
    others = {path for entry in take_census(store) if entry.folder != folder.path for path in entry.blocks}
    store.discard(folder.path)
    shared = sum(path.exists() for path in used & others)  # some may be evicted, and some models have no blocks at all
    return Removed(*remove_blocks(store, used - others), shared)

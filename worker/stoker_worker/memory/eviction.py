"""Plans which cache files to remove from a store that is over its budget, and removes them. Under the budget's lock.

First the blocks that no agent uses, then the cache of the least recently used agents. Never cache of an agent with
work, never a held block, never a transcript. The plan is pure policy: the usage alone decides.
"""

import os
from collections import Counter
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker_worker.memory.disk_usage import agent_use, allocated_bytes, pieces_in
from stoker_worker.memory.files import Files
from stoker_worker.memory.usage import StoreUsage


@dataclass(frozen=True)
class Plan:
    """The files to remove.

    Attributes:
        blocks: in this order.
        agents: folders of the agents that lose cache they use; their tails and snapshots go too.
    """

    blocks: tuple[Path, ...] = ()
    agents: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.blocks or self.agents)


def plan_eviction(
    usage: StoreUsage,
    *,
    need_bytes: int,
    pinned: AbstractSet[str],
    held: AbstractSet[Path],
    unused_before: float = float("-inf"),
    most_blocks: int = 2**31,
) -> Plan:
    """Enough files to free `need_bytes`, or all that may go.

    Args:
        pinned: ids of agents that lose nothing.
        held: blocks that stay in any case.
        unused_before: blocks without a user since then go even when no bytes are needed.
        most_blocks: the plan has no more than that; another one can follow.
    """
    blocks: dict[Path, None] = {}
    freed = 0
    for path, since in usage.unused_since.items():
        if len(blocks) >= most_blocks or (freed >= need_bytes and since > unused_before):
            break
        if path not in held:
            blocks[path] = None
            freed += usage.blocks[path]
    seen: list[Path] = []
    users_seen: Counter[Path] = Counter()
    for folder, agent in usage.least_recently_used() if freed < need_bytes else ():
        if freed >= need_bytes or len(blocks) >= most_blocks:
            break
        if agent.agent_id in pinned:
            continue
        seen.append(folder)
        users_seen.update(agent.blocks)
        freed += agent.folder.piece_bytes
        for path in reversed(agent.blocks):  # the rest of a chain is of use from its start only
            if freed >= need_bytes or len(blocks) >= most_blocks:
                break
            if path in usage.blocks and path not in held and users_seen[path] == usage.n_users(path):
                blocks[path] = None
                freed += usage.blocks[path]
    losing = (
        folder
        for folder in seen
        if usage.agents[folder].folder.piece_bytes or any(path in blocks for path in usage.agents[folder].blocks)
    )
    return Plan(tuple(blocks), tuple(losing))


def carry_out(plan: Plan, usage: StoreUsage, files: Files) -> None:
    """Remove what the plan names. Raises `OSError`; the usage is then of what is left."""
    for folder in plan.agents:
        try:
            for path in pieces_in(folder):
                files.remove(path)
        finally:
            usage.set_agent(folder, usage.agents[folder].agent_id, agent_use(folder, usage.folder_use(folder)))
    for path in plan.blocks:
        try:
            files.remove(path)
        finally:
            usage.set_block(path, allocated_bytes(path))
    for path in {path.parent for path in plan.blocks}:
        usage.set_other(path, allocated_bytes(path))


def remove_empty_folders(blocks: Path, usage: StoreUsage) -> None:
    """Only while nothing is saved: a save makes a block's folder first, and then the block."""
    for name, _, _ in os.walk(blocks, topdown=False):
        folder = Path(name)
        with suppress(OSError):  # not empty
            if folder != blocks:
                folder.rmdir()
        usage.set_other(folder, allocated_bytes(folder))

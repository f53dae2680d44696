"""Which cache pieces go when a store is over its budget. Pure policy: no I/O, decides on a ledger alone.

First blocks that no agent uses; then what only agents use that were not used for longest. Never what an agent with
work uses, never what is held, never a transcript.
"""

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from stoker_worker.memory.ledger import Ledger


@dataclass(frozen=True)
class Plan:
    """What is to be removed.

    Attributes:
        blocks: files, in this order.
        agents: folders of those that lose cache they may have counted on; their tails and snapshots go too.
    """

    blocks: tuple[Path, ...] = ()
    agents: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.blocks or self.agents)


def plan_eviction(
    ledger: Ledger,
    *,
    need_bytes: int,
    protected: AbstractSet[str],
    held: AbstractSet[Path],
    unused_before: float = float("-inf"),
    most_blocks: int = 2**31,
) -> Plan:
    """Enough to free `need_bytes`, or all that may go.

    Args:
        protected: ids of agents that lose nothing.
        held: blocks that stay, whoever uses them.
        unused_before: blocks without a user since then go even when nothing is needed.
        most_blocks: stop there; what is left is for the next plan.
    """
    blocks: dict[Path, None] = {}
    freed = 0
    for path, since in ledger.unused_since.items():
        if len(blocks) >= most_blocks or (freed >= need_bytes and since > unused_before):
            break
        if path not in held:
            blocks[path] = None
            freed += ledger.blocks[path]
    seen: list[Path] = []
    users_seen: Counter[Path] = Counter()
    for folder, agent in ledger.least_recently_used() if freed < need_bytes else ():
        if freed >= need_bytes or len(blocks) >= most_blocks:
            break
        if agent.agent_id in protected:
            continue
        seen.append(folder)
        users_seen.update(agent.blocks)
        freed += agent.folder.piece_bytes
        for path in reversed(agent.blocks):  # what is left of a chain must still begin at its start
            if freed >= need_bytes or len(blocks) >= most_blocks:
                break
            if path in ledger.blocks and path not in held and users_seen[path] == ledger.n_users(path):
                blocks[path] = None
                freed += ledger.blocks[path]
    losing = (
        folder
        for folder in seen
        if ledger.agents[folder].folder.piece_bytes or any(path in blocks for path in ledger.agents[folder].blocks)
    )
    return Plan(tuple(blocks), tuple(losing))

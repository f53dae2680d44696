"""Plans which cache files to remove from a store that is over its budget. Reads the index, removes nothing.

First the blocks that no agent uses, then the cache of the least recently used agents. Never cache of an agent with
work, never a held block, never a transcript.
"""

from collections import Counter
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from stoker_worker.memory import agent_table, cache_index
from stoker_worker.memory.agent_row import AgentRow
from stoker_worker.memory.cache_index import Block
from stoker_worker.memory.connection import Connection

HAS_CACHE = "(piece_bytes > 0 OR last_block IS NOT NULL)"
"""As in the index `agents_with_cache`."""


@dataclass(frozen=True)
class Plan:
    """The files to remove.

    Attributes:
        blocks: in this order.
        agents: those that lose cache they use; their tails and snapshots go too.
        released: of them those that give up the rest of their chains, which others use as well: when those are evicted
            too, nothing keeps it.
    """

    blocks: tuple[Block, ...] = ()
    agents: tuple[AgentRow, ...] = ()
    released: tuple[AgentRow, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.blocks or self.agents)


def plan_unused(
    connection: Connection, *, need_bytes: int, held: AbstractSet[str], unused_before: float, most: int
) -> Plan:
    """Blocks that nothing refers to: enough to free `need_bytes`, and in any case those unused since `unused_before`.
    Another plan may find more: a block is unused once the one that follows it is gone."""
    before = None if need_bytes > 0 else unused_before
    blocks: list[Block] = []
    freed = 0
    for block in cache_index.unused_blocks(connection, limit=most + len(held), before=before):
        if len(blocks) >= most or (before is None and freed >= need_bytes):
            break
        if block.address not in held:
            blocks.append(block)
            freed += block.n_bytes
    return Plan(tuple(blocks))


def plan_agents(
    connection: Connection, *, need_bytes: int, pinned: Collection[str], held: AbstractSet[str], most: int
) -> Plan:
    """Cache of the least recently used agents, to free `need_bytes`: their tails and snapshots, and blocks from the end
    of their chains, because the rest of a chain is of use from its start only."""
    blocks: dict[str, Block] = {}
    losing: list[AgentRow] = []
    released: list[AgentRow] = []
    gone: Counter[str] = Counter()
    freed = 0
    for row in agent_table.each_agent_row(connection, f"WHERE {HAS_CACHE} ORDER BY last_used"):
        if freed >= need_bytes or len(blocks) >= most or len(losing) >= most:
            break
        if row.agent_id in pinned:
            continue
        losing.append(row)
        freed += row.piece_bytes
        if row.last_block is not None:
            gone[row.last_block.hex()] += 1
        for block in cache_index.chain_back(connection, row.last_block):
            if freed >= need_bytes or len(blocks) >= most:
                break
            if gone[block.address] != block.n_users or block.address in held:
                released.append(row)
                break
            if block.address not in blocks:
                blocks[block.address] = block
                gone[block.parent] += 1
                freed += block.n_bytes
    agents = (row for row in losing if row.piece_bytes or row in released or _loses(row, blocks))
    return Plan(tuple(blocks.values()), tuple(agents), tuple(released))


def _loses(row: AgentRow, blocks: Collection[str]) -> bool:
    return row.last_block is not None and row.last_block.hex() in blocks

"""Plans which cache files to remove from a store that is over its budget. Reads the index, removes nothing.

First the blocks that no agent uses, then the cache of the least recently used agents without work, then that of waiting
agents, the one needed last first. Never cache of a running agent, never a held block, never a transcript.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from stoker_worker.memory import agent_table, cache_index
from stoker_worker.memory.agent_row import AgentRow
from stoker_worker.memory.cache_index import HAS_CACHE, Block
from stoker_worker.memory.connection import Connection
from stoker_worker.ports import PlaceOf


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


def idle_rows(connection: Connection, with_work: Collection[str]) -> Iterator[AgentRow]:
    """Agents with cache and without work, the least recently used first."""
    rows = agent_table.agent_rows(connection, f"WHERE {HAS_CACHE} ORDER BY last_used")
    return (row for row in rows if row.agent_id not in with_work)


def waiting_agents(connection: Connection, waits: Callable[[str], bool], place_of: PlaceOf) -> list[str]:
    """Agents with cache that wait, the one needed last at the end."""
    found = connection.execute(f"SELECT agent_id FROM agents WHERE {HAS_CACHE}")
    return sorted((name for (name,) in found if isinstance(name, str) and waits(name)), key=place_of)


def take_rows(connection: Connection, agents: list[str], is_running: Callable[[str], bool]) -> Iterator[AgentRow]:
    """Those of `agents` that still have cache and do not run, from the end of the list, which they leave."""
    while agents:
        agent_id = agents.pop()
        if not is_running(agent_id):
            yield from agent_table.agent_rows(connection, f"WHERE agent_id = ? AND {HAS_CACHE}", (agent_id,))


def plan_agents(
    connection: Connection, rows: Iterable[AgentRow], *, need_bytes: int, held: AbstractSet[str], most: int
) -> Plan:
    """Cache of these agents, in this order, to free `need_bytes`: their tails and snapshots, and blocks from the end of
    their chains, because the rest of a chain is of use from its start only."""
    blocks: dict[str, Block] = {}
    losing: list[AgentRow] = []
    released: list[AgentRow] = []
    gone: Counter[str] = Counter()
    freed = 0
    for row in rows if need_bytes > 0 else ():
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
        if freed >= need_bytes or len(blocks) >= most or len(losing) >= most:
            break
    agents = (row for row in losing if row.piece_bytes or row in released or _loses(row, blocks))
    return Plan(tuple(blocks.values()), tuple(agents), tuple(released))


def _loses(row: AgentRow, blocks: Collection[str]) -> bool:
    return row.last_block is not None and row.last_block.hex() in blocks

"""Eviction plans over an index without files: what a plan costs, and what it must leave."""

import hashlib
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

from stoker_worker.memory import cache_index, eviction
from stoker_worker.memory.database import Connection
from stoker_worker.memory.database_file import TABLES
from stoker_worker.memory.eviction import Plan, idle_rows, plan_agents, plan_unused
from stoker_worker.memory.transcripts import insert_agent

BLOCK = 100
ALL = 10**9


class Index:
    """An index of agents and their blocks. A block is a letter, and follows the one before it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def add(self, name: str, blocks: str, *, used_at: float) -> int:
        """An agent with a chain of blocks, and 10 bytes of pieces."""
        row = insert_agent(self.connection, name, last_used=used_at)
        cache_index.set_piece_bytes(self.connection, row.number, 10)
        self.use(row.number, blocks)
        return row.number

    def use(self, number: int, blocks: str, now: float = 0.0) -> None:
        chain: Any = Letters(tuple(map(address_of, blocks)))
        cache_index.add_blocks(self.connection, chain, dict.fromkeys(range(len(blocks)), BLOCK), now=now)
        cache_index.use_chain(self.connection, number, chain, now=now)

    def plan(self, need: int, *pinned: str) -> Plan:
        return plan_agents(self.connection, idle_rows(self.connection, pinned), need_bytes=need, held=set())

    def unused(self, need: int) -> Plan:
        return plan_unused(self.connection, need_bytes=need, held=set(), unused_before=-1.0)

    def carry_out(self, plan: Plan) -> None:
        for row in plan.agents:
            cache_index.note_evicted(self.connection, row, released=row in plan.released, now=0.0)
        for block in plan.blocks:
            cache_index.remove_block(self.connection, block.address)

    def left_bytes(self) -> int:
        return cache_index.cache_bytes(self.connection)


def address_of(letter: str) -> str:
    return hashlib.sha256(letter.encode()).hexdigest()


class Letters:
    """As much of a `BlockChain` as the index looks at."""

    model = "f" * 64

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        self.n_blocks = len(addresses)

    def parent(self, index: int) -> str:
        return self.addresses[index - 1] if index else "00" * 32


@pytest.fixture
def index() -> Iterator[Index]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(TABLES)
    yield Index(connection)
    connection.close()


def test_what_was_saved_since_the_plan_stays(index: Index) -> None:
    index.add("one", "ab", used_at=1)
    plan = index.plan(1)
    index.connection.execute("UPDATE agents SET version = 1")
    index.carry_out(plan)
    assert index.left_bytes() == 210


def test_no_plan_reads_more_of_a_large_store_than_it_needs(index: Index) -> None:
    """SQLite's own counter: with 3,000 agents a plan takes about as many steps as with 300."""

    def steps_of(n_agents: int) -> list[int]:
        agents = [index.add(f"{n_agents} {n}", f"{n % 50:c}ab", used_at=n) for n in range(n_agents)]
        index.use(agents[0], "", now=1.0)
        steps: list[int] = []

        def count() -> None:
            steps[-1] += 1

        index.connection.set_progress_handler(count, 10)  # type: ignore[attr-defined]
        for act in (
            lambda: index.plan(300),
            lambda: index.unused(300),
            lambda: cache_index.note_unused(index.connection, address_of("b"), now=2.0),
        ):
            steps.append(0)
            act()
        index.connection.set_progress_handler(None, 0)  # type: ignore[attr-defined]
        return steps

    few = steps_of(300)
    assert all(many < 2 * some + 20 for some, many in zip(few, steps_of(3000), strict=True))


def test_agents_that_share_their_last_block_do_not_keep_others_from_eviction(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "_AT_ONCE", 4)
    for number in range(20):
        index.add(f"shared {number:2}", "ab", used_at=number)
    index.add("own", "xy", used_at=30)
    for _ in range(20):
        index.carry_out(index.plan(ALL, "shared 19"))
        index.carry_out(index.unused(ALL))
    assert index.left_bytes() == 210  # the pinned agent's
    index.carry_out(index.plan(ALL))
    index.carry_out(index.unused(ALL))
    assert index.left_bytes() == 0

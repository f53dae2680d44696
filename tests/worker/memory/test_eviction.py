"""Eviction plans: the order, and the files that are never evicted."""

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


class Index:
    """An index of agents and their blocks. A block is a letter, and follows the one before it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.letters: dict[str, str] = {}

    def address(self, letter: str) -> str:
        address = hashlib.sha256(letter.encode()).hexdigest()
        self.letters[address] = letter
        return address

    def add(self, name: str, blocks: str, *, used_at: float) -> None:
        """An agent with a chain of blocks, and 10 bytes of pieces."""
        row = insert_agent(self.connection, name, last_used=used_at)
        cache_index.set_piece_bytes(self.connection, row.number, 10)
        self.use(name, blocks)

    def use(self, name: str, blocks: str, now: float = 0.0) -> None:
        (number,) = self.connection.execute("SELECT number FROM agents WHERE agent_id = ?", (name,)).fetchone()
        cache_index.add_blocks(self.connection, self.chain(blocks), dict.fromkeys(range(len(blocks)), BLOCK), now=now)
        cache_index.use_chain(self.connection, number, self.chain(blocks), now=now)

    def chain(self, blocks: str) -> Any:
        return Letters(tuple(map(self.address, blocks)))

    def named(self, plan: Plan) -> tuple[str, str]:
        blocks = "".join(self.letters[block.address] for block in plan.blocks)
        return blocks, " ".join(row.agent_id for row in plan.agents)

    def unused(self, need: int, held: str = "", *, unused_before: float = -1.0) -> str:
        addresses = frozenset(map(self.address, held))
        return self.named(plan_unused(self.connection, need_bytes=need, held=addresses, unused_before=unused_before))[0]

    def agents(self, need: int, pinned: str = "", held: str = "") -> tuple[str, str]:
        addresses = frozenset(map(self.address, held))
        return self.named(plan_agents(self.connection, self.idle(*pinned.split()), need_bytes=need, held=addresses))

    def idle(self, *pinned: str) -> Any:
        return idle_rows(self.connection, pinned)

    def carry_out(self, plan: Plan) -> None:
        for row in plan.agents:
            released = row in plan.released
            cache_index.note_evicted(self.connection, row, released=released, now=0.0)
        for block in plan.blocks:
            cache_index.remove_block(self.connection, block.address)


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
    plan = plan_agents(index.connection, index.idle(), need_bytes=1, held=set())
    index.connection.execute("UPDATE agents SET version = 1")
    index.carry_out(plan)
    assert cache_index.cache_bytes(index.connection) == 210


@pytest.mark.parametrize("after", ["plan", "look for unused blocks", "an agent's end"])
def test_no_plan_reads_more_of_a_large_store_than_it_needs(index: Index, after: str) -> None:
    """SQLite's own counter: with 3,000 agents a plan takes about as many steps as with 300."""

    def steps_with(n_agents: int) -> int:
        for number in range(n_agents):
            index.add(f"{n_agents} {number}", f"{number % 50:c}ab", used_at=number)
        index.use(f"{n_agents} 0", "", now=1.0)
        steps = [0]

        def count() -> None:
            steps[0] += 1

        index.connection.set_progress_handler(count, 10)  # type: ignore[attr-defined]
        if after == "plan":
            index.agents(300)
        elif after == "look for unused blocks":
            index.unused(300)
        else:
            cache_index.note_unused(index.connection, index.address("b"), now=2.0)
        index.connection.set_progress_handler(None, 0)  # type: ignore[attr-defined]
        return steps[0]

    few = steps_with(300)
    assert steps_with(3000) < 2 * few + 20


def test_agents_that_share_their_last_block_do_not_keep_others_from_eviction(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "_AT_ONCE", 4)
    for number in range(20):
        index.add(f"shared {number:2}", "ab", used_at=number)
    index.add("own", "xy", used_at=30)
    for _ in range(20):
        index.carry_out(plan_agents(index.connection, index.idle("shared 19"), need_bytes=10**9, held=set()))
        index.carry_out(plan_unused(index.connection, need_bytes=10**9, held=set(), unused_before=-1.0))
    assert cache_index.cache_bytes(index.connection) == 210  # the pinned agent's
    index.carry_out(plan_agents(index.connection, index.idle(), need_bytes=10**9, held=set()))
    index.carry_out(plan_unused(index.connection, need_bytes=10**9, held=set(), unused_before=-1.0))
    assert cache_index.cache_bytes(index.connection) == 0

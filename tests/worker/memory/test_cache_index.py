"""The index of cache files against a plain model of it: who refers to a block, and how many bytes there are."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.database import Connection
from stoker_worker.memory.database_file import make_tables
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

AGENTS = 3
MODEL = "ab" * 32


def chain_of(letters: str, rest: int = 0) -> BlockChain:
    """A chain whose blocks are named by letters: chains that begin with the same ones share blocks."""
    tokens = [ord(letter) for letter in letters for _ in range(BLOCK_TOKENS)]
    return BlockChain(MODEL, None, (*tokens, *range(rest)))


@dataclass
class Model:
    """The index as sets and dicts."""

    sizes: dict[str, int] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    ends: dict[int, str | None] = field(default_factory=lambda: dict.fromkeys(range(1, AGENTS + 1)))
    pieces: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(1, AGENTS + 1), 0))
    unused_since: dict[str, float] = field(default_factory=dict)

    def is_used(self, address: str) -> bool:
        return address in self.ends.values() or any(self.parents[child] == address for child in self.sizes)

    def settle(self, now: float, also: dict[str, float] | None = None) -> None:
        for address in self.sizes:
            if self.is_used(address):
                self.unused_since.pop(address, None)
            else:
                self.unused_since.setdefault(address, (also or {}).get(address, now))
        for address in [address for address in self.unused_since if address not in self.sizes]:
            del self.unused_since[address]

    def add(self, chain: BlockChain, sizes: dict[int, int]) -> None:
        for index, n_bytes in sizes.items():
            self.sizes[chain.addresses[index]] = n_bytes
            self.parents[chain.addresses[index]] = chain.parent(index)

    def use(self, agent: int, chain: BlockChain | None) -> None:
        known = [address for address in (chain.addresses if chain else ()) if address in self.sizes]
        self.ends[agent] = known[-1] if known else None

    def remove(self, address: str) -> None:
        parent = self.parents[address]
        del self.sizes[address]
        for agent, end in self.ends.items():
            if end == address:
                self.ends[agent] = parent if parent in self.sizes else None

    def chain_back(self, end: str | None) -> list[str]:
        return [] if end is None or end not in self.sizes else [end, *self.chain_back(self.parents[end])]


def check(connection: Connection, model: Model) -> None:
    rows = connection.execute("SELECT hex(address), hex(parent), n_bytes, unused_since FROM blocks").fetchall()
    assert {row[0].lower(): row[2] for row in rows} == model.sizes
    assert all(row[1].lower() == model.parents[row[0].lower()] for row in rows)
    assert {row[0].lower(): row[3] for row in rows if row[3] is not None} == model.unused_since
    ends = connection.execute("SELECT number, lower(hex(last_block)) FROM agents").fetchall()
    assert {number: end or None for number, end in ends} == model.ends
    assert cache_index.cache_bytes(connection) == sum(model.sizes.values()) + sum(model.pieces.values())
    unused = cache_index.unused_blocks(connection, limit=100)
    assert {block.address for block in unused} == model.unused_since.keys()
    assert [model.unused_since[block.address] for block in unused] == sorted(model.unused_since.values())
    for end in model.ends.values():
        chain = [block.address for block in cache_index.chain_back(connection, bytes.fromhex(end) if end else None)]
        assert chain == model.chain_back(end)
        for block in cache_index.chain_back(connection, bytes.fromhex(chain[0]) if chain else None):
            users = list(model.ends.values()).count(block.address)
            users += sum(model.parents[child] == block.address for child in model.sizes)
            assert (block.n_users, block.n_bytes) == (users, model.sizes[block.address])


agents = st.integers(1, AGENTS)
chains = st.text("xy", max_size=4)
operations = st.one_of(
    st.tuples(st.just("save"), agents, chains, st.integers(0, 3), st.integers(1, 9)),
    st.tuples(st.just("save without cache"), agents, st.none() | chains),
    st.tuples(st.just("lend"), chains, st.integers(1, 9)),
    st.tuples(st.just("pieces"), agents, st.integers(0, 9)),
    st.tuples(st.just("evict"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("release"), agents),
    st.tuples(st.just("missing"), st.integers(0, 9)),
    st.tuples(st.just("sizes"), st.integers(0, 9), st.integers(1, 9)),
)


@settings(max_examples=300)
@given(st.lists(operations, max_size=25))
def test_the_index_agrees_with_a_plain_model_after_any_operations(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        make_tables(connection)
        for number in range(AGENTS):
            transcripts.insert_agent(connection, f"agent {number}", last_used=0)
        model = Model()
        for now, (kind, *step) in enumerate(steps, start=1):
            aged: dict[str, float] = {}
            if kind == "save":
                agent, letters, start, n_bytes = step
                chain = chain_of(letters, rest=3)
                first = min(start, sum(address in model.sizes for address in chain.addresses))
                sizes = {index: n_bytes + index for index in range(first, chain.n_blocks)}
                cache_index.add_blocks(connection, chain, sizes, now=now)
                cache_index.use_chain(connection, agent, chain, now=now)
                model.add(chain, sizes)
                model.use(agent, chain)
            elif kind == "save without cache":
                agent, letters = step
                kept = None if letters is None else chain_of(letters)
                cache_index.use_chain(connection, agent, kept, now=now)
                model.use(agent, kept)
            elif kind == "release":
                row = transcripts.find_agent(connection, f"agent {step[0] - 1}")
                assert row is not None
                cache_index.note_evicted(connection, row, released=True, now=now)
                model.ends[step[0]], model.pieces[step[0]] = None, 0
            elif kind == "lend":
                letters, n_bytes = step
                chain = chain_of(letters)
                sizes = dict.fromkeys(range(chain.n_blocks), n_bytes)
                cache_index.add_blocks(connection, chain, sizes, now=now)
                model.add(chain, sizes)
            elif kind == "pieces":
                cache_index.set_piece_bytes(connection, *step)
                model.pieces[step[0]] = step[1]
            elif model.sizes:
                address = sorted(model.sizes)[step[0] % len(model.sizes)]
                if kind == "sizes":
                    cache_index.correct_sizes(connection, address, (step[1], 0), now=0.0)
                    model.sizes[address] = step[1]
                elif kind == "missing":
                    cache_index.remove_block(connection, address, now=now)
                    model.remove(address)
                elif address in model.unused_since:
                    aged = {model.parents[address]: model.unused_since[address]} if step[1] else {}
                    cache_index.remove_block(connection, address, now=None if step[1] else now)
                    model.remove(address)
            model.settle(now, aged)
            check(connection, model)

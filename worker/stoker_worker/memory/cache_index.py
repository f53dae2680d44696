"""The index of the cache files, in the database: which blocks there are, what uses them, and their bytes. Any thread.

It only decides what may be evicted, and counts; a lookup asks the disk. An agent refers to the last block of its chain,
and each block to the one before it: so a turn changes a few rows, however long its conversation, and a block is in use
as long as an agent or another block refers to it. A checkpoint is in the row of its block, and goes with it. A model
without full attention has rows of blocks without files. Runs inside `Database.snapshot` or a change of
`Database.commit`; owns the tables `blocks` and `models`, `store.cache_bytes`, and `agents.last_block`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from stoker_worker.memory.blocks import BlockChain
from stoker_worker.memory.database import Connection, count_bytes
from stoker_worker.memory.transcripts import AgentRow
from stoker_worker.ports.cache_spec import BLOCK_TOKENS


@dataclass(frozen=True)
class Block:
    """A block on disk.

    Attributes:
        model: the first 16 characters of the model's fingerprint, as in the path.
        n_bytes: allocated; `checkpoint_bytes`: the same for its checkpoint, 0 without one.
        n_users: agents whose cache ends at this block, and blocks that follow it, at most `_MOST_USERS` of each; 0 in
            the results of `worst_checkpoints` and `block_sizes`, which do not count them.
    """

    address: str
    parent: str
    model: str
    n_bytes: int
    checkpoint_bytes: int
    n_users: int

    @property
    def both_bytes(self) -> int:
        return self.n_bytes + self.checkpoint_bytes


_MOST_USERS: Final = 200
"""Limits the count: a block at the end of a common prompt may have a hundred thousand users, and a plan needs a few."""

_N_USERS: Final = (
    f"(SELECT count(*) FROM (SELECT 1 FROM agents WHERE last_block = blocks.address LIMIT {_MOST_USERS}))"
    f" + (SELECT count(*) FROM (SELECT 1 FROM blocks AS child WHERE child.parent = blocks.address LIMIT {_MOST_USERS}))"
)
_IS_USED: Final = (
    "(EXISTS (SELECT 1 FROM agents WHERE last_block = blocks.address)"
    " OR EXISTS (SELECT 1 FROM blocks AS child WHERE child.parent = blocks.address))"
)
_BYTES: Final = "CAST(n_bytes AS INTEGER), coalesce(CAST(checkpoint_bytes AS INTEGER), 0)"
_COLUMNS: Final = f"lower(hex(address)), lower(hex(parent)), CAST(model AS TEXT), {_BYTES}"
_BLOCK: Final = f"SELECT {_COLUMNS}, {_N_USERS} FROM blocks"

HAS_CACHE: Final = "(piece_bytes > 0 OR last_block IS NOT NULL)"
"""The condition of the index `agents_with_cache`: the agent has cache on disk."""

COUNTED_BYTES: Final = (
    "((SELECT coalesce(sum(n_bytes + checkpoint_bytes), 0) FROM blocks)"
    " + (SELECT coalesce(sum(piece_bytes), 0) FROM agents))"
)
"""The summed bytes of all cache files in the index. Reads all rows."""


def cache_bytes(connection: Connection) -> int:
    """Allocated bytes of all cache files in the index."""
    return int(connection.execute("SELECT cache_bytes FROM store").fetchone()[0])


def add_blocks(connection: Connection, chain: BlockChain, sizes: Mapping[int, int], *, now: float) -> None:
    """Enter blocks of `chain`: allocated bytes by their index in it, without gaps. They count as unused until an agent
    refers to the last one."""
    before = 0
    for index, n_bytes in sorted(sizes.items()):
        key, parent = bytes.fromhex(chain.addresses[index]), bytes.fromhex(chain.parent(index))
        if not before and index:
            found = connection.execute("SELECT chain_bytes FROM blocks WHERE address = ?", (parent,)).fetchone()
            before = found[0] if found else 0
        before += n_bytes
        known = connection.execute("SELECT CAST(n_bytes AS INTEGER) FROM blocks WHERE address = ?", (key,)).fetchone()
        connection.execute(
            "INSERT INTO blocks (address, parent, model, n_bytes, chain_bytes) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (address) DO UPDATE SET n_bytes = excluded.n_bytes, chain_bytes = excluded.chain_bytes",
            (key, parent, chain.model[:16], n_bytes, before),
        )
        count_bytes(connection, n_bytes - (known[0] if known else 0))
        connection.execute("UPDATE blocks SET unused_since = NULL WHERE address = ?", (parent,))
        note_unused(connection, chain.addresses[index], now=now)


def add_checkpoints(
    connection: Connection, chain: BlockChain, sizes: Mapping[int, int], *, can_be_cut: bool, now: float
) -> None:
    """Enter checkpoints: allocated bytes by the index of their block in `chain`. A checkpoint saves the tokens since
    the one before it, or at most a block where blocks `can_be_cut`. A known one keeps the number of its uses."""
    for index, n_bytes in sorted(sizes.items()):
        known = _bytes_of(connection, chain.addresses[index])
        if known is not None:  # else the block was removed meanwhile, and its checkpoint is an orphan
            others = (n for n in range(index - 1, -1, -1) if (_bytes_of(connection, chain.addresses[n]) or (0, 0))[1])
            saves = BLOCK_TOKENS * (1 if can_be_cut else index - next(others, -1))
            sql = (
                "UPDATE blocks SET checkpoint_bytes = ?, checkpoint_saves = ?, checkpoint_used = ?,"
                " checkpoint_uses = CASE WHEN checkpoint_bytes > 0 THEN checkpoint_uses ELSE 0 END WHERE address = ?"
            )
            connection.execute(sql, (n_bytes, saves, now, bytes.fromhex(chain.addresses[index])))
            count_bytes(connection, n_bytes - known[1])


def drop_checkpoint(connection: Connection, address: str) -> None:
    """The file of the block's checkpoint is gone."""
    if (known := _bytes_of(connection, address)) is not None and known[1]:
        connection.execute("UPDATE blocks SET checkpoint_bytes = 0 WHERE address = ?", (bytes.fromhex(address),))
        count_bytes(connection, -known[1])


def touch_checkpoint(connection: Connection, address: str, used_at: float) -> None:
    """A prompt resumed from the checkpoint."""
    sql = (
        "UPDATE blocks SET checkpoint_used = ?, checkpoint_uses = checkpoint_uses + 1"
        " WHERE address = ? AND checkpoint_bytes > 0"
    )
    connection.execute(sql, (used_at, bytes.fromhex(address)))


def checkpoint_bytes(connection: Connection) -> int:
    """Allocated bytes of all checkpoints."""
    sql = "SELECT coalesce(sum(checkpoint_bytes), 0) FROM blocks WHERE checkpoint_bytes > 0"
    return int(connection.execute(sql).fetchone()[0])


def worst_checkpoints(connection: Connection, *, limit: int, now: float) -> list[tuple[Block, float]]:
    """The blocks whose checkpoints cost most, and that cost: bytes for each token that one saves, times the seconds
    since its last use, divided by one more than its uses."""
    saves = "(max(coalesce(checkpoint_saves, 0), 1) * (1 + checkpoint_uses))"
    cost = f"checkpoint_bytes * max(?1 - checkpoint_used, 0.001) / {saves}"
    sql = f"SELECT {_COLUMNS}, 0, {cost} AS cost FROM blocks WHERE checkpoint_bytes > 0 ORDER BY cost DESC LIMIT ?2"
    return [(Block(*row), float(cost)) for *row, cost in connection.execute(sql, (now, limit))]


def cost_of_agent(connection: Connection, row: AgentRow, *, now: float) -> float:
    """The cost of the agent's cache, comparable to a checkpoint's."""
    chain = "coalesce((SELECT chain_bytes FROM blocks WHERE address = last_block), 0)"
    cost = f"(piece_bytes + {chain}) * max(?1 - last_used, 0.001) / max(cached_tokens, 1)"
    found = connection.execute(f"SELECT {cost} FROM agents WHERE number = ?2", (now, row.number)).fetchone()
    return float(found[0] or 0) if found else 0.0


def _bytes_of(connection: Connection, address: str) -> tuple[int, int] | None:
    """Allocated bytes of a block and of its checkpoint; ``None``: it is not in the index."""
    found = connection.execute(f"SELECT {_BYTES} FROM blocks WHERE address = ?", (bytes.fromhex(address),)).fetchone()
    return None if found is None else (found[0], found[1])


def has_block(connection: Connection, address: str) -> bool:
    sql = "SELECT 1 FROM blocks WHERE address = ?"
    return connection.execute(sql, (bytes.fromhex(address),)).fetchone() is not None


def n_known(connection: Connection, chain: BlockChain, most: int) -> int:
    """The number of blocks up to the last of the chain's first `most` that the index has; 0: it has none."""
    return next((n for n in range(most, 0, -1) if has_block(connection, chain.addresses[n - 1])), 0)


def use_chain(connection: Connection, agent: int, chain: BlockChain | None, *, now: float) -> None:
    """From now on the agent uses the blocks of `chain`, as far as they are in the index."""
    old = connection.execute("SELECT last_block FROM agents WHERE number = ?", (agent,)).fetchone()[0]
    n_blocks = n_known(connection, chain, chain.n_blocks) if chain else 0
    last = bytes.fromhex(chain.addresses[n_blocks - 1]) if chain and n_blocks else None
    if last == old:
        return
    connection.execute("UPDATE agents SET last_block = ? WHERE number = ?", (last, agent))
    if last is not None:
        connection.execute("UPDATE blocks SET unused_since = NULL WHERE address = ?", (last,))
    if old is not None:
        note_unused(connection, old.hex(), now=now)


def note_unused(connection: Connection, address: str, *, now: float) -> None:
    """Mark the block as unused from `now` on if nothing refers to it and it is not marked."""
    connection.execute(
        f"UPDATE blocks SET unused_since = ? WHERE address = ? AND unused_since IS NULL AND NOT {_IS_USED}",
        (now, bytes.fromhex(address)),
    )


def remove_block(connection: Connection, address: str, *, now: float | None = None) -> None:
    """The block's files are gone: agents whose cache ended here end at its parent. If the parent is unused now, it
    counts as unused since `now`; ``None``: for as long as this block."""
    key = bytes.fromhex(address)
    row = connection.execute(f"SELECT parent, unused_since, {_BYTES} FROM blocks WHERE address = ?", (key,)).fetchone()
    if row is None:
        return
    parent, unused_since, *n_bytes = row
    connection.execute("DELETE FROM blocks WHERE address = ?", (key,))
    has_parent = connection.execute("SELECT 1 FROM blocks WHERE address = ?", (parent,)).fetchone() is not None
    connection.execute("UPDATE agents SET last_block = ? WHERE last_block = ?", (parent if has_parent else None, key))
    count_bytes(connection, -sum(n_bytes))
    since = unused_since if now is None else now
    if has_parent and since is not None:
        note_unused(connection, parent.hex(), now=since)


def note_evicted(connection: Connection, row: AgentRow, *, released: bool = False, now: float) -> None:
    """The agent has lost its tail and snapshots of this version. Nothing changes if it has a newer one meanwhile, or
    its number is another agent's. `released`: it no longer uses its blocks either."""
    found = connection.execute("SELECT agent_id, version FROM agents WHERE number = ?", (row.number,)).fetchone()
    if found is not None and tuple(found) == (row.agent_id, row.version):
        set_piece_bytes(connection, row.number, 0)
        connection.execute("UPDATE agents SET evicted = 1 WHERE number = ?", (row.number,))
        if released:
            use_chain(connection, row.number, None, now=now)


def set_piece_bytes(connection: Connection, agent: int, n_bytes: int) -> None:
    """Allocated bytes of the agent's tail and snapshots."""
    sql = "SELECT coalesce(CAST(piece_bytes AS INTEGER), 0) FROM agents WHERE number = ?"
    row = connection.execute(sql, (agent,)).fetchone()
    known = n_bytes if row is None else row[0]
    if known != n_bytes:
        connection.execute("UPDATE agents SET piece_bytes = ? WHERE number = ?", (n_bytes, agent))
        count_bytes(connection, n_bytes - known)


def uncounted_bytes(connection: Connection) -> int:
    """By how much `COUNTED_BYTES` exceeds `cache_bytes`."""
    return int(connection.execute(f"SELECT {COUNTED_BYTES} - cache_bytes FROM store").fetchone()[0])


def correct_bytes(connection: Connection) -> None:
    """Make `cache_bytes` the sum of all rows."""
    count_bytes(connection, uncounted_bytes(connection))


def unused_blocks(connection: Connection, *, limit: int, before: float | None = None) -> list[Block]:
    """Blocks that nothing refers to, unused the longest first; with `before` only those unused since then."""
    where = "WHERE unused_since IS NOT NULL" + (" AND unused_since <= ?2" if before is not None else "")
    parameters = (limit,) if before is None else (limit, before)
    rows = connection.execute(f"{_BLOCK} {where} ORDER BY unused_since LIMIT ?1", parameters)
    return [Block(*row) for row in rows]


def agents_at(connection: Connection, address: str) -> list[tuple[str, int]]:
    """Agents whose cache ends at this block, `_MOST_USERS` at most, and their versions."""
    sql = "SELECT CAST(agent_id AS TEXT), version FROM agents WHERE last_block = ? LIMIT ?"
    return connection.execute(sql, (bytes.fromhex(address), _MOST_USERS)).fetchall()


def blocks_after(connection: Connection, address: str) -> list[str]:
    """The addresses of blocks that follow this one, `_MOST_USERS` at most."""
    sql = "SELECT lower(hex(address)) FROM blocks WHERE parent = ? LIMIT ?"
    return [found for (found,) in connection.execute(sql, (bytes.fromhex(address), _MOST_USERS))]


def chain_back(connection: Connection, last: bytes | None) -> Iterator[Block]:
    """The blocks of a chain from its last one to its first."""
    while last is not None:
        row = connection.execute(f"{_BLOCK} WHERE address = ?", (last,)).fetchone()
        if row is None:
            return
        block = Block(*row)
        yield block
        last = bytes.fromhex(block.parent)


def addresses_back(connection: Connection, last: bytes, most: int) -> Iterator[tuple[str, str]]:
    """The addresses of a chain's last `most` blocks, each with its parent's, from the last one back."""
    return iter(
        connection.execute(
            "WITH RECURSIVE back (address, parent) AS (SELECT address, parent FROM blocks WHERE address = ?1 UNION ALL"
            " SELECT blocks.address, blocks.parent FROM back JOIN blocks ON blocks.address = back.parent LIMIT ?2)"
            " SELECT lower(hex(address)), lower(hex(parent)) FROM back",
            (last, most),
        )
    )


def block_sizes(connection: Connection, start: str, *, after: str, limit: int) -> list[Block]:
    """Blocks whose address starts with these hex digits (an even number), in the order of their addresses. `after`:
    only those behind this address (hex); empty: from the first one on."""
    first = bytes.fromhex(start)
    rows = connection.execute(
        f"SELECT {_COLUMNS}, 0 FROM blocks WHERE address > ? AND address <= ? ORDER BY address LIMIT ?",
        (bytes.fromhex(after) or first, first + b"\xff" * 31, limit),
    )
    return [Block(*row) for row in rows]


def correct_sizes(connection: Connection, address: str, sizes: tuple[int, int], *, now: float) -> None:
    """Set the allocated bytes of the block and of its checkpoint; 0: the file is gone."""
    if (known := _bytes_of(connection, address)) is None:
        return
    if known[0] and not sizes[0]:
        remove_block(connection, address, now=now)  # its checkpoint is of no use without it
        return
    sql = (
        "UPDATE blocks SET n_bytes = ?1, checkpoint_bytes = ?2, checkpoint_used = coalesce(checkpoint_used, ?3)"
        " WHERE address = ?4"
    )
    connection.execute(sql, (*sizes, now, bytes.fromhex(address)))
    count_bytes(connection, sum(sizes) - sum(known))


def touch_block(connection: Connection, address: str, used_at: float) -> None:
    """If nothing refers to the block, it counts as unused only since this Unix time."""
    sql = "UPDATE blocks SET unused_since = ? WHERE address = ? AND unused_since IS NOT NULL"
    connection.execute(sql, (used_at, bytes.fromhex(address)))


def note_model(connection: Connection, fingerprint: str, cache: str) -> None:
    """Remember the cache layout (`ModelCacheSpec.describe`) of a model that has saved something."""
    connection.execute("INSERT OR IGNORE INTO models (fingerprint, cache) VALUES (?, ?)", (fingerprint, cache))


def read_model(connection: Connection, fingerprint: str) -> str | None:
    """The cache layout that `note_model` wrote."""
    row = connection.execute("SELECT cache FROM models WHERE fingerprint = ?", (fingerprint,)).fetchone()
    return None if row is None else str(row[0])

"""Makes the index of the cache files and the sizes of agents anew, from the files and the transcripts.

No worker has the store open.
"""

import json
from pathlib import Path
from typing import Any

from stoker_worker.memory import agent_table, cache_index, turn_table
from stoker_worker.memory.admin.backup import cache_files
from stoker_worker.memory.block_chain import block_address
from stoker_worker.memory.cache_file import read_metadata
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.connection import Connection
from stoker_worker.memory.piece_folder import PieceFolder
from stoker_worker.memory.turn_parts import chain_of


def recount(connection: Connection, blocks: Path, pieces: PieceFolder, *, now: float) -> int:
    """Enter every block file by its own metadata, the last block of each agent, and the sizes.

    Returns:
        how many blocks there are.

    Raises:
        OSError: a folder cannot be read.
    """
    for sql in (
        "DELETE FROM blocks",
        "UPDATE agents SET last_block = NULL, piece_bytes = 0",
        "UPDATE store SET cache_bytes = 0",
    ):
        connection.execute(sql)
    for path, stat in cache_files(blocks):
        about = _read(path)
        if about is not None:
            cache_index.note_model(connection, about["model"], about["cache"])
            connection.execute(
                "INSERT OR IGNORE INTO blocks (address, parent, model, n_bytes, chain_bytes, unused_since)"
                " VALUES (?, ?, ?, ?, 0, ?)",
                (
                    bytes.fromhex(path.stem),
                    bytes.fromhex(about["parent"]),
                    about["model"][:16],
                    stat.st_blocks * 512,
                    now,
                ),
            )
    connection.execute(
        "WITH RECURSIVE chain (address, n_bytes) AS ("
        " SELECT address, n_bytes FROM blocks WHERE parent NOT IN (SELECT address FROM blocks)"
        " UNION ALL SELECT next.address, chain.n_bytes + next.n_bytes FROM blocks AS next JOIN chain"
        " ON next.parent = chain.address)"
        " UPDATE blocks SET chain_bytes = chain.n_bytes FROM chain WHERE chain.address = blocks.address"
    )
    connection.execute("UPDATE store SET cache_bytes = (SELECT coalesce(sum(n_bytes), 0) FROM blocks)")
    for (agent_id,) in connection.execute("SELECT agent_id FROM agents").fetchall():
        _recount_agent(connection, agent_id, pieces, now)
    connection.execute(
        "UPDATE blocks SET unused_since = NULL WHERE address IN (SELECT parent FROM blocks)"
        " OR address IN (SELECT last_block FROM agents WHERE last_block IS NOT NULL)"
    )
    return int(connection.execute("SELECT count(*) FROM blocks").fetchone()[0])


def _recount_agent(connection: Connection, agent_id: str, pieces: PieceFolder, now: float) -> None:
    try:
        state = agent_table.read_agent(connection, agent_id)
    except Damaged:
        return
    row, version = state.row, state.version
    if row is None or row.problem is not None:
        return
    n_bytes = connection.execute(f"{turn_table.VERSION_BYTES} WHERE agent = ?", (row.number,)).fetchone()[0]
    tokens = len(version.transcript.token_ids) if version.transcript else 0
    connection.execute(
        "UPDATE agents SET tokens = ?, cached_tokens = ?, transcript_bytes = ? WHERE number = ?",
        (tokens, version.cache.tokens if version.cache else 0, n_bytes, row.number),
    )
    sizes = [path.stat().st_blocks * 512 for path in pieces.paths(agent_id, row.version) if path.exists()]
    cache_index.set_piece_bytes(connection, row.number, sum(sizes))
    if version.cache is not None and version.transcript is not None:
        cache_index.use_chain(connection, row.number, chain_of(version.cache, version.transcript.token_ids), now=now)


def _read(path: Path) -> dict[str, Any] | None:
    """The metadata of a block's file; ``None`` if it is none, or not where it belongs."""
    try:
        with open(path, "rb", buffering=0) as file:
            about = read_metadata(file)
        address = block_address(about["parent"], [int(x) for x in about["token_ids"].split(",")])
        is_right = about["kind"] == "block" and path.stem == address and path.parent.parent.name == about["model"][:16]
        return about if is_right and isinstance(about["cache"], str) else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, OverflowError, json.JSONDecodeError):
        return None

"""Enters cache files in the index: those of an agent, or those of all agents into a new index. Changes of a database
that `Database.commit` runs."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.admin.cache_check import check_belongs, read_intact
from stoker_worker.memory.blocks import BlockChain, BlockFolder, PieceFolder, read_metadata
from stoker_worker.memory.database import Connection, Damaged
from stoker_worker.memory.files import allocated_bytes
from stoker_worker.memory.turn_saver import chain_of
from stoker_worker.ports import CachedPrefix, Transcript


def recount(connection: Connection, blocks: BlockFolder, pieces: PieceFolder, *, now: float) -> int:
    """Enter the files of every agent's newest version that can be read, and no others. Files of another conversation
    under the names of its own are removed: the agent's id has been used again.

    Returns:
        how many blocks there are.

    Raises:
        OSError: a folder cannot be read.
    """
    connection.execute("DELETE FROM blocks")
    connection.execute("UPDATE agents SET last_block = NULL, piece_bytes = 0")
    connection.execute("UPDATE store SET cache_bytes = 0")
    for row in list(transcripts.agent_rows(connection, "")):
        own = pieces.paths(row.agent_id, row.version)
        sql = "SELECT coalesce(max(version), 0) FROM turns WHERE agent = ?"
        (version,) = connection.execute(sql, (row.number,)).fetchone()  # the newest of an agent that has lost some
        with suppress(Damaged):
            transcript, cache = transcripts.read_version(connection, row, version)
            if version == row.version:
                _remove_others(pieces, own, transcript, cache)
            if cache is not None:
                chain = chain_of(cache, transcript.token_ids)
                _note_model(connection, chain.model, [*own, *list(chain.paths(blocks.path_of))[:1]])
                enter_blocks(connection, chain, blocks, now=now)
                cache_index.use_chain(connection, row.number, chain if version == row.version else None, now=now)
        cache_index.set_piece_bytes(connection, row.number, sum(map(allocated_bytes, own)))
    return int(connection.execute("SELECT count(*) FROM blocks").fetchone()[0])


def enter_blocks(connection: Connection, chain: BlockChain, blocks: BlockFolder, *, now: float) -> None:
    """Enter the blocks of `chain` that are on disk and not in the index, up to the first one that is missing."""
    sizes: dict[int, int] = {}
    for index, path in enumerate(chain.paths(blocks.path_of)):
        if not cache_index.has_block(connection, chain.addresses[index]):
            if not (n_bytes := allocated_bytes(path)):
                break
            sizes[index] = n_bytes
    cache_index.add_blocks(connection, chain, sizes, now=now)


def _remove_others(pieces: PieceFolder, own: list[Path], transcript: Transcript, cache: CachedPrefix | None) -> None:
    """Remove those of a version's files that are not its own, as far as their headers show."""
    for place, path in enumerate(own):
        with suppress(OSError):
            try:
                with open(path, "rb", buffering=0) as file:
                    check_belongs(read_metadata(file), transcript, cache, place - 1 if place else None)
            except (ValueError, TypeError, KeyError, RecursionError):
                pieces.remove([path])


def _note_model(connection: Connection, model: str, files: Iterable[Path]) -> None:
    """What reading ahead needs to know of a model: one of these files tells it."""
    if cache_index.read_model(connection, model) is None:
        for path in files:
            with suppress(Damaged, FileNotFoundError, KeyError):
                cache_index.note_model(connection, model, str(read_intact(path)["cache"]))
                return

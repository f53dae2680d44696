"""The cache files of agents: checks that one is whole, of our format, and the right piece for its place; enters those
on disk in the index. Any thread."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from stoker_worker.memory import cache_index, transcripts
from stoker_worker.memory.blocks import (
    BlockChain,
    BlockFolder,
    PieceFolder,
    block_address,
    checkpoint_beside,
    is_intact,
    read_metadata,
)
from stoker_worker.memory.database import Connection, Damaged
from stoker_worker.memory.files import allocated_bytes
from stoker_worker.memory.turn_saver import chain_of
from stoker_worker.ports import AgentVersion, CachedPrefix, Transcript
from stoker_worker.ports.cache_spec import BLOCK_TOKENS, LayerKind


def check_piece(path: Path, version: AgentVersion, snapshot: int | None) -> None:
    """Check that the file is the version's tail, or with `snapshot`, the snapshot at this index of
    `CachedPrefix.snapshots`. Raises `Damaged`: it is another file, or damaged; `FileNotFoundError`: it is gone."""
    check_belongs(read_intact(path), version.transcript, version.cache, snapshot)


def check_belongs(
    metadata: dict[str, Any], transcript: Transcript | None, cache: CachedPrefix | None, snapshot: int | None
) -> None:
    """The same for a file with this metadata. Raises `Damaged`."""
    if cache is None or transcript is None or (snapshot is not None and snapshot >= len(cache.snapshots)):
        raise Damaged("is of no version")
    chain = chain_of(cache, transcript.token_ids)
    expected = {"kind": "tail", "model": cache.model}
    if snapshot is not None:
        chain = chain.up_to(cache.snapshots[snapshot])
        expected |= {"kind": "snapshot", "after_tokens": str(len(chain.token_ids))}
    expected |= {"parent": chain.last, "token_ids": ",".join(map(str, chain.rest))}
    if {field: metadata.get(field) for field in expected} != expected:
        raise Damaged("is another agent's or version's")


def check_block(path: Path, model: str, address: str) -> str:
    """Check that the file is the block of this address, of a model whose fingerprint begins with `model`; returns its
    parent. Raises `Damaged`: it is not; `FileNotFoundError`: it is gone."""
    metadata = read_intact(path)
    is_ours = is_of_model = False
    with suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError):  # whole, but of another writer
        token_ids = np.array(metadata["token_ids"].split(","), dtype=np.uint32)
        is_ours = len(token_ids) == BLOCK_TOKENS and block_address(metadata["parent"], token_ids.tolist()) == address
        is_of_model = metadata["model"].startswith(model)
    if not is_ours or not is_of_model:
        raise Damaged("is another model's" if is_ours else "is not the block of its name")
    return str(metadata["parent"])


def check_checkpoint(path: Path, model: str, address: str) -> None:
    """Check that the file is the checkpoint of the block of this address. Raises as `check_block`."""
    metadata = read_intact(path)
    expected = {"kind": "snapshot", "parent": address}
    is_its = {field: metadata.get(field) for field in expected} == expected and "token_ids" in metadata
    if not is_its or str(metadata["token_ids"]).count(",") + 1 >= BLOCK_TOKENS:
        raise Damaged("is not the checkpoint of its name")
    if not str(metadata.get("model")).startswith(model):
        raise Damaged("is another model's")


def read_intact(path: Path) -> dict[str, Any]:
    """The metadata of a whole cache file. Raises `Damaged`: it is none; `FileNotFoundError`: it is gone."""
    try:
        with open(path, "rb", buffering=0) as file:
            if is_intact(file):
                return read_metadata(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged("is no piece of cache of ours") from error  # whole, but of another writer
    raise Damaged("is damaged")


def recount(connection: Connection, blocks: BlockFolder, pieces: PieceFolder, *, now: float) -> int:
    """Make the index anew, from the cache files of every agent's newest readable version; returns how many blocks it
    has. Removes all sessions, and files that have an agent's names but belong to another conversation, because its id
    was used again. Raises `OSError`: a folder cannot be read."""
    connection.execute("DELETE FROM blocks")
    connection.execute(f"DELETE FROM agents WHERE {transcripts.IS_OF_SESSION}")
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
    """Enter the blocks of `chain` that are on disk and not in the index, up to a missing one, and their checkpoints."""
    layout = cache_index.read_model(connection, chain.model)
    have_files = layout is None or LayerKind.FULL in layout
    sizes: dict[int, int] = {}
    checkpoints: dict[int, int] = {}
    for index, path in enumerate(chain.paths(blocks.path_of)):
        if not cache_index.has_block(connection, chain.addresses[index]):
            if not (n_bytes := allocated_bytes(path)) and have_files:
                break
            sizes[index] = n_bytes
        if n_bytes := allocated_bytes(checkpoint_beside(path)):
            checkpoints[index] = n_bytes
    cache_index.add_blocks(connection, chain, sizes, now=now)
    cache_index.add_checkpoints(connection, chain, checkpoints, can_be_cut=not has_snapshots(layout), now=now)


def has_snapshots(layout: str | None) -> bool:
    """True if a model of this cache layout has window or recurrent layers; ``None``: unknown."""
    return any(kind in (layout or "") for kind in (LayerKind.WINDOW, LayerKind.RECURRENT))


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
    """Note the facts about a model that reading ahead needs; any of these files has them."""
    if cache_index.read_model(connection, model) is None:
        for path in files:
            with suppress(Damaged, FileNotFoundError, KeyError):
                cache_index.note_model(connection, model, str(read_intact(path)["cache"]))
                return

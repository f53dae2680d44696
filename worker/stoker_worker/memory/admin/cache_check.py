"""Checks one cache file: whole, of our format, and the piece that belongs at its place. Any thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from stoker_worker.memory.block_chain import block_address
from stoker_worker.memory.cache_file import is_intact, read_metadata
from stoker_worker.memory.checksum import Damaged
from stoker_worker.memory.turn_parts import chain_of
from stoker_worker.ports import AgentVersion
from stoker_worker.ports.cache_spec import BLOCK_TOKENS


def check_piece(path: Path, version: AgentVersion, snapshot: int | None) -> None:
    """Whether the file is the version's tail, or its snapshot of this place in `CachedPrefix.snapshots`.

    Raises:
        Damaged: it is not.
        FileNotFoundError: it is gone.
    """
    with _foreign():
        metadata = read_intact(path)
        cache, transcript = version.cache, version.transcript
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


def check_block(path: Path, address: str) -> tuple[str, str]:
    """The model and the parent of the block in the file.

    Raises:
        Damaged: the file is not the block of this address.
        FileNotFoundError: it is gone.
    """
    with _foreign():
        metadata = read_intact(path)
        token_ids = np.array(metadata["token_ids"].split(","), dtype=np.uint32)
        model, parent = str(metadata["model"]), str(metadata["parent"])
        if len(token_ids) != BLOCK_TOKENS or block_address(parent, token_ids.tolist()) != address:
            raise Damaged("is not the block of its name")
        return model, parent


def read_intact(path: Path) -> dict[str, Any]:
    """The metadata of a whole cache file.

    Raises:
        Damaged: it is none.
        FileNotFoundError: it is gone.
    """
    with _foreign(), open(path, "rb", buffering=0) as file:
        if not is_intact(file):
            raise Damaged("is damaged")
        return read_metadata(file)


@contextmanager
def _foreign() -> Iterator[None]:
    try:
        yield
    except (Damaged, FileNotFoundError):
        raise
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged("is no piece of cache of ours") from error  # whole, but of another writer

"""Which files the blocks of some tokens are. Pure."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stoker_worker.memory.blocks import chain, chain_root
from stoker_worker.memory.record import CachedPrefix

PathOf = Callable[[str, str], Path]
"""From a model's fingerprint and an address to the block's file."""

_FINGERPRINT: Final = re.compile(r"[0-9a-f]+")


def cached_blocks(cache: CachedPrefix | None, token_ids: tuple[int, ...], path_of: PathOf) -> tuple[Path, ...]:
    """Files of the blocks of an agent's cache, in the order of its tokens."""
    if cache is None or not is_fingerprint(cache.model):
        return ()
    return chain_paths(cache.model, cache.salt, token_ids[: cache.tokens], path_of)


def chain_paths(model: str, salt: str | None, token_ids: tuple[int, ...], path_of: PathOf) -> tuple[Path, ...]:
    """Files of all full blocks of `token_ids`."""
    return tuple(path_of(model, address) for address in chain(chain_root(model, salt), token_ids)[1:])


def is_fingerprint(model: str) -> bool:
    """Whether a record's model may become part of a path."""
    return _FINGERPRINT.fullmatch(model) is not None

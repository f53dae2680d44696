"""Which files the blocks of some tokens are. Pure."""

from pathlib import Path

from stoker_worker.memory.blocks import chain, chain_root
from stoker_worker.memory.census import PathOf, is_fingerprint
from stoker_worker.memory.record import CachedPrefix


def cached_blocks(cache: CachedPrefix | None, token_ids: tuple[int, ...], path_of: PathOf) -> tuple[Path, ...]:
    """Files of the blocks of an agent's cache, in the order of its tokens."""
    if cache is None or not is_fingerprint(cache.model):
        return ()
    return chain_paths(cache.model, cache.salt, token_ids[: cache.tokens], path_of)


def chain_paths(model: str, salt: str | None, token_ids: tuple[int, ...], path_of: PathOf) -> tuple[Path, ...]:
    """Files of all full blocks of `token_ids`."""
    return tuple(path_of(model, address) for address in chain(chain_root(model, salt), token_ids)[1:])

"""The cache of the engine without a model: each token's own id. Pure; engine thread."""

import numpy as np

from stoker_shared.errors import EngineFailed
from stoker_worker.ports import CacheSlice, GenerationWork, RestoredPrefix


def cache_of(token_ids: tuple[int, ...], start: int | None) -> CacheSlice | None:
    """One layer: keys (1, tokens, 1) in float32, and their negatives as values; ``None`` if nothing is saved."""
    if start is None:
        return None
    keys = np.asarray(token_ids, dtype=np.float32).reshape(1, -1, 1)
    return CacheSlice(start=start, stop=len(token_ids), layers=((keys, -keys),))


def wrong_prefix(work: GenerationWork) -> EngineFailed | None:
    """The error of a restored prefix that is not the cache of the prompt's first tokens, else ``None``."""
    prefix: RestoredPrefix | None = work.prefix
    if prefix is None:
        return None
    ((keys, values),) = prefix.layers
    expected = np.asarray(work.prompt_ids[: prefix.n_tokens], dtype=np.float32).reshape(1, -1, 1)
    if np.array_equal(keys, expected) and np.array_equal(values, -expected):
        return None
    return EngineFailed("the restored cache is not that of the prompt's tokens")

"""Finds models that round inside, whatever the dtype of their weights, as some do with the keys of sparse attention.

A number near the edge between two codes then falls to either side by its last place, so that a sequence in a batch may
differ from itself alone far more than rounding in float32 explains. Engine thread; no architecture is known by name.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from stoker_worker.engine.single_generator import REFERENCE_CHUNK_TOKENS

_NUDGE: Final = 1e-6
_MOST_TIMES: Final = 1000
"""Among all architectures, the answers of one that rounds inside moved by at least 5,600 times the nudge, those of
others by at most 30 times."""

_COMPARED: Final = 256
"""Tokens at the end of each chunk whose logits are compared: those of all would take gigabytes."""


def rounds_inside(model: Any, ids: Sequence[int]) -> bool:
    """Whether the answers of a float32 model to `ids` jump when weights change in their last places.

    Only vectors change, such as the weights of norms, because they are small; they are put back.
    """
    weights = [(name, array) for name, array in tree_flatten(model.parameters()) if _is_vector(array)]
    right, nudged = tree_unflatten(weights), tree_unflatten([(name, w * (1 + _NUDGE)) for name, w in weights])
    caches, caches_nudged, furthest = make_prompt_cache(model), make_prompt_cache(model), 0.0
    try:
        for start in range(0, len(ids), REFERENCE_CHUNK_TOKENS):
            chunk = mx.array([ids[start : start + REFERENCE_CHUNK_TOKENS]])
            logprobs = _last(model, chunk, caches)
            model.update(nudged)
            moved = mx.sqrt(mx.mean((_last(model, chunk, caches_nudged) - logprobs) ** 2, axis=-1))
            model.update(right)
            furthest = max(furthest, float((moved / mx.std(logprobs, axis=-1)).max()))
    finally:
        model.update(right)
    return furthest > _MOST_TIMES * _NUDGE


def _is_vector(array: mx.array) -> bool:
    return array.ndim == 1 and mx.issubdtype(array.dtype, mx.floating)


def _last(model: Any, chunk: mx.array, caches: list[Any]) -> mx.array:
    """Log-probabilities (tokens, vocabulary) after the last tokens of a chunk, evaluated."""
    logits = model(chunk, cache=caches)[0, -_COMPARED:]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    logprobs = mx.where(mx.isfinite(logprobs), logprobs, 0.0)  # some models rule tokens out
    mx.eval(logprobs, [cache.state for cache in caches])
    return logprobs

"""One row's sampler. Greedy rows have none: they share the batch's single argmax call. Engine thread."""

import os
from collections.abc import Callable
from functools import partial

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from stoker_shared.request import GenerationRequest

Sampler = Callable[[mx.array], mx.array]


def row_sampler(request: GenerationRequest) -> Sampler | None:
    """A sampler for `request`, ``None`` for greedy decoding.

    Token i is drawn with a key made of (seed, i) and nothing else, so the same seed and prompt give the same text alone
    and in any batch; mlx-lm's own samplers draw from one random state for the whole process. Filters are applied in
    mlx-lm's order: top_p, min_p, top_k, on the untempered distribution.
    """
    if request.temperature == 0.0:
        return None
    filters: list[Sampler] = []
    if request.top_p is not None and request.top_p < 1.0:
        filters.append(partial(apply_top_p, top_p=request.top_p))
    if request.min_p:
        filters.append(partial(apply_min_p, min_p=request.min_p))
    if request.top_k is not None:
        filters.append(partial(_top_k, k=request.top_k))
    seed = request.seed if request.seed is not None else int.from_bytes(os.urandom(7), "big")
    inverse_temperature = 1.0 / request.temperature
    drawn = 0

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal drawn
        for keep_likely in filters:
            logprobs = keep_likely(logprobs)
        key = _key(seed, drawn)
        drawn += 1
        return mx.random.categorical(logprobs * inverse_temperature, key=key)

    return sample


def _key(seed: int, index: int) -> mx.array:
    # A multiplicative mix instead of seed + index, or neighbouring seeds would share most of their draws.
    key: mx.array = mx.random.key((seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03) % 2**64)
    return key


def _top_k(logprobs: mx.array, k: int) -> mx.array:
    # mlx-lm raises for k >= vocabulary, and a sampler that raises breaks the whole batch.
    kept: mx.array = apply_top_k(logprobs, top_k=k) if k < logprobs.shape[-1] else logprobs
    return kept

"""One sequence's sampling: from the model's logits to the sequence's next token. Engine thread.

Nothing here raises into mlx-lm: an exception in the middle of a step leaves the cache of every sequence one token ahead
of its output. A sequence whose sampling fails goes on greedily for a step, and its `error` tells the engine to fail it.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from stoker_shared.request import GenerationRequest
from stoker_shared.result import TokenLogprob, TopLogprob
from stoker_worker.engine.logits import LogitsProcessor, make_processors
from stoker_worker.ports import TokenizerPort

_LEAST: Final = 1e-30
"""Least temperature and `top_p`: they draw the likeliest token, and far below float32 would leave no token at all."""

Filter = Callable[[mx.array], mx.array]
"""From normalised log-probabilities (1, vocabulary) to those that may be drawn."""


class SequenceSampling:
    """The sampler and the processors of one sequence. Implements `generator.Sampling`.

    Attributes:
        sampler: ``None`` for a greedy sequence: all of those share the batch's one argmax.
        error: the exception that one of them raised.
    """

    def __init__(self, request: GenerationRequest, *, n_prompt: int, end_ids: frozenset[int]) -> None:
        """
        Args:
            n_prompt, end_ids: see `make_processors`.
        """
        self._request = request
        self._n_prompt = n_prompt
        self._end_ids = end_ids
        self._seed = request.seed if request.seed is not None else int.from_bytes(os.urandom(7), "big")
        self.error: Exception | None = None
        self.sampler: _Guarded | None = None
        self.processors: list[LogitsProcessor] = []
        self.start(0)

    def start(self, n_drawn: int) -> None:
        """Make the callables for a sequence that has generated `n_drawn` tokens."""
        sampler = make_sampler(self._request, self._seed, n_drawn)
        self.sampler = None if sampler is None else _Guarded(self, sampler)
        processors = make_processors(self._request, self._n_prompt, self._end_ids)
        self.processors = [partial(self._process, processor) for processor in processors]

    def _process(self, processor: LogitsProcessor, tokens: mx.array, logits: mx.array) -> mx.array:
        try:
            if self.error is None:
                return processor(tokens, logits)
        except Exception as error:
            self.error = error
        return logits


class Sampler:
    """Draws one sequence's tokens.

    Token i is drawn with a key made of (seed, i) alone, so the same seed and prompt give the same text alone
    and in any batch; mlx-lm's own samplers draw from one random state for the whole process. Filters are applied in
    mlx-lm's order: top_p, min_p, top_k, on the untempered distribution.
    """

    def __init__(self, filters: Sequence[Filter], temperature: float, seed: int, n_drawn: int) -> None:
        self._filters = filters
        self._inverse_temperature = 1.0 / max(temperature, _LEAST)
        self._seed = seed
        self._n_drawn = n_drawn

    def __call__(self, logprobs: mx.array) -> mx.array:
        """From normalised log-probabilities (1, vocabulary) to a token id (1,)."""
        logprobs = logprobs.astype(mx.float32)  # in float16, a temperature of 0.00001 makes all of them minus infinity
        for keep_likely in self._filters:
            logprobs = keep_likely(logprobs)
        key = _key(self._seed, self._n_drawn)
        self._n_drawn += 1
        return mx.random.categorical(logprobs * self._inverse_temperature, key=key)

    def take_back(self, n_tokens: int) -> None:
        """Forget the newest draws: they will be made again."""
        self._n_drawn -= n_tokens


class _Guarded:
    """A sampler that does not raise."""

    def __init__(self, sampling: SequenceSampling, sampler: Sampler) -> None:
        self._sampling = sampling
        self._sampler = sampler

    def __call__(self, logprobs: mx.array) -> mx.array:
        try:
            if self._sampling.error is None:
                return self._sampler(logprobs)
        except Exception as error:
            self._sampling.error = error
        greedy: mx.array = mx.argmax(logprobs, axis=-1)
        return greedy

    def take_back(self, n_tokens: int) -> None:
        if self._sampling.error is None:
            self._sampler.take_back(n_tokens)


def make_sampler(request: GenerationRequest, seed: int, n_drawn: int) -> Sampler | None:
    """A sampler for `request`, ``None`` for greedy decoding."""
    if request.temperature == 0.0:
        return None
    filters: list[Filter] = []
    if request.top_p is not None and request.top_p < 1.0:
        filters.append(partial(apply_top_p, top_p=max(request.top_p, _LEAST)))
    if request.min_p:
        filters.append(partial(apply_min_p, min_p=request.min_p))
    if request.top_k is not None:
        filters.append(partial(_top_k, k=request.top_k))
    return Sampler(filters, request.temperature, seed, n_drawn)


def _key(seed: int, index: int) -> mx.array:
    # A multiplicative mix instead of seed + index, or neighbouring seeds would share most of their draws.
    key: mx.array = mx.random.key((seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03) % 2**64)
    return key


def _top_k(logprobs: mx.array, k: int) -> mx.array:
    # mlx-lm raises for k >= vocabulary.
    kept: mx.array = apply_top_k(logprobs, top_k=k) if k < logprobs.shape[-1] else logprobs
    return kept


def token_logprob(token_id: int, logprobs: mx.array, *, n_top: int, tokenizer: TokenizerPort) -> TokenLogprob:
    """The log-probability of a generated token, and those of the `n_top` likeliest in its place.

    Args:
        logprobs: (vocabulary,), evaluated and normalised; after bias, penalties and a guide, before temperature
            and filters. Tokens that a guide forbids are never among the likeliest.
    """
    values = np.asarray(logprobs.astype(mx.float32))
    likeliest = np.argsort(-values, kind="stable")[:n_top].tolist() if n_top else []
    return TokenLogprob(
        **about_token(token_id, tokenizer),
        logprob=float(values[token_id]),
        top_logprobs=[
            TopLogprob(**about_token(top, tokenizer), logprob=float(values[top]))
            for top in likeliest
            if np.isfinite(values[top])
        ],
    )


def about_token(token_id: int, tokenizer: TokenizerPort) -> dict[str, Any]:
    """The text of a token and its bytes, as fields of `TopLogprob`."""
    # A token may be part of a character: then its text has a replacement character, and its bytes are not known.
    text = tokenizer.decode([token_id])
    return {"token": text, "bytes": None if "\ufffd" in text else list(text.encode())}

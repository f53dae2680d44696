"""From a model's logits to a sequence's next token: the request's changes, a guide's mask, and the draw. Engine thread.

Nothing here raises into a step: an exception in the middle of one leaves the cache of every sequence one token ahead of
its output. A sequence whose sampling fails continues greedily for a step, and the engine fails it for its `error`;
after a guide fails, its row continues without it.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_repetition_penalty
from numpy.typing import NDArray

from stoker_shared.errors import GuideRefused
from stoker_shared.request import GenerationRequest
from stoker_shared.result import TokenLogprob, TopLogprob
from stoker_worker.ports import AnswerGuide, TokenizerPort

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""From the sequence's tokens so far, prompt included, and its logits (1, vocabulary) to logits."""


def make_processors(request: GenerationRequest, n_prompt: int, end_ids: frozenset[int]) -> list[LogitsProcessor]:
    """The request's changes to logits. The answer begins after `n_prompt` tokens and ends with one of `end_ids`."""
    processors: list[LogitsProcessor] = []
    if request.logit_bias:
        processors.append(_bias({int(key): bias for key, bias in request.logit_bias.items()}))
    if request.repetition_penalty not in (None, 1.0):
        # mlx-lm's own, over its own default of the last 20 tokens, prompt included.
        processors.append(make_repetition_penalty(request.repetition_penalty))
    if request.presence_penalty or request.frequency_penalty:
        processors.append(_penalties(request.presence_penalty, request.frequency_penalty, n_prompt))
    if request.min_tokens and end_ids:
        processors.append(_no_end(end_ids, n_prompt + request.min_tokens))
    return processors


def _bias(of_ids: dict[int, float]) -> LogitsProcessor:
    ids, biases = mx.array(list(of_ids)), mx.array(list(of_ids.values()))

    def add_bias(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, ids].add(biases.astype(logits.dtype))

    return add_bias


def _penalties(presence: float, frequency: float, n_prompt: int) -> LogitsProcessor:
    """As OpenAI and vLLM mean them: over all tokens of the answer, and none of the prompt."""

    def penalise(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == n_prompt:
            return logits
        # Counted in float32: 16 bits would round each subtraction.
        counts = mx.zeros(logits.shape[-1]).at[tokens[n_prompt:]].add(1.0)
        return logits - (presence * (counts > 0) + frequency * counts).astype(logits.dtype)

    return penalise


def _no_end(end_ids: frozenset[int], n_tokens: int) -> LogitsProcessor:
    """Forbid an end before the sequence has `n_tokens` tokens, by the least finite logit. With minus infinity, a random
    token would be drawn where a grammar allows nothing but the end."""

    def forbid_end(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size >= n_tokens:
            return logits
        # A model may name an end that it has no logit for.
        ids = mx.array([token_id for token_id in sorted(end_ids) if token_id < logits.shape[-1]], mx.uint32)
        return mx.put_along_axis(logits, ids[None], mx.array(mx.finfo(logits.dtype).min, logits.dtype), axis=-1)

    return forbid_end


Place = tuple[int, AnswerGuide, int | None]
"""The index of a row in the logits, its guide, and the token being fed; ``None`` if the guide has taken it."""


def guided(logits: mx.array, places: Iterable[Place]) -> mx.array:
    """The logits, (rows, vocabulary), but those of tokens that the guides in `places` forbid are minus infinity."""
    allowed, floors = np.ones(logits.shape, np.bool_), [-np.inf] * logits.shape[0]
    # Another rule, such as `min_tokens`, may have excluded every allowed token: a row must not be left without any.
    least = mx.finfo(logits.dtype).min
    for index, guide, token in places:
        if _write_allowed(guide, token, allowed[index]):
            floors[index] = least
    if least not in floors:
        return logits
    # Over all rows at once: on a CPU, MLX takes several times as long to gather some rows and scatter them back.
    raised = mx.maximum(logits, mx.array(floors, logits.dtype)[:, None])
    return mx.where(mx.array(allowed), raised, mx.array(-mx.inf, logits.dtype))


class GuideProcessor:
    """A guide as a logits processor of mlx-lm. It waits for the token being fed."""

    def __init__(self, guide: AnswerGuide) -> None:
        self._guide = guide
        self._is_first = True

    def __call__(self, tokens: Any, logits: mx.array) -> mx.array:
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        token = None if self._is_first else int(tokens[-1].item())
        self._is_first = False
        return guided(logits, [(0, self._guide, token)])


def _write_allowed(guide: AnswerGuide, token: int | None, allowed: NDArray[np.bool_]) -> bool:
    """Write into `allowed`, (vocabulary,), which tokens may come next; ``False`` (nothing is written) if all may."""
    try:
        mask = guide.after(token)
    except Exception as error:  # a fault of the guide's, not of the batch
        guide.error = GuideRefused(f"the answer cannot go on: {type(error).__name__}")
        return False
    if mask is None:
        return False
    bits = np.unpackbits(mask.view(np.uint8), count=min(len(allowed), 32 * len(mask)), bitorder="little")
    if not bits.any():
        guide.error = GuideRefused("the answer cannot go on: the model has no token that may follow here")
        return False
    allowed[: len(bits)] = bits
    allowed[len(bits) :] = False
    return True


_LEAST: Final = 1e-30
"""Least temperature and `top_p`. They still draw the likeliest token; what float32 cannot hold would leave no token."""

Filter = Callable[[mx.array], mx.array]
"""From normalised log-probabilities (1, vocabulary) to those that may be drawn."""


class SequenceSampling:
    """The sampler and the processors of one sequence. Implements `generator.Sampling`.

    Attributes:
        sampler: ``None`` for a greedy sequence: all of those share the batch's one argmax.
        error: the exception that one of them raised.
    """

    def __init__(self, request: GenerationRequest, *, n_prompt: int, end_ids: frozenset[int]) -> None:
        self._request = request
        self._n_prompt = n_prompt
        self._end_ids = end_ids
        self._seed = request.seed if request.seed is not None else int.from_bytes(os.urandom(7), "big")
        self.error: Exception | None = None
        self.processors: list[LogitsProcessor] = []
        self.start(0)

    def start(self, n_drawn: int) -> None:
        """Make the callables for a sequence that has generated `n_drawn` tokens."""
        self._sampler = make_sampler(self._request, self._seed, n_drawn)
        self.sampler: SequenceSampling | None = None if self._sampler is None else self
        processors = make_processors(self._request, self._n_prompt, self._end_ids)
        self.processors = [partial(self._process, processor) for processor in processors]

    def __call__(self, logprobs: mx.array) -> mx.array:
        """As `Sampler`, but it does not raise."""
        try:
            if self.error is None and self._sampler is not None:
                return self._sampler(logprobs)
        except Exception as error:
            self.error = error
        greedy: mx.array = mx.argmax(logprobs, axis=-1)
        return greedy

    def take_back(self, n_tokens: int) -> None:
        if self.error is None and self._sampler is not None:
            self._sampler.take_back(n_tokens)

    def _process(self, processor: LogitsProcessor, tokens: mx.array, logits: mx.array) -> mx.array:
        try:
            if self.error is None:
                return processor(tokens, logits)
        except Exception as error:
            self.error = error
        return logits


class Sampler:
    """Draws one sequence's tokens.

    Token i is drawn with a key made of (seed, i) alone, so the same seed and prompt give the same text alone and in any
    batch; mlx-lm's own samplers draw from one random state of the process. Filters are applied in mlx-lm's order:
    top_p, min_p, top_k, on the untempered distribution.
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
        """Forget the newest draws, which will be made again."""
        self._n_drawn -= n_tokens


def make_sampler(request: GenerationRequest, seed: int, n_drawn: int) -> Sampler | None:
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
        logprobs: (vocabulary,), evaluated, and normalised in the model's precision; after bias, penalties and a guide,
            before temperature and filters. Tokens that a guide forbids are never among the likeliest.
    """
    exact = logprobs.astype(mx.float32)
    if logprobs.dtype != mx.float32:  # the logarithm of the sum was rounded: all are off by the same amount
        exact -= mx.logsumexp(exact)
    values = np.asarray(exact)
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
    """A token's text and bytes, as fields of `TopLogprob`."""
    # A token may be part of a character: then its text has a replacement character, and its bytes are not known.
    text = tokenizer.decode([token_id])
    return {"token": text, "bytes": None if "\ufffd" in text else list(text.encode())}

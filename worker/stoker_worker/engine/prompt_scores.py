"""Log-probabilities of one prompt's tokens, from the logits of its prefill. Engine thread.

Owns which of the prompt's tokens are scored, and their scores so far. The generator hands over the logits of each pass;
only the entries that were asked for leave MLX. Nothing here raises into a pass, because other sequences share it.
"""

from typing import Any, Final, Self

import mlx.core as mx
import numpy as np

from stoker_shared.result import PromptLogprobs, TokenLogprob, TopLogprob
from stoker_worker.engine.sampling import about_token
from stoker_worker.ports import GenerationWork, TokenizerPort

MOST_TOKENS: Final = 512
"""Most prompt tokens of all sequences in a pass that scores one: the logits of a pass are in memory all at once, 150 MB
in 16 bits with a vocabulary of 150,000."""

_SLICE_TOKENS: Final = 128
"""Tokens whose log-probabilities are in memory in float32 at a time."""


class PromptScorer:
    """Scores a prompt's tokens from `start` on, and the `n_top` likeliest in the place of each. Implements
    `generator.Scorer`. `error` is the exception that `take` met; the engine fails the sequence with it."""

    def __init__(self, ids: tuple[int, ...], start: int, n_top: int, tokenizer: TokenizerPort) -> None:
        self.error: Exception | None
        self._ids = ids
        self._start = start
        self._n_top = n_top
        self._tokenizer = tokenizer
        self._about: dict[int, dict[str, Any]] = {}
        self._content: list[TokenLogprob | None]
        self.restart()

    @classmethod
    def of(cls, work: GenerationWork, tokenizer: TokenizerPort) -> Self | None:
        """``None`` if the prompt is not to be scored."""
        request = work.request
        if request.prompt_logprobs is None:
            return None
        return cls(work.prompt_ids, request.prompt_logprobs_start, request.prompt_logprobs, tokenizer)

    def restart(self) -> None:
        """Drop the scores: the prompt is prefilled again."""
        self.error = None
        self._content = [None] if self._start == 0 else []

    @property
    def n_reusable(self) -> int:
        """Most tokens of the prompt whose cache may be reused: the logits after the others are needed."""
        return max(0, self._start - 1)

    def take(self, logits: mx.array, n_before: int) -> None:
        """Score tokens by the logits of some of the sequence's tokens.

        Args:
            logits: (tokens, vocabulary), not evaluated; stays so if none of them is needed.
            n_before: tokens of the sequence before them.
        """
        first = self._start + len(self._content) - 1  # its logits are those of the first token without a score
        last = min(n_before + logits.shape[0], len(self._ids) - 1)
        try:
            if first < last and first < n_before:
                raise RuntimeError(f"the logits of prompt token {first} were not handed over")
            for at in range(first, last, _SLICE_TOKENS):
                end = min(at + _SLICE_TOKENS, last)
                self._add(logits[at - n_before : end - n_before], self._ids[at + 1 : end + 1])
        except Exception as error:
            self.error = error

    def result(self) -> PromptLogprobs:
        """Raises `RuntimeError` if some tokens have no scores."""
        if self._start + len(self._content) != len(self._ids):
            raise RuntimeError(f"{len(self._content)} tokens from {self._start} on of {len(self._ids)} have scores")
        return PromptLogprobs(start=self._start, content=self._content)

    def _add(self, logits: mx.array, tokens: tuple[int, ...]) -> None:
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        own = mx.take_along_axis(logprobs, mx.array(tokens)[:, None], axis=-1)[:, 0]
        tops = _likeliest(logprobs, self._n_top)
        top_values = mx.take_along_axis(logprobs, tops, axis=-1)
        mx.eval(own, tops, top_values)
        found = [np.asarray(array).tolist() for array in (own, tops, top_values)]
        for token, logprob, top_ids, values in zip(tokens, *found, strict=True):
            ranked = sorted(zip(top_ids, values, strict=True), key=lambda top: (-top[1], top[0]))
            tops_of_token = [TopLogprob(**self._described(top), logprob=value) for top, value in ranked]
            self._content.append(TokenLogprob(**self._described(token), logprob=logprob, top_logprobs=tops_of_token))

    def _described(self, token: int) -> dict[str, Any]:
        if token not in self._about:
            self._about[token] = about_token(token, self._tokenizer)
        return self._about[token]


def _likeliest(logprobs: mx.array, n: int) -> mx.array:
    """Ids of the `n` largest entries of each row, in any order: (rows, n)."""
    n = min(n, logprobs.shape[-1])
    if n == 1:
        return mx.argmax(logprobs, axis=-1, keepdims=True)
    if n == 0:
        return mx.zeros((logprobs.shape[0], 0), mx.uint32)
    return mx.argpartition(-logprobs, kth=n - 1, axis=-1)[:, :n]

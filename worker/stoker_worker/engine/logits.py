"""What a request changes in its sequence's logits: bias, penalties, no end before `min_tokens`. Engine thread.

A processor keeps no state: it reads the sequence's tokens, which are right after a preemption, a broken step and a
wrong draft too. Processors run in the order of vLLM and mlx-lm: bias, repetition, presence and frequency.
"""

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import make_repetition_penalty

from stoker_shared.request import GenerationRequest

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""From the sequence's tokens so far, prompt included, and its logits (1, vocabulary) to logits."""


def make_processors(request: GenerationRequest, n_prompt: int, end_ids: frozenset[int]) -> list[LogitsProcessor]:
    """
    Args:
        n_prompt: tokens of the prompt; the answer begins after them.
        end_ids: token ids that end the sequence.
    """
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
    """OpenAI's and vLLM's meaning: over all tokens of the answer, and none of the prompt."""

    def penalise(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == n_prompt:
            return logits
        # Counted in float32: 16 bits would round each subtraction.
        counts = mx.zeros(logits.shape[-1]).at[tokens[n_prompt:]].add(1.0)
        return logits - (presence * (counts > 0) + frequency * counts).astype(logits.dtype)

    return penalise


def _no_end(end_ids: frozenset[int], n_tokens: int) -> LogitsProcessor:
    """No end before the sequence has `n_tokens` tokens.

    The least finite logit instead of minus infinity: where a grammar allows nothing but the end, the end is drawn, and
    not a token at random.
    """

    def forbid_end(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size >= n_tokens:
            return logits
        # A model may name an end that it has no logit for.
        ids = mx.array([token_id for token_id in sorted(end_ids) if token_id < logits.shape[-1]], mx.uint32)
        return mx.put_along_axis(logits, ids[None], mx.array(mx.finfo(logits.dtype).min, logits.dtype), axis=-1)

    return forbid_end

"""Applies guides to logits: what a guide forbids is not drawn. Engine thread.

The model's pass is dispatched before, so that it runs while the guides work. Nothing here raises into a step: a guide
that fails notes its `error`, and its row goes on freely for a step.
"""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from stoker_shared.errors import GuideRefused
from stoker_worker.ports import AnswerGuide

Place = tuple[int, AnswerGuide, int | None]
"""The index of a row in the logits, its guide, and the token that is being fed; ``None`` if the guide has had it."""


def guided(logits: mx.array, places: Iterable[Place]) -> mx.array:
    """
    Args:
        logits: (rows, vocabulary).

    Returns:
        The same values but for the rows of `places`, which have minus infinity for tokens that may not come next.
    """
    allowed, floors = np.ones(logits.shape, np.bool_), [-np.inf] * logits.shape[0]
    # What else has made an allowed token impossible, such as `min_tokens`, must not leave a row without any.
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
    """A guide as a logits processor of mlx-lm, which waits for the token that is being fed."""

    def __init__(self, guide: AnswerGuide) -> None:
        self._guide = guide
        self._is_first = True

    def __call__(self, tokens: Any, logits: mx.array) -> mx.array:
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        token = None if self._is_first else int(tokens[-1].item())
        self._is_first = False
        return guided(logits, [(0, self._guide, token)])


def _write_allowed(guide: AnswerGuide, token: int | None, allowed: NDArray[np.bool_]) -> bool:
    """Write into `allowed` (vocabulary,) which tokens may come next; False, and nothing is written, if all may."""
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

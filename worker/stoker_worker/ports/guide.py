"""The interface of a guide: which tokens may come next in one answer. No I/O, no MLX."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stoker_shared.errors import StokerError
from stoker_shared.request import GenerationRequest

TokenMask = NDArray[np.uint32]
"""Bit j of word i is set if token ``32 * i + j`` may come next. Tokens after the last word may not."""


class AnswerGuide(Protocol):
    """One sequence's guide. One thread at a time: the loader makes it, then it is the engine thread's.

    Attributes:
        error: why it cannot go on, which fails its job. It allows every token then.
    """

    error: StokerError | None

    def start(self, generated: Sequence[int]) -> None:
        """Go to the place after these tokens of the answer, from any other place."""
        ...

    def after(self, token: int | None) -> TokenMask | None:
        """Take the answer's next token.

        Args:
            token: ``None``: take none, and stay at this place.

        Returns:
            the tokens that may follow; ``None`` if all may.
        """
        ...

    def fork(self) -> "AnswerGuide":
        """A guide for another answer to the same request, at its beginning."""
        ...


class GuideMaker(Protocol):
    """Makes the guides of a model's answers. Loader thread."""

    def guide_for(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> AnswerGuide | None:
        """``None`` for a request that leaves its answer free.

        Raises:
            GuideRefused: its grammar or schema is wrong, not supported, or too large.
        """
        ...

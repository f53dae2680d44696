"""Llama 3's stretched rotary positions, recognised in a GGUF file by the table that its converter makes of them. Pure.

The file has the table but not the numbers that it was made from, which mlx-lm's config wants. The published models use
two sets of them; a table of any other is refused.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from stoker_shared.errors import ModelNotLoadable

_FACTORS: Final = (8.0, 32.0)
"""Of Llama 3.1 and 3.3, and of 3.2."""
_LOW: Final = 1.0
_HIGH: Final = 4.0
"""Turns of a pair over the original context, below and above which it is stretched wholly, and not at all."""
_CONTEXT: Final = 8192
_TOLERANCE: Final = 1e-4
"""Relative; the table was computed in float32."""


def rope_scaling_of(table: Sequence[float], *, head_dim: int, theta: float) -> dict[str, Any]:
    """mlx-lm's ``rope_scaling`` for the table in ``rope_freqs.weight``: a divisor for each rotated pair.

    Raises:
        ModelNotLoadable: it is no table of Llama 3's.
    """
    for factor in _FACTORS:
        expected = list(_table(factor, head_dim, theta))
        if len(expected) == len(table) and all(
            math.isclose(ours, theirs, rel_tol=_TOLERANCE) for ours, theirs in zip(expected, table, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": _CONTEXT,
            }
    raise ModelNotLoadable("GGUF models with scaled rotary positions are not supported, unless scaled as Llama 3's")


def _table(factor: float, head_dim: int, theta: float) -> Iterator[float]:
    for index in range(0, head_dim, 2):
        turns = _CONTEXT / (2 * math.pi * theta ** (index / head_dim))  # of this pair, over the original context
        if turns > _HIGH:
            yield 1.0
        elif turns < _LOW:
            yield factor
        else:
            share = (turns - _LOW) / (_HIGH - _LOW)
            yield 1 / ((1 - share) / factor + share)

"""The width of the batch, as the rest of the worker sees it. No I/O, no MLX."""

from dataclasses import dataclass
from typing import Final

USUAL_JOBS: Final = 32
"""Most jobs at once when the operator names no number, if the KV memory holds as many. Metal computes quantised
products in tiles of 32 rows: fewer cost nearly as much, one more costs twice as much. On a CPU each row costs less than
the one before, as far as this number at least."""


@dataclass(frozen=True)
class MaxBatch:
    """
    Attributes:
        jobs: most jobs in flight at once.
        why: what decided the number; ``given`` for the operator's own.
    """

    jobs: int
    why: str = "given"


ONE_JOB = MaxBatch(1)

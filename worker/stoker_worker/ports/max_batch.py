"""The width of the batch, as the rest of the worker sees it. No I/O, no MLX."""

from dataclasses import dataclass


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

"""How a model is served: how its sequences run, and whether its caches are kept. Pure; owns the order of the modes.

mlx-lm's batches are not right for every architecture. The proof (`engine/proof.py`) finds the widest mode that is.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Batching(StrEnum):
    """How sequences run, the widest first."""

    ROWS = "in rows"
    """Sequences decode together, and the full attention of each has a cache of its own: nothing is padded."""

    BATCHED = "batched"
    """Sequences of unequal length are prefilled together and decode together, as one rectangle of mlx-lm's."""

    SINGLE_PREFILL = "batched, prefilled one by one"
    """Sequences decode together; each is prefilled alone, for recurrent layers that cannot tell padding from text."""

    ONE_AT_A_TIME = "one at a time"
    """One sequence runs at a time, and its prompt is prefilled in the same chunks as in a batch."""

    AS_MLX_LM = "one at a time, as mlx-lm does it"
    """One sequence runs at a time, and its prompt is cut exactly where `mlx_lm.generate` cuts it: for models whose
    answer depends on the cuts."""


@dataclass(frozen=True)
class ServingMode:
    """
    Attributes:
        memory: whether caches are kept and restored.
        proved: whether the mode was tried on this model; ``False`` after `--skip-proof`.
    """

    batching: Batching = Batching.ROWS
    memory: bool = True
    proved: bool = True

    def __str__(self) -> str:
        text = str(self.batching) if self.memory else f"{self.batching}, without memory"
        return text if self.proved else f"{text}, not proved"


WIDEST: Final = ServingMode()
WIDEST_FIRST: Final = (
    *(ServingMode(batching) for batching in Batching if batching != Batching.AS_MLX_LM),
    *(ServingMode(batching, memory=False) for batching in Batching),
)
"""Modes with memory come first: a restored history saves an agent more than a wide batch does. The last mode is
mlx-lm's own way."""

"""How a model is served: how its rows run, and whether its caches are kept. Pure; owns the order of the modes.

mlx-lm's batches are not right for every architecture. The proof (`engine/proof.py`) finds the widest mode that is.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Rows(StrEnum):
    """How rows run, the widest first."""

    BATCHED = "batched"
    """Rows of unequal length are prefilled together and decode together."""

    SINGLE_PREFILL = "batched, prefilled one by one"
    """Rows decode together; each is prefilled alone (recurrent layers that cannot tell padding from text)."""

    ALONE = "one at a time"
    """One row at a time, in chunks of prefill like any other."""

    WHOLE = "one at a time, as mlx-lm does it"
    """One row at a time, cut just where `mlx_lm.generate` cuts: for models whose answer depends on the cuts."""


@dataclass(frozen=True)
class ServingMode:
    """
    Attributes:
        memory: whether caches are kept and restored.
        proved: whether it was tried on this model, and not just assumed (`--skip-proof`).
    """

    rows: Rows = Rows.BATCHED
    memory: bool = True
    proved: bool = True

    def __str__(self) -> str:
        text = str(self.rows) if self.memory else f"{self.rows}, without memory"
        return text if self.proved else f"{text}, not proved"


WIDEST: Final = ServingMode()
WIDEST_FIRST: Final = (
    *(ServingMode(rows) for rows in (Rows.BATCHED, Rows.SINGLE_PREFILL, Rows.ALONE)),
    *(ServingMode(rows, memory=False) for rows in Rows),
)
"""Memory first: for agents a restored history saves more than a wide batch does. The last mode is mlx-lm's own way."""

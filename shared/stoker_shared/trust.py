"""How far a model is trusted with a class of tasks: the counts of verdicts, their decay and a lower bound. Pure.

Both sides use it. Redis has the counts (`TRUST_KEY`); workers add to them with a script that computes the same.
"""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Final, Self

from pydantic import AfterValidator

KEPT: Final = 0.99
"""A verdict weighs 1, and with each later one this share of what it weighed. So all of a pair come to 100 at most, and
a model that turns bad is found out after some dozens of verdicts."""

MOST_PAIRS: Final = 10_000
"""Pairs of a model and a class that are counted; producers read all of them twice a second."""

_Z: Final = 1.6448536269514722
"""Of a bound that the true rate is above in 95 of 100 cases."""


@dataclass(frozen=True)
class Counts:
    """Weights of the accepted and of the rejected answers."""

    accepted: float = 0.0
    rejected: float = 0.0

    @classmethod
    def parsed(cls, value: bytes | None) -> Self:
        """From the text in Redis; no counts if it cannot be read."""
        try:
            accepted, rejected = map(float, (value or b"").decode().split(" "))
        except ValueError:
            return cls()
        if not math.isfinite(accepted + rejected) or min(accepted, rejected) < 0:
            return cls()
        return cls(accepted, rejected)

    def __str__(self) -> str:
        return f"{self.accepted:.4f} {self.rejected:.4f}"

    @property
    def total(self) -> float:
        return self.accepted + self.rejected

    @property
    def rate(self) -> float:
        """The share of accepted answers; 0 before the first verdict."""
        return self.accepted / self.total if self.total else 0.0

    def after(self, *, accepted: bool) -> "Counts":
        """With one more verdict."""
        return Counts(self.accepted * KEPT + accepted, self.rejected * KEPT + (not accepted))

    def corrected(self, *, accepted: bool) -> "Counts":
        """With one of the verdicts turned round, to `accepted`."""
        change = 1 if accepted else -1
        return Counts(max(0.0, self.accepted + change), max(0.0, self.rejected - change))

    def lower_bound(self) -> float:
        """Wilson's lower bound of the rate of acceptance; 0 before the first verdict."""
        n, z2 = self.total, _Z * _Z
        if n <= 0:
            return 0.0
        spread = _Z * math.sqrt(self.rate * self.rejected + z2 / 4)
        return max(0.0, (self.accepted + z2 / 2 - spread) / (n + z2))


NO_COUNTS: Final = Counts()


def _without_spaces(label: str) -> str:
    if not re.fullmatch(r"[!-~]{1,64}", label):
        raise ValueError("must be 1 to 64 ASCII characters without spaces")
    return label


TaskLabel = Annotated[str, AfterValidator(_without_spaces)]
"""The name of a class of tasks, as a caller gives it."""


def field_of(model: str, task: str) -> str:
    """The field of `TRUST_KEY` for a model and a class, which has no space."""
    return f"{task} {model}"


def model_and_task(field: str) -> tuple[str, str]:
    """The model and the class of a field."""
    task, _, model = field.partition(" ")
    return model, task

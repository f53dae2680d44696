"""What the models did in a batch: attempts, verdicts, tokens and seconds, beside those of the largest alone. Pure.

Made from the answers in the output file, so that it is whole after the command was run in several pieces.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stoker.tables import Table
from stoker_shared.result import Attempt


@dataclass
class ModelPart:
    """Sums over one model's attempts. `seconds`: prefill and decode."""

    asked: int = 0
    accepted: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, attempt: Attempt) -> None:
        self.asked += 1
        self.accepted += attempt.accepted
        self.tokens += attempt.prompt_tokens + attempt.completion_tokens
        self.seconds += attempt.seconds


@dataclass
class Attempts:
    """
    Attributes:
        models: by name; empty for a batch without checks.
        n_lines: lines that were checked.
        n_accepted: those whose answer passed.
    """

    models: dict[str, ModelPart] = field(default_factory=dict)
    n_lines: int = 0
    n_accepted: int = 0

    def note(self, answer: Mapping[str, Any]) -> None:
        """Add one line of the output file."""
        found = ((answer["response"] or {}).get("body") or {}).get("attempts")
        if not found:
            return
        attempts = [Attempt.model_validate(attempt) for attempt in found]
        self.n_lines += 1
        self.n_accepted += attempts[-1].accepted
        for attempt in attempts:
            self.models.setdefault(attempt.model, ModelPart()).add(attempt)

    @property
    def largest(self) -> str | None:
        """The model whose tokens take the longest."""
        known = {name: part.seconds / part.tokens for name, part in self.models.items() if part.tokens}
        return max(known, key=lambda name: known[name]) if known else None

    def alone(self, model: str) -> tuple[float, float]:
        """Tokens and seconds that this model alone would have needed, by its mean attempt here."""
        part = self.models[model]
        return part.tokens / part.asked * self.n_lines, part.seconds / part.asked * self.n_lines

    def as_json(self) -> dict[str, Any]:
        alone: dict[str, Any] | None = None
        if (largest := self.largest) is not None:
            tokens, seconds = self.alone(largest)
            alone = {"model": largest, "tokens": round(tokens), "seconds": round(seconds, 3)}
        return {
            "models": {name: asdict(part) for name, part in self.models.items()},
            "checked": self.n_lines,
            "accepted": self.n_accepted,
            "largest_alone": alone,
        }

    def text(self) -> str:
        rows = [
            [name, f"{part.asked:,}", f"{part.accepted:,}", f"{part.tokens:,}", f"{part.seconds:,.1f}"]
            for name, part in self.models.items()
        ]
        lines = [Table(["model", "asked", "accepted", "tokens", "seconds"], rows, range(1, 5)).text()]
        lines.append(f"{self.n_accepted:,} of {self.n_lines:,} answers passed the check")
        tokens, seconds = (sum(getattr(part, name) for part in self.models.values()) for name in ("tokens", "seconds"))
        if (largest := self.largest) is not None and all(alone := self.alone(largest)):
            share = f"{100 * seconds / alone[1]:.0f} % of the seconds and {100 * tokens / alone[0]:.0f} % of the tokens"
            lines.append(f"{share} that {largest} alone would have needed, by its mean attempt here")
        return "\n".join(lines)
